"""Demonstrations on disk: what is in a folder, who may read it, what is held out, and that runs do not notice."""

import json
import pickle
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from running import TOY, TOY_OF, composed, differing, main_of, metrics
from tensordict import TensorDict

from tests.storm.toy import make_toy_env, tiny_policy, toy_spec
from vla_algos import BehaviourCloning, for_policy, load_demonstrations, record_demonstrations, write_demonstrations
from vla_algos.demonstrations import FACTS
from vla_algos.files import FolderInUse, lock_folder
from vla_algos.lerobot.demonstrations import LeRobotDemonstrations
from vla_algos.run.rollouts import write_rollouts
from vla_algos.samples import Samples, is_held_out
from vla_common import keys
from vla_common.texts import decode
from vla_envs import Episode, make_env, make_spec
from vla_envs.experts import demonstrate, noise_of_dimensions
from vla_policies import make_policy

TASKS = "metaworld/button-press-topdown-v3+reach-v3"
OPTIONS = {"image_size": 32, "render_quality": "minimal"}
SETTINGS = {"stride": 4, "noise": 0.1, "max_steps": 80}
SMALL = {"family": "small", "dim": 16, "layers": 1, "heads": 2, "channels": [4, 4, 4], "keypoints": 4}
OF_SET = ["demonstrations.folder=SET", "env.id=metaworld/reach-v3", "env.reset_ranges=null"]
EPISODES = [Episode(task, trial, 7) for task in range(2) for trial in range(3)]

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder, and the same demonstrations in memory."""
    folder = tmp_path_factory.mktemp("demonstrations") / "set"
    env = make_env(TASKS, 2, 5, num_workers=2, **OPTIONS)
    torch.manual_seed(0)
    policy = make_policy(env.simulator_spec, **SMALL)
    write_demonstrations(folder, env, EPISODES, chunk_size=5, **SETTINGS)
    memory = record_demonstrations(env, policy, EPISODES, **SETTINGS)
    env.close()
    return folder, memory, policy, env.simulator_spec


@pytest.fixture
def copied(made, tmp_path):
    """A copy of the folder, to be spoilt."""
    folder = tmp_path / "set"
    subprocess.run(["cp", "-r", made[0], folder], check=True)
    return folder


def test_disk_and_memory_hold_the_same(made):
    folder, memory, policy, spec = made
    samples = for_policy(load_demonstrations(folder), policy, spec)
    entries = set(memory.keys())
    assert set(samples.data.keys()) == entries
    for key in entries:
        assert torch.equal(samples[key], memory[key]), key
    assert (TensorDict.load_memmap(folder)[keys.STATES] == memory[keys.STATES]).all()


def test_numpy_alone_can_read_it(made):
    """As docs/how-to/demonstrations.md says; without torch."""
    folder, memory, _, _ = made
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "demonstrations.md").read_text()
    [code] = re.findall(r"```python\n(import json.*?)```", text, re.DOTALL)
    code = code.replace("FOLDER", str(folder))
    code += "\nimport sys; assert 'torch' not in sys.modules; print(frames['images'].astype(int).sum())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) == int(memory[keys.IMAGES].long().sum())


def test_rows_say_whose_they_are_and_when(made):
    """Each row is what the expert saw: the same episode, solved by itself."""
    folder, _, _, spec = made
    found = load_demonstrations(folder)
    frames, simulator = found.frames, spec.make()
    assert frames[keys.EPISODE].unique().tolist() == list(range(found.facts["demonstrations"]))
    assert (frames[keys.EPISODE].diff() >= 0).all()
    for number in (0, found.facts["demonstrations"] - 1):
        rows = frames[frames[keys.EPISODE] == number]
        episode = Episode(int(rows[keys.TASK_ID][0]), int(rows[keys.TRIAL_ID][0]), 7)
        alone = demonstrate(simulator, episode, chunk_size=5, **SETTINGS)
        assert rows[keys.STEP].tolist() == list(range(0, alone[keys.EPISODE_LEN], 4)) == alone[keys.STEP].tolist()
        assert (rows[keys.EPISODE_LEN] == alone[keys.EPISODE_LEN]).all()
        assert (rows[keys.FINAL_STATES].numpy() == alone[keys.FINAL_STATES]).all()
        assert (rows[keys.IMAGES].numpy() == alone[keys.IMAGES]).all()
        assert decode(rows[keys.TASK_DESCRIPTIONS]) == [spec.task_of(episode).instruction] * len(rows)
        ends = rows[keys.STEP] + rows[keys.STEP_MASK].sum(1)
        assert ends[-1] == alone[keys.EPISODE_LEN]
    simulator.close()
    tried = [(task["tried"], task["solved"], task["within_horizon"]) for task in found.facts["tasks"]]
    assert all(task[0] == 3 >= task[1] == task[2] for task in tried)  # 80 steps are within the horizon


def test_a_policy_with_shorter_chunks_and_fewer_tasks_reads_its_part(made):
    folder, memory, _, _ = made
    spec = make_spec("metaworld/reach-v3", **OPTIONS)
    policy = make_policy(spec, chunk_size=2, **SMALL)
    samples = for_policy(load_demonstrations(folder), policy, spec)
    own = memory[memory[keys.TASK_ID] == 1]
    assert len(samples) == len(own)
    assert (samples[keys.TASK_ID] == 0).all()  # its number here
    assert torch.equal(samples[keys.ACTION], own[keys.ACTION][:, :2])
    batch = samples[torch.tensor([3, 0])]
    assert torch.equal(batch[keys.IMAGES], own[keys.IMAGES][[3, 0]])
    assert torch.equal(batch[keys.STEP_MASK], own[keys.STEP_MASK][[3, 0], :2])
    assert 0 < BehaviourCloning(policy, samples, steps=1).step() < 10


@pytest.mark.parametrize(
    ("options", "chunk_size", "message"),
    [
        ({"image_size": 48}, 5, r"images of \[32, 32\] pixels.*\[48, 48\] here; type image_size=\[32,32\]"),
        ({}, 6, "chunks of at most 5, the policy has 6; make the policy with chunk_size=5"),
        ({"suite": "metaworld/door-open-v3"}, 5, "door-open-v3 is not among its tasks"),
        ({"state_dim": 5}, 5, "have 4 states, .* has 5 here; take the environment that was recorded, metaworld/but"),
        ({"action_high": (1.0,) * 3 + (2.0,)}, 5, r"actions up to \[1.0, 1.0, 1.0, 1.0\], .* has \[1.0, .*, 2.0\]"),
        ({"wrist_image_shape": (1, 32, 32)}, 5, r"wrist images None, .* has \[1, 32, 32\] here; choose the cameras"),
        ({"control_frequency": None}, 5, "chunks as one motion: False"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(made, options, chunk_size, message):
    made_with = {**OPTIONS, **{name: options[name] for name in ("image_size",) if name in options}}
    spec = make_spec(options.get("suite", TASKS), **made_with)
    others = {name: value for name, value in options.items() if name not in ("image_size", "suite")}
    with pytest.raises(ValueError, match=message) as refusal:
        load_demonstrations(made[0]).check(replace(spec, **others), chunk_size)
    assert "\n" not in str(refusal.value)
    assert "demonstrations.folder=FOLDER" in str(refusal.value)


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


def with_pickle(folder):
    (folder / "deeper").mkdir()
    (folder / "deeper" / "other.pickle").write_bytes(pickle.dumps(Evil()))


def other_format(folder):
    facts = json.loads((folder / FACTS).read_text())
    (folder / FACTS).write_text(json.dumps({**facts, "format": 2}))


def shortened(folder):
    with open(folder / "images.memmap", "r+b") as file:
        file.truncate(1000)


def another_type(folder):
    meta = json.loads((folder / "meta.json").read_text())
    meta["states"]["dtype"] = "torch.float64"
    (folder / "meta.json").write_text(json.dumps(meta))


def nested(folder):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "deeper": {"type": "NonTensorData"}}))


def without_tasks(folder):
    facts = json.loads((folder / FACTS).read_text())
    del facts["tasks"]
    (folder / FACTS).write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / FACTS).unlink(), "no demonstrations are here, dataset.json is missing; take another"),
        (with_pickle, "other.pickle may hold code, which is never loaded; remove it"),
        (other_format, "of kind .* and format 2, this version reads .* of format 1"),
        (shortened, r"damaged, images.memmap has 1,000 bytes, not"),
        (another_type, r"damaged, meta.json says states is \('torch.float64'"),
        (nested, "damaged, "),
        (without_tasks, "damaged, dataset.json or meta.json lacks 'tasks'"),
        (lambda folder: (folder / FACTS).write_text("{"), "damaged, .*Expecting property name"),
        (lambda folder: (folder / FACTS).write_text("[]"), "damaged, "),
        (lambda folder: (folder / "states.memmap").unlink(), "damaged, states.memmap has 0 bytes"),
    ],
)
def test_what_is_no_whole_data_set_is_refused_and_runs_no_code(copied, spoil, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    spoil(copied)
    with pytest.raises(ValueError, match=message) as refusal:
        load_demonstrations(copied)
    assert "\n" not in str(refusal.value)
    assert not Path("executed").exists()


def test_samples_cannot_change_the_file(copied):
    before = (copied / "images.memmap").read_bytes()
    for path in copied.iterdir():
        path.chmod(0o400)
    load_demonstrations(copied).frames[keys.IMAGES].zero_()
    assert (copied / "images.memmap").read_bytes() == before


def test_the_order_does_not_depend_on_who_was_faster(tmp_path):
    """Episodes as they come from several workers, in no order of tasks; one crashes again and again."""
    spec = toy_spec({3: ("raise", 0, 0)}, tmp_path)
    episodes = [Episode(n % 2, n // 2, 1) for n in range(16)]
    found = []
    for workers in (1, 3):
        env, folder = make_toy_env(spec, 3, workers), tmp_path / f"set_{workers}"
        with pytest.warns(UserWarning, match="2 of 16 demonstrations crashed"):
            write_demonstrations(folder, env, episodes, chunk_size=2, stride=1, noise=0.0)
        env.close()
        found.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert found[0] == found[1]
    frames = load_demonstrations(folder).frames
    starts = frames[keys.STEP] == 0
    identities = [tuple(row) for row in torch.stack([frames[keys.TASK_ID], frames[keys.TRIAL_ID]], 1)[starts].tolist()]
    assert identities == [(e.task_id, e.trial_id) for e in episodes if e.trial_id != 3]


def test_the_gripper_is_left_alone():
    spec = make_spec(TASKS, **OPTIONS)
    assert noise_of_dimensions(0.2, spec).tolist() == [0.2, 0.2, 0.2, 0.0]
    assert noise_of_dimensions([0.1, 0.2, 0.3, 0.4], spec).tolist() == [0.1, 0.2, 0.3, 0.4]
    assert noise_of_dimensions(0.2, replace(spec, gripper_dims=())).tolist() == [0.2] * 4
    with pytest.raises(ValueError, match="one for each of the 4 dimensions of an action, got"):
        noise_of_dimensions([0.1, 0.2], spec)
    with pytest.raises(ValueError, match=r"gripper_dims is \(4,\), must be dimensions of an action, 0 to 3"):
        replace(spec, gripper_dims=(4,))
    simulator, executed = spec.make(), []
    step = simulator.step
    simulator.step = lambda action: (executed.append(action.copy()), step(action))[1]
    episode, settings = Episode(0, 0), {"chunk_size": 1, "stride": 1, "max_steps": 80}
    wanted = demonstrate(simulator, episode, noise=0.1, **settings)[keys.ACTION][:, 0]
    done = np.array(executed)
    assert (done[:, 3] == wanted[:, 3]).all()
    assert (done[:, :3] != wanted[:, :3]).any(0).all()
    simulator.close()


def test_gripper_dimensions_of_every_benchmark():
    """Where a benchmark's schema says where the gripper is, its description says the same."""
    from vla_common.schema import get_schema
    from vla_envs.calvin.spec import make_spec as calvin
    from vla_envs.libero.spec import make_spec as libero
    from vla_envs.maniskill.spec import make_spec as maniskill

    for make, suite in ((libero, "spatial"), (calvin, "D"), (maniskill, "PushCube-v1"), (make_spec, TASKS)):
        try:
            spec = make(suite)
        except (ImportError, FileNotFoundError, OSError):
            continue  # its assets are not here
        assert spec.gripper_dims == (get_schema(spec.benchmark).gripper.dimension,), suite


def test_whole_episodes_are_held_out_by_their_trial():
    trials = torch.arange(48)
    assert trials[is_held_out(trials, 1 / 16)].tolist() == [15, 31, 47]
    assert trials[:10][is_held_out(trials[:10], 0.3)].tolist() == [3, 6, 9]
    data = TensorDict(
        {keys.TRIAL_ID: torch.tensor([0, 0, 1, 1, 0, 1]), keys.EPISODE: torch.tensor([0, 0, 1, 1, 2, 3])}, [6]
    )
    kept, heldout = Samples(data).split(0.5)
    assert kept[keys.EPISODE].tolist() == [0, 0, 2]
    assert heldout[keys.EPISODE].tolist() == [1, 1, 3]
    assert (kept.episodes, heldout.episodes) == (2, 2)
    everything, nothing = Samples(data).split(0.0)
    assert (len(everything), len(nothing)) == (6, 0)
    with pytest.raises(ValueError, match=r"heldout=0.0625: no demonstration is held out, of each task trials 15, 31"):
        Samples(data).split(0.0625)


@pytest.mark.parametrize("family", ["small", "small_flow"])
def test_measuring_what_is_held_out_changes_nothing(made, family):
    folder, _, _, spec = made
    torch.manual_seed(0)
    sizes = {name: value for name, value in SMALL.items() if name != "family"}
    policy = make_policy(spec, family=family, **sizes)
    kept, heldout = for_policy(load_demonstrations(folder), policy, spec).split(1 / 3)
    learner = BehaviourCloning(policy, kept, steps=40, batch_size=8)
    state, weights = torch.get_rng_state(), {name: value.clone() for name, value in policy.state_dict().items()}
    policy.train()
    before = learner.evaluate(heldout)
    assert policy.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in policy.state_dict().items())
    assert learner.evaluate(heldout) == before
    assert before["error"] == pytest.approx(np.mean([before[f"error_{number}"] for number in range(4)]))
    for _ in range(40):
        learner.step()
    after = learner.evaluate(heldout)
    assert after["loss"] < before["loss"]
    # The loss is that of a step without noise on the states, over what is valid.
    rows = heldout[torch.arange(len(heldout))]
    if family == "small":  # which draws nothing
        with torch.no_grad():
            expected = policy.imitation_loss(rows, sigma=0.1)[rows[keys.STEP_MASK]].mean()
        assert after["loss"] == pytest.approx(float(expected), rel=1e-5)


SFT = [*TOY[:4], "demonstrations.episodes=4", "demonstrations.max_steps=150", "demonstrations.heldout=0.5"]
SFT += ["cloning.steps=6", "cloning.batch_size=16", "heldout_every=4", "eval.trials=1", "eval.videos=0"]


def clone(folder, *settings):
    main_of("sft")(composed("sft", [*SFT, *settings], folder))
    GlobalHydra.instance().clear()
    return metrics(folder)


def test_what_the_expert_did_becomes_a_data_set_of_lerobot(tmp_path):
    """The frames are those that were recorded, the actions what was executed, with its noise."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'vla-torchrl[lerobot]'")
    folder, to = tmp_path / "set", tmp_path / "lerobot"
    clone(tmp_path / "run", f"demonstrations.folder={folder}", "demonstrations.stride=3", "policy.chunk_size=3")
    assert next(write_rollouts(folder, to, only_success=True)).startswith("wrote 4 episodes")
    recorded, spec = load_demonstrations(folder).frames, make_spec("metaworld/button-press-topdown-v3", **OPTIONS)
    found = LeRobotDemonstrations.open(to, spec, stride=3)
    rows = found.for_policy(make_policy(spec, family="small", chunk_size=3))[torch.arange(len(recorded))]
    assert torch.equal(rows[keys.IMAGES], recorded[keys.IMAGES])
    assert torch.equal(rows[keys.STATES], recorded[keys.STATES])
    noise = (rows[keys.ACTION] - recorded[keys.ACTION])[recorded[keys.STEP_MASK]]
    assert noise[:, :3].abs().amax(0).min() > 0.1
    assert not noise[:, 3].any(), "the gripper has none"
    assert found.folder.unsolved == 0


def test_sft_records_once_and_does_not_notice(tmp_path, capfd):
    there = f"demonstrations.folder={tmp_path / 'kept' / 'set'}"
    in_memory = clone(tmp_path / "memory")
    assert clone(tmp_path / "first", there) == in_memory
    assert "demonstrations: " in capfd.readouterr().err
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["set"]
    assert clone(tmp_path / "second", there, "demonstrations.noise=0.2") == in_memory
    said = capfd.readouterr()
    assert "demonstrations: " not in said.err
    assert re.search(r"set: \d demonstrations with \d+ frames of metaworld/button-press-topdown-v3, 32 x 32", said.out)
    assert "recorded with other settings than demonstrations. has now: noise 0.25, not 0.2" in said.out
    assert re.search(r"the expert solved \d of 4 episodes", said.out)
    assert "heldout/loss=" in said.err
    for other in ("first", "second"):
        assert not differing(tmp_path / "memory" / "policy", tmp_path / other / "policy")
    lines = [(step, line) for (step, _), [line] in in_memory.items() if "heldout/loss" in line]
    assert [step for step, _ in lines] == [4, 6]
    assert all(0 < line["heldout/error"] < 2 for _, line in lines)


def test_spread_demonstrations_are_others_the_same_in_memory_and_in_a_folder_that_says_so(tmp_path, capfd):
    folder, spread = tmp_path / "set", ["demonstrations.spread=3", "demonstrations.heldout=0"]
    in_memory = clone(tmp_path / "memory", *spread)
    assert clone(tmp_path / "first", f"demonstrations.folder={folder}", *spread) == in_memory
    found = load_demonstrations(folder)
    trials = found.frames[keys.TRIAL_ID].unique().tolist()
    assert len(trials) == found.facts["demonstrations"]
    assert trials[-1] >= found.facts["recording"]["episodes"], "not the first ones"
    assert found.facts["recording"]["spread"] == 3
    assert clone(tmp_path / "second", f"demonstrations.folder={folder}", spread[1]) == in_memory
    assert "demonstrations. has now: spread 3, not 1" in capfd.readouterr().out


def test_cloning_from_a_folder_goes_on_where_it_was(tmp_path, monkeypatch):
    there = [f"demonstrations.folder={tmp_path / 'set'}", "checkpoint_every=2"]
    expected, step, steps = clone(tmp_path / "whole", *there), BehaviourCloning.step, []

    def interrupted(learner):
        steps.append(1)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return step(learner)

    with monkeypatch.context() as patch:
        patch.setattr(BehaviourCloning, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            clone(tmp_path / "again", *there)
    GlobalHydra.instance().clear()
    assert clone(tmp_path / "again", *there) == expected
    assert not differing(tmp_path / "whole" / "policy", tmp_path / "again" / "policy")


def test_a_warm_start_reads_them_too(tmp_path, capfd):
    there = ["demonstrations.episodes=4", "cloning.steps=3", f"demonstrations.folder={tmp_path / 'set'}"]
    there += ["demonstrations.heldout=0.5", *TOY, *TOY_OF["ppo"], "demonstrations.max_steps=150"]
    for name in ("first", "second"):
        main_of("ppo")(composed("ppo", there, tmp_path / name))
        GlobalHydra.instance().clear()
    assert capfd.readouterr().out.count("2 demonstrations held out: loss ") == 2
    assert not differing(tmp_path / "first" / "policy", tmp_path / "second" / "policy")


def test_a_recording_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    there = tmp_path / "kept" / "set"
    monkeypatch.setattr("vla_algos.demonstrations.experts.write_facts", lambda *_: 1 / 0)  # with all frames written
    with pytest.raises(ZeroDivisionError):
        clone(tmp_path / "run", f"demonstrations.folder={there}")
    GlobalHydra.instance().clear()
    assert not list((tmp_path / "kept").iterdir())


def test_one_process_records_at_a_time(tmp_path):
    beside = tmp_path / ".recording_set"
    beside.mkdir()
    code = f"""
        from pathlib import Path
        from vla_algos.files import lock_folder
        lock = lock_folder(Path({str(beside)!r}))
        print("locked", flush=True)
        input()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(FolderInUse, match=r"set: another process records into it; type the same again when that"):
            clone(tmp_path / "run", f"demonstrations.folder={tmp_path / 'set'}")
        other.stdin.write("\n")
    GlobalHydra.instance().clear()
    lock_folder(beside).release()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["demonstrations.folder=FOLDER"], r"no demonstrations are here, dataset.json is missing"),
        (["demonstrations.folder=SET", "env.image_size=48"], r"type image_size=\[32,32\] as it was recorded"),
        ([*OF_SET, "eval.seed=7"], "eval.seed=7 is the family of in"),
        ([*OF_SET, "policy.chunk_size=6"], r"are for chunks of at most 5, the policy has 6"),
        ([*OF_SET, "demonstrations.heldout=0.1"], r"heldout=0.1: no demonstration is held out"),
        (["demonstrations.heldout=0.1"], r"heldout=0.1: no demonstration is held out, of each task trials 9, 19, 29"),
        (["demonstrations.spread=2"], r"type demonstrations.spread=1 or demonstrations.heldout=0"),
        (["demonstrations.noise=[0.1,0.2]"], "one for each of the 4 dimensions"),
    ],
)
def test_mistakes_are_refused_before_any_work(made, settings, message, tmp_path, monkeypatch):
    monkeypatch.setattr("vla_envs.make.VLAEnv", None)
    (tmp_path / "kept").mkdir()
    typed = [each.replace("FOLDER", str(tmp_path / "kept")).replace("SET", str(made[0])) for each in settings]
    try:
        with pytest.raises(ValueError, match=message):
            clone(tmp_path / "run", *typed)
    finally:
        GlobalHydra.instance().clear()


def test_a_toy_policy_learns_from_a_toy_folder(tmp_path):
    """A stranger's simulator without a gripper, one worker."""
    spec = toy_spec({}, tmp_path)
    env, policy = make_toy_env(spec, 1, 1), tiny_policy(spec)
    write_demonstrations(str(tmp_path / "set"), env, [Episode(0, trial, 3) for trial in range(6)], chunk_size=2)
    env.close()
    samples = for_policy(load_demonstrations(tmp_path / "set"), policy, spec)
    assert load_demonstrations(tmp_path / "set").facts["recording"]["noise_of_dimensions"] == [0.25, 0.25]
    learner = BehaviourCloning(policy, samples, steps=5)
    assert all(0 < learner.step() < 10 for _ in range(5))


def test_sft_learns_the_same_from_the_set(tmp_path):
    """From undisturbed demonstrations, and without what lies after the last frame, which LeRobot's format has not."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'vla-torchrl[lerobot]'")
    plain = ["demonstrations.noise=0", "demonstrations.stride=3", "cloning.auxiliary=0"]
    clone(tmp_path / "own", f"demonstrations.folder={tmp_path / 'set'}", *plain)
    assert [*write_rollouts(tmp_path / "set", tmp_path / "lerobot", only_success=True)]
    clone(tmp_path / "theirs", f"demonstrations.folder={tmp_path / 'lerobot'}", *plain)
    assert not differing(tmp_path / "own" / "policy", tmp_path / "theirs" / "policy")
