"""What a job is checked for before it is submitted, what is said of it, and what sbatch is told; no SLURM is needed.

``sbatch`` is a script that keeps what it was called with; what submitit writes for it is submitit's.
"""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from forked import ForkedPrograms
from lerobot_writer import write_lerobot
from openvla_checkpoint import make_checkpoint
from pi0_checkpoint import make_checkpoint as make_pi0_checkpoint
from running import composed, main_of
from safetensors.torch import load_file, save_file

from vla_algos.run import read_config
from vla_algos.run.launcher_settings import check_job
from vla_algos.run.needs import Needs
from vla_algos.run.rehearsal import rehearse
from vla_common.program import WRONG_USE
from vla_envs import make_spec
from vla_policies import SmallVLA, SmallVLAConfig, make_policy
from vla_policies.checkpoint.weights import Entry, save_weights
from vla_policies.registry import check_policy

AROUND = "launcher.check=false"
OPENVLA = "env=libero eval=benchmark policy=openvla policy.unnorm_key=golden_ds policy.image_resize=bicubic"
PI0 = "env=libero eval=benchmark policy=pi0 policy.config_name=pi0_libero"
SBATCH = """#!/bin/sh
echo "$@" >> "$SUBMITTED"
echo "Submitted batch job 7"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Programs beside an sbatch that keeps what it is called with, and the file of that."""
    folder = tmp_path_factory.mktemp("cluster")
    for name, script in (("sbatch", SBATCH), ("srun", SBATCH), ("squeue", SBATCH)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    programs = ForkedPrograms()
    yield programs, folder
    programs.close()


@pytest.fixture
def submit(cluster, tmp_path):
    """Submits a recipe; returns what was printed, and the batch script, ``None`` if nothing was submitted."""
    programs, folder = cluster

    def run(typed, launcher="launcher=slurm"):
        name, *settings = typed.split() if isinstance(typed, str) else typed
        submitted = tmp_path / "submitted"
        path = f"{folder}:/usr/bin:/bin"
        place = tmp_path / "run"
        done = programs.run(
            name,
            launcher,
            *settings,
            f"hydra.run.dir={place}",
            cwd=tmp_path,
            PATH=path,
            SUBMITTED=str(submitted),
            HF_HUB_OFFLINE="1",
        )
        scripts = list((place / "slurm").glob("*.sh"))
        assert submitted.exists() == bool(scripts)
        return done, scripts[0].read_text() if scripts else None

    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of checkpoints and demonstrations, some of them wrong."""
    folder = tmp_path_factory.mktemp("place")
    SmallVLA(SmallVLAConfig((-1.0,) * 4, (1.0,) * 4, 4)).save_pretrained(folder / "small")
    SmallVLA(SmallVLAConfig((-1.0,) * 7, (1.0,) * 7, 8)).save_pretrained(folder / "seven")
    make_checkpoint(folder / "openvla")
    make_pi0_checkpoint(folder / "pi0", horizon=50)
    weights = load_file(folder / "openvla" / "model.safetensors")
    shutil.copytree(folder / "openvla", folder / "sharded")
    (folder / "sharded" / "model.safetensors").unlink()
    save_weights(weights, folder / "sharded", max_shard_size=200_000)
    shutil.copytree(folder / "sharded", folder / "half")
    sorted((folder / "half").glob("model-*-of-*"))[1].unlink()
    for name, change in (("lacking", None), ("reshaped", weights["language_model.model.norm.weight"][:3].clone())):
        shutil.copytree(folder / "openvla", folder / name)
        changed = {**weights, "language_model.model.norm.weight": change}
        save_file(
            {key: value for key, value in changed.items() if value is not None}, folder / name / "model.safetensors"
        )
    shutil.copytree(folder / "openvla", folder / "bad_config")
    (folder / "bad_config" / "config.json").write_text("{bad")
    shutil.copytree(folder / "openvla", folder / "no_statistics")
    (folder / "no_statistics" / "dataset_statistics.json").write_text("{}")
    (folder / "empty").mkdir()
    (folder / "letters").mkdir()
    (folder / "letters" / "a.txt").write_text("a")
    states, actions = np.zeros((6, 4), np.float32), np.zeros((6, 9), np.float32)
    images = {"observation.images.front": np.zeros((6, 16, 16, 3), np.uint8)}
    write_lerobot(folder / "lerobot", [{"task": "fly", "states": states, "actions": actions, "images": images}])
    return folder


WRONG = [  # what is typed, and the words of the line
    ("ppo policy.checkpoint={place}/nope", "no folder .*nope; pass a checkpoint folder or a hub id"),
    ("ppo policy.checkpoint={place}/empty", r"is not a policy folder: it has no config\.json"),
    ("ppo policy.checkpoint={place}/small policy.chunk_size=10", "was trained with chunk_size=5"),
    ("ppo policy.checkpoint={place}/seven", "the policy has 7 action and 8 state dimensions, metaworld/.* has 4 and 4"),
    ("evaluate policy.checkpoint={place}/seven", "the policy has 7 action and 8 state dimensions"),
    ("evaluate", "which policy"),
    ("evaluate {pi0} policy.checkpoint={place}/openvla", "is a checkpoint of openvla, not of pi0; type policy=openvla"),
    ("evaluate {openvla} policy.checkpoint={place}/pi0", "is a checkpoint of pi0, not of openvla; type policy=pi0"),
    ("evaluate {openvla} policy.checkpoint={place}/half", "lacks 1 of [0-9]+ shards of its weights: model-00002-of"),
    ("evaluate {openvla} policy.checkpoint={place}/lacking", r"it lacks language_model\.model\.norm\.weight"),
    ("evaluate {openvla} policy.checkpoint={place}/reshaped", r"has in another shape .*norm\.weight \[3\] instead of"),
    ("evaluate {openvla} policy.checkpoint={place}/bad_config", r"config\.json is not JSON|unknown model"),
    ("evaluate {openvla} policy.checkpoint={place}/no_statistics", "unnorm_key|statistics"),
    (
        "evaluate {openvla} policy.checkpoint={place}/openvla policy.unnorm_key=bridge",
        r"unnorm_key.*\['golden_ds'\]",
    ),
    (
        "evaluate {openvla} policy.checkpoint={place}/openvla policy.lora_adapter={place}/letters",
        r"is not a LoRA adapter: it has no adapter_config\.json",
    ),
    ("evaluate {pi0} policy.checkpoint={place}/pi0 policy.norm_stats_id=libero", r"set it to one of \['tiny'\]"),
    ("evaluate policy.checkpoint={place}/small ablation=swapped_instructions", "swapping instructions needs tasks"),
    ("evaluate policy.checkpoint={place}/small ablation=[other_trial,other_trial]", "stands there twice"),
    ("evaluate env=libero policy.checkpoint={place}/seven eval.trials=51", "has 50 initial states per task, got"),
    ("ppo eval.mean_of=[nope]", r"unknown group in eval\.mean_of 'nope'"),
    ("ppo eval.seed=0 seed=0", r"eval\.seed=0 is the family of initial states that this run trains on"),
    ("ppo launcher.seeds=[1,9000000]", r"eval\.seed=9000000 is the family"),
    ("sft demonstrations.folder={place}/letters", "letters"),
    ("sft demonstrations.folder={place}/lerobot", "lerobot"),
    ("ppo env=libero eval=benchmark", "libero/spatial has no scripted expert"),
    ("grpo group_size=1", "group_size is 1: a group of one"),
    ("grpo env.group_size=2", "type group_size=2"),
    ("ppo pipeline.stages=3 env.num_envs=16", "stages=3: num_envs=16 cannot be divided"),
    (
        "ppo launcher.tasks_per_node=8 env.num_envs=63",
        r"env\.num_envs=63 cannot be shared by the 8 processes of .*; try env\.num_envs=64",
    ),
    ("ppo optim.lr=abc", r"optim\.lr=abc: must be a valid number"),
    ("ppo gae.reward_level=action", "needs 5 values per decision, the policy has 1"),
]
SHORT = {"openvla": OPENVLA, "pi0": PI0}


@pytest.mark.parametrize(("typed", "message"), WRONG, ids=lambda text: text if text[0] in "pegs" else "")
def test_what_would_fail_on_the_node_is_refused_here(typed, message, submit, place, tmp_path):
    for name, stands_for in SHORT.items():
        typed = typed.replace(f"{{{name}}}", stands_for)
    typed = typed.replace("{place}", str(place))
    done, script = submit(typed)
    assert script is None, done.stdout
    assert done.returncode == WRONG_USE
    assert done.stderr.startswith("error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert re.search(message, done.stderr), done.stderr
    left = {path.name for path in (tmp_path / "run").glob("*")}
    assert left <= {f"{typed.split()[0]}.log"}, "nothing but Hydra's log is written"


@pytest.mark.parametrize("typed", ["ppo policy.checkpoint={place}/nope", "ppo policy.checkpoint={place}/seven"])
def test_it_is_the_check_of_a_run_here(typed, submit, place):
    typed = typed.replace("{place}", str(place))
    (here, _), (there, _) = submit(typed, "launcher=local"), submit(typed)
    assert there.stderr.startswith(here.stderr.rstrip("\n"))
    assert (AROUND in there.stderr) == ("nope" in typed), "where the nodes might see other files"
    assert AROUND not in here.stderr


@pytest.mark.parametrize(
    "typed",
    ["{openvla} policy.checkpoint={place}/openvla", "{openvla} policy.checkpoint={place}/sharded", "{pi0}", "{small}"],
)
def test_what_is_right_is_submitted(typed, submit, place):
    stands_for = {
        "openvla": OPENVLA,
        "pi0": f"{PI0} policy.checkpoint={place}/pi0",
        "small": f"policy.checkpoint={place}/small ablation=blank_images",
        "place": place,
    }
    done, script = submit(f"evaluate {typed.format(**stands_for)}")
    assert script, done.stderr
    assert done.returncode == 0
    assert "job 7" in done.stdout


def test_a_folder_of_another_run_is_refused(submit, tmp_path):
    """Of what is in it already only another run counts: whoever submits the same again resumes."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    for seed in ("", "launcher.seeds=[3]"):
        place = tmp_path / "run" / ("seed3" if seed else "")
        (place / checkpoint.relative_to(tmp_path / "run")).mkdir(parents=True)
        (place / "config.yaml").write_text("recipe: ppo\nseed: 3\niterations: 7\n")
        done, script = submit(f"ppo {seed}")
        assert script is None
        assert re.search(rf"error: {re.escape(str(place))} has a run of other settings", done.stderr), done.stderr
        (place / "config.yaml").unlink()


def test_what_only_the_nodes_see_is_submitted_if_asked_for(submit):
    done, script = submit(f"ppo policy.checkpoint=/only/there {AROUND}")
    assert script, done.stderr


def test_a_hub_id_that_is_not_here_is_said_to_be_unchecked(submit):
    done, script = submit(f"evaluate {OPENVLA} policy.checkpoint=openvla/openvla-7b")
    assert script, done.stderr
    assert "openvla/openvla-7b: is a hub id whose files are not all here, and is not checked" in done.stdout


def test_runs_of_a_sweep_are_checked_before_the_first(cluster, place, tmp_path):
    programs, _ = cluster
    settings = [
        "-m",
        "env=metaworld_button",
        f"policy.checkpoint={place}/small,{place}/seven",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    ]
    done = programs.run("evaluate", *settings, cwd=tmp_path)
    assert re.match(r"error: .*policy\.checkpoint=.*/seven .*: the policy has 7 action", done.stderr), done.stderr
    assert not (tmp_path / "sweep" / "0").exists()


def test_no_tensor_of_a_checkpoint_is_read(place, monkeypatch):
    """Nor a simulator: the spec is all that is known of the environment."""

    def refuse(*_):
        raise AssertionError("a tensor is read")

    monkeypatch.setattr(Entry, "read", refuse)
    monkeypatch.setattr("vla_common.checksums.digest", refuse)
    spec = make_spec("libero/spatial")
    options = {"family": "openvla", "unnorm_key": "golden_ds", "image_resize": "bicubic"}
    for name in ("openvla", "sharded"):
        policy = check_policy(spec, checkpoint=place / name, **options)
        assert {each.device.type for each in policy.model.parameters()} == {"meta"}
    adapted = check_policy(spec, checkpoint=place / "openvla", lora_rank=4, **options)
    assert any("lora_A" in name for name, _ in adapted.named_parameters())
    with pytest.raises(AssertionError, match="a tensor is read"):
        make_policy(spec, checkpoint=place / "openvla", **options)


def test_no_simulator_is_imported(cluster, tmp_path):
    """Those of them that nobody else imports: TorchRL looks for MuJoCo by itself."""
    file = tmp_path / "rehearsal.py"
    file.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from running import composed, main_of\n"
        "from vla_algos.run import read_config\n"
        "from vla_algos.run.rehearsal import rehearse\n"
        "recipe = main_of('ppo').__globals__\n"
        "for typed in sys.argv[1:]:\n"
        "    config = composed('ppo', ['launcher=slurm', *typed.split()], Path('run'))\n"
        "    run = rehearse(recipe['train'], read_config(config, recipe['SETTINGS']), Path('run'))\n"
        "    print(run.spec.id)\n"
        "print({'metaworld', 'robosuite', 'sapien', 'mani_skill', 'pybullet'} & sys.modules.keys())\n"
    )
    environments = [
        "env=metaworld_button",
        "env=libero eval=benchmark sft=none eval.trials=2",
        "env=maniskill sft=none",
    ]
    environments += ["env=calvin sft=none", "env=robotwin_bell policy.chunk_size=4"]
    done = cluster[0].run(file, *environments, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
    assert len(done.stdout.splitlines()) == 1 + len(environments)


def test_heads_in_files_of_their_own_are_compared(tmp_path):
    make_checkpoint(tmp_path / "oft", heads=True)
    settings = {"family": "openvla_oft", "checkpoint": tmp_path / "oft", "unnorm_key": "golden_ds"}
    settings |= {"num_action_chunks": 2, "use_proprio": False}
    spec = make_spec("libero/spatial")
    assert check_policy(spec, **settings).action_head is not None
    (file,) = (tmp_path / "oft").glob("action_head--*")
    content = torch.load(file, weights_only=True)
    torch.save({name: tensor[:1] for name, tensor in content.items()}, file)
    with pytest.raises(ValueError, match=r"action_head--.* has in another shape"):
        check_policy(spec, **settings)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="has no action_head--"):
        check_policy(spec, head="l1", **settings)


def test_sbatch_is_told_what_extra_says(submit):
    extra = "launcher.extra={reservation:x,exclude:'node[7-9]',mail-type:END,exclusive:true,gres:'gpu:a100:4'}"
    done, script = submit(["ppo", "launcher.partition=gpu", extra])
    assert script, done.stderr
    lines = {line for line in script.splitlines() if line.startswith("#SBATCH")}
    expected = ["--reservation=x", "--exclude='node[7-9]'", "--mail-type=END", "--exclusive", "--gres=gpu:a100:4"]
    expected += ["--partition=gpu", "--requeue", "--mem=16GB", "--cpus-per-task=4"]
    assert {f"#SBATCH {option}" for option in expected} <= lines


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"qos": "long"}, "there is a setting for it; type launcher.qos=long"),
        ({"cpus-per-task": 8}, "there is a setting for it; type launcher.cpus=VALUE"),
        ({"time": "1:00:00"}, "type launcher.minutes=VALUE"),
        ({"gres": "gpu:a100:4"}, "launcher.gpus=2 says it already; type launcher.gpus=0"),
        ({"mem_per_cpu": "4G"}, "launcher.memory_gb=16 says it already; type launcher.memory_gb=0"),
        ({"output": "log.txt"}, "leave it out"),
        ({"--exclude": "node7"}, "type its long name without --"),
        ({"exclude": "node7\n#SBATCH --uid=0"}, "must be a text or a number"),
        ({"exclusive": False}, "or left out"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_extra_has_no_other_way_to_say_a_setting(extra, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_job({"nodes": 1, "tasks_per_node": 1, "gpus": 2, "memory_gb": 16, "extra": extra}, {})


@pytest.mark.parametrize(
    ("typed", "needed", "warnings"),
    [
        (
            "launcher.tasks_per_node=2 env.num_envs=16",
            "16 simulators in 8 processes on 8 cores 3.0, 2 processes of the recipe 0.8",
            "",
        ),
        ("env.num_envs=16 launcher.memory_gb=1", "needs about 2.2 GB", "launcher.memory_gb=1 is less than that; type"),
        ("env.num_workers=8", "16 simulators in 8 processes", "launcher.cpus=4: 8 processes simulate on 4 cores of a"),
        (
            "launcher.cpus=1 env.num_envs=64",
            "64 simulators in 1 process on 1 core",
            "launcher.cpus=1: 64 simulators share 1 core of a node, and a decision waits for 64 of them one after the "
            "other; type launcher.cpus=16, or fewer",
        ),
        ("launcher.cpus=16 env.num_envs=64", "64 simulators in 16 processes on 16 cores", ""),
        ("env.num_workers=8 launcher.memory_gb=0 launcher.cpus=null", "in 8 processes", ""),
    ],
)
def test_what_a_job_takes_is_said_before_it_is_submitted(typed, needed, warnings, submit):
    done, script = submit(f"ppo {typed}")
    assert script, done.stderr
    assert needed in done.stdout
    assert ("warning" in done.stdout) == bool(warnings)
    assert warnings in done.stdout


@pytest.mark.parametrize("unknown", [{"worker_gb": None}, {"batched": "module:Class"}])
def test_the_policy_is_counted_where_the_simulators_cannot_be(unknown, tmp_path):
    """Of a benchmark that nobody measured, and of one that simulates on the GPU."""
    globals_of = main_of("ppo").__globals__
    typed = ["launcher=slurm", "launcher.cpus=1", "policy.dim=1024", "policy.layers=12"]
    settings = read_config(composed("ppo", typed, tmp_path), globals_of["SETTINGS"])
    run = rehearse(globals_of["train"], settings, tmp_path)
    known = Needs.of(run)
    run.spec = replace(run.spec, **unknown)
    needs = Needs.of(run)
    assert needs.total == pytest.approx(known.total - known.simulating)
    said = list(needs.describe(settings.launcher))
    assert "simulators and batches not counted: 1 process of the recipe 0.4, the policy in host memory" in said[0]
    assert any("simulators share 1 core" in line for line in said) == ("worker_gb" in unknown)


def test_a_rehearsal_draws_no_random_numbers(tmp_path):
    state = torch.get_rng_state()
    globals_of = main_of("ppo").__globals__
    settings = read_config(composed("ppo", ["launcher=slurm"], tmp_path), globals_of["SETTINGS"])
    run = rehearse(globals_of["train"], settings, tmp_path)
    assert run.policy.chunk_size == 5
    assert torch.equal(torch.get_rng_state(), state)
