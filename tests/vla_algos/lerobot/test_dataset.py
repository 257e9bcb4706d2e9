"""Data sets of LeRobot as demonstrations: what is read of them, what is refused, and by what policies normalise."""

import json
import re
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lerobot_checkpoint import PI0, PI05
from lerobot_checkpoint import make_checkpoint as make_lerobot
from lerobot_writer import write_lerobot, write_video
from openvla_checkpoint import make_checkpoint
from pi0_checkpoint import make_checkpoint as make_pi0

from vla_algos.demonstrations import DemonstrationSettings
from vla_algos.demonstrations.record import _take_statistics, find_demonstrations, read
from vla_algos.imitation import BehaviourCloning
from vla_algos.lerobot import frames as frames_module
from vla_algos.lerobot.dataset import LeRobotFolder, is_lerobot
from vla_algos.lerobot.demonstrations import LeRobotDemonstrations
from vla_algos.lerobot.frames import FrameReader
from vla_common import keys
from vla_common.texts import decode
from vla_envs import make_spec
from vla_policies import OpenVLA, OpenVLAOFT, Pi0, load_policy, make_policy
from vla_policies.processing.normalization import summarise
from vla_policies.tiny import make_tiny

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'vla-torchrl[lerobot]'")
pytest.importorskip("av", reason="av is not installed: pip install 'vla-torchrl[lerobot]'")

CAMERA, WRIST = "observation.images.top", "observation.images.wrist"
LENGTHS = (7, 4, 5)
SPEC = make_spec("metaworld/reach-v3+push-v3", image_size=16)
TASKS = [task.instruction for task in SPEC.tasks]
SMALL = {"family": "small", "dim": 16, "layers": 1, "heads": 2, "channels": [4, 4, 4], "keypoints": 4, "chunk_size": 3}
KINDS = [(version, video) for version in ("v2.1", "v3.0") for video in (False, True)]


def made_up(cameras=(CAMERA,), size=16, dims=4, tasks=(TASKS[0], TASKS[1], TASKS[0])):
    """Episodes whose images are of one colour each, so that every frame can be told from the others."""
    random = np.random.default_rng(0)
    episodes, count = [], 0
    for task, length in zip(tasks, LENGTHS, strict=True):
        shades = (8 + 15 * (count + np.arange(length)))[:, None, None, None]
        images = {name: np.full((length, size, size, 3), 0, np.uint8) + shades.astype(np.uint8) for name in cameras}
        numbers = random.uniform(-1, 1, (2, length, dims)).astype(np.float32)
        episodes.append({"task": task, "states": numbers[0], "actions": numbers[1], "images": images})
        count += length
    return episodes


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}_{'video' if kind[1] else 'images'}")
def written(request, tmp_path_factory):
    version, video = request.param
    return write_lerobot(tmp_path_factory.mktemp("set") / "set", made_up(), version=version, video=video), made_up()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_lerobot(tmp_path_factory.mktemp("set") / "set", made_up((CAMERA, WRIST)))


def changed(plain, tmp_path, **entries):
    """A copy whose ``info.json`` says something else."""
    folder = tmp_path / "set"
    shutil.copytree(plain, folder)
    info = json.loads((folder / "meta" / "info.json").read_text())
    (folder / "meta" / "info.json").write_text(json.dumps({**info, **entries}))
    return folder


def features(plain, **changes):
    found = json.loads((plain / "meta" / "info.json").read_text())["features"] | changes
    return {name: feature for name, feature in found.items() if feature is not None}


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return make_policy(SPEC, **SMALL)


# ---- reading


def test_samples_are_the_frames_that_were_written(written, policy):
    folder, episodes = written
    samples = LeRobotDemonstrations.open(folder, SPEC).for_policy(policy)
    assert len(samples) == sum(LENGTHS)
    rows = samples[torch.arange(len(samples))]
    states = np.concatenate([episode["states"] for episode in episodes])
    assert np.array_equal(rows[keys.STATES].numpy(), states)
    images = np.concatenate([episode["images"][CAMERA] for episode in episodes])
    video = LeRobotFolder.read(folder).cameras[CAMERA].video
    assert np.abs(rows[keys.IMAGES].numpy().astype(int) - images).max() <= (3 if video else 0)
    assert decode(rows[keys.TASK_DESCRIPTIONS]) == [
        TASKS[n] for n, k in zip((0, 1, 0), LENGTHS, strict=True) for _ in range(k)
    ]
    assert rows[keys.TASK_ID].tolist() == [0] * 7 + [1] * 4 + [0] * 5
    assert rows[keys.TRIAL_ID].tolist() == [0] * 7 + [0] * 4 + [1] * 5  # counted for each task
    assert rows[keys.EPISODE].tolist() == [0] * 7 + [1] * 4 + [2] * 5
    assert rows[keys.STEP].tolist() == [*range(7), *range(4), *range(5)]
    assert rows[keys.EPISODE_LEN].squeeze(1).tolist() == [7] * 7 + [4] * 4 + [5] * 5
    assert np.array_equal(rows[keys.FINAL_STATES][7].numpy(), episodes[1]["states"][-1])


def test_a_chunk_ends_with_its_episode(written, policy):
    folder, episodes = written
    samples = LeRobotDemonstrations.open(folder, SPEC).for_policy(policy)
    actions = episodes[0]["actions"]
    assert np.array_equal(samples[torch.tensor([2])][keys.ACTION][0].numpy(), actions[2:5])
    row = samples[torch.tensor([5])]
    assert row[keys.STEP_MASK].tolist() == [[True, True, False]]
    assert np.array_equal(row[keys.ACTION][0].numpy(), actions[[5, 6, 6]])  # the last one again, which does not count


def test_every_so_many_frames_of_each_episode(plain, policy):
    samples = LeRobotDemonstrations.open(plain, SPEC, stride=3).for_policy(policy)
    assert samples[keys.STEP].tolist() == [0, 3, 6, 0, 3, 0, 3]
    one = samples[torch.tensor([1])]
    assert (one[keys.IMAGES] == 8 + 15 * 3).all()
    assert np.array_equal(one[keys.ACTION][0].numpy(), made_up()[0]["actions"][3:6])  # chunks are of all frames


def test_whole_demonstrations_are_held_out(plain, policy):
    learnt, heldout = LeRobotDemonstrations.open(plain, SPEC).for_policy(policy).split(0.5)
    assert (learnt.episodes, heldout.episodes) == (2, 1)
    assert heldout[keys.EPISODE].unique().tolist() == [2]  # the second of its task
    assert (heldout[torch.arange(5)][keys.IMAGES].float().mean((1, 2, 3)) == 8.0 + 15 * torch.arange(11, 16)).all()


def test_other_tasks_are_learnt_from_if_asked_for(tmp_path, policy):
    episodes = made_up(tasks=("Sweep the floor.", TASKS[0].upper(), TASKS[0] + "."))
    folder = write_lerobot(tmp_path / "set", episodes)
    found = LeRobotDemonstrations.open(folder, SPEC)
    samples = found.for_policy(policy)
    assert samples[keys.EPISODE].unique().tolist() == [1, 2]  # case and full stop aside
    assert found.remarks[0] == "it has nothing of 1 of 2 tasks: 'push-v3'"
    everything = LeRobotDemonstrations.open(folder, SPEC, tasks="all").for_policy(policy)
    assert everything[keys.TASK_ID].unique().tolist() == [-1, 0]
    assert decode(everything[keys.TASK_DESCRIPTIONS])[0] == "Sweep the floor."


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_frames_that_are_dropped_for_their_instructions_are_said(version, tmp_path):
    """With their number; in ``run.json`` and in the lines before learning, and not where all are learnt from."""
    episodes = made_up(tasks=("fly", TASKS[0], "swim"))
    folder = write_lerobot(tmp_path / "set", episodes, version=version)
    found = LeRobotDemonstrations.open(folder, SPEC)
    said = "12 of 16 frames have instructions that are none of metaworld/reach-v3+push-v3: 'fly', 'swim'; type tasks="
    assert found.remarks[-1].startswith(said)
    assert found.remarks[-1] in found.facts()["remarks"]
    assert found.remarks[-1] in found.describe()
    assert "frames have" not in LeRobotDemonstrations.open(folder, SPEC, tasks="all").describe()
    own = write_lerobot(tmp_path / "own", made_up(), version=version)
    assert "frames have" not in LeRobotDemonstrations.open(own, SPEC).describe()


def test_wrist_cameras_are_found_by_their_names(plain):
    wrist_spec = replace(SPEC, wrist_image_shape=(1, 16, 16))
    found = LeRobotDemonstrations.open(plain, wrist_spec)
    assert (found.camera.name, [camera.name for camera in found.wrist_cameras]) == (CAMERA, [WRIST])
    found = LeRobotDemonstrations.open(plain, wrist_spec, camera=WRIST, wrist_cameras=[CAMERA])
    assert (found.camera.name, [camera.name for camera in found.wrist_cameras]) == (WRIST, [CAMERA])


def test_encoded_images_are_kept_within_bounds(plain, monkeypatch):
    """What a full memory drops is read again."""
    folder = LeRobotFolder.read(plain)
    size = FrameReader(folder)
    everything = np.arange(sum(LENGTHS))
    expected = size.read(folder.cameras[CAMERA], everything)
    assert len(size._groups) == 3  # episodes
    monkeypatch.setattr(frames_module, "MEMORY", 1)
    small = FrameReader(folder)
    backwards = small.read(folder.cameras[CAMERA], everything[::-1].copy())
    assert np.array_equal(backwards[::-1], expected)
    assert len(small._groups) == 1


def test_a_small_policy_learns_from_it(plain, policy):
    samples = LeRobotDemonstrations.open(plain, SPEC).for_policy(policy)
    learner = BehaviourCloning(policy, samples, steps=3, batch_size=8, auxiliary=1.0)
    assert np.isfinite([learner.step() for _ in range(3)]).all()
    assert torch.allclose(policy.encoder.state_mean.cpu(), samples[keys.STATES].mean(0))


# ---- refusing


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("v1.6", r"format v1\.6, and v2\.1 and v3\.0 are read; convert an older one .*convert_dataset_v1_to_v2"),
        ("v2.0", r"format v2\.0, and v2\.1 and v3\.0 are read; convert an older one .*convert_dataset_v20_to_v21"),
        ("v4.0", r"format v4\.0, and v2\.1 and v3\.0 are read; .* for a newer one type pip install --upgrade"),
        ("new", r"damaged, meta/info\.json has codebase_version 'new'"),
    ],
)
def test_versions_that_are_not_read_say_what_converts_them(plain, tmp_path, version, said):
    folder = changed(plain, tmp_path, codebase_version=version)
    assert is_lerobot(folder)
    with pytest.raises(ValueError, match=said):
        LeRobotDemonstrations.open(folder, SPEC)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"observation.state": None}, r"has no states: none of its features is observation\.state or state, there are"),
        ({"action": None}, r"has no actions: none of its features is action or actions"),
        ({CAMERA: None, WRIST: None}, r"no camera is among its features, observation\.state, action"),
        ({"action": {"dtype": "float32", "shape": [7]}}, r"its action has 7 numbers, an action of metaworld/.* has 4"),
        ({"observation.state": {"dtype": "float32", "shape": [9]}}, r"its observation\.state has 9 numbers, a state"),
        ({CAMERA: {"dtype": "image", "shape": [3, 48, 64]}},
         r"has 48 x 64 pixels, .* 16 x 16 here; type image_size=\[48,64\]"),
        ({"observation.images.side": {"dtype": "image", "shape": [16, 16, 3]}},
         r"is not clear from their names; type camera=NAME \(recipes: demonstrations\.camera\), one of .*top, .*wrist"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(plain, tmp_path, changes, said):
    folder = changed(plain, tmp_path, features=features(plain, **changes))
    with pytest.raises(ValueError, match=said) as caught:
        LeRobotDemonstrations.open(folder, SPEC)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_not_damaged(tmp_path):
    for folder, said in ((tmp_path / "nowhere", "there is no such folder"), (tmp_path, "info.json is missing")):
        with pytest.raises(FileNotFoundError, match=f"no data set of LeRobot is here, .*{said}; give the") as caught:
            LeRobotDemonstrations.open(str(folder), SPEC)
        assert "\n" not in str(caught.value)


def test_depth_is_no_camera(plain, tmp_path):
    depth = {"dtype": "video", "shape": [16, 16, 1], "info": {"is_depth_map": True}}
    folder = changed(plain, tmp_path, features=features(plain, **{"observation.images.depth": depth}))
    assert list(LeRobotFolder.read(folder).cameras) == [CAMERA, WRIST]


def test_an_unknown_camera_lists_those_there_are(plain):
    with pytest.raises(ValueError, match=rf"camera=top: .* has no such camera; type one of {CAMERA}, {WRIST}"):
        LeRobotDemonstrations.open(plain, SPEC, camera="top")


def test_instructions_of_other_tasks_show_both(tmp_path):
    folder = write_lerobot(tmp_path / "set", made_up(tasks=("fold", "iron", "fold")))
    with pytest.raises(ValueError, match=r"it has 'fold', 'iron', the environment '.*; type tasks='all' \(recipes"):
        LeRobotDemonstrations.open(folder, SPEC)


def test_another_frequency_is_remarked_on(tmp_path):
    found = LeRobotDemonstrations.open(write_lerobot(tmp_path / "set", made_up(), fps=10), SPEC)
    assert re.search(r"its actions are 10 a second and those of metaworld/.* 80", found.describe())
    assert found.facts()["remarks"] == list(found.remarks) != []


def test_actions_in_other_units_are_remarked_on(plain, tmp_path):
    assert LeRobotDemonstrations.open(plain, SPEC).outside() is None
    episodes = made_up()
    for episode in episodes:
        episode["actions"][:, 0] += 5
    found = LeRobotDemonstrations.open(write_lerobot(tmp_path / "set", episodes), SPEC)
    assert "by dimension: 100 %, 0 %, 0 %, 0 %" in found.outside()


def test_files_that_are_missing_or_broken_are_named(plain, tmp_path, policy):
    folder = changed(plain, tmp_path, total_frames=99)
    with pytest.raises(ValueError, match=r"damaged, 1 files of data/ have 16 frames, meta/info\.json says 99"):
        LeRobotDemonstrations.open(folder, SPEC).for_policy(policy)
    (folder / "data" / "chunk-000" / "file-000.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"damaged, data/chunk-000/file-000\.parquet: .*; copy the data set again"):
        LeRobotDemonstrations.open(folder, SPEC).for_policy(policy)
    (folder / "meta" / "info.json").write_text("{")
    with pytest.raises(ValueError, match=r"meta/info\.json is not JSON .*; copy it again"):
        LeRobotDemonstrations.open(folder, SPEC)


def test_videos_that_are_missing_or_others_are_named(tmp_path, policy):
    folder = write_lerobot(tmp_path / "set", made_up(), video=True)
    file = folder / "videos" / CAMERA / "chunk-000" / "file-000.mp4"
    write_video(file, made_up()[0]["images"][CAMERA], 80)  # of the first episode alone
    found = LeRobotDemonstrations.open(folder, SPEC)
    with pytest.raises(ValueError, match=r"damaged, videos/.*file-000\.mp4 has no frame at 0\.188 s"):
        FrameReader(found.folder).read(found.camera, np.array([15]))
    file.write_text("#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:1/\n")  # a list of addresses, which are not followed
    with pytest.raises(ValueError, match=r"damaged, videos/.*file-000\.mp4: "):
        found.for_policy(policy)
    file.unlink()
    with pytest.raises(ValueError, match=r"damaged, videos/.*file-000\.mp4 is missing"):
        found.for_policy(policy)


def test_what_is_not_installed_says_what_to_type(plain, tmp_path, monkeypatch):
    video = write_lerobot(tmp_path / "set", made_up(), video=True)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ModuleNotFoundError, match=r"has videos, and av, .*; type pip install 'vla-torchrl\[lerobot\]'"):
        LeRobotDemonstrations.open(video, SPEC)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ModuleNotFoundError, match=r"is a data set of LeRobot, and pyarrow, .*; type pip install"):
        LeRobotDemonstrations.open(plain, SPEC)


def test_settings_of_data_sets_mean_nothing_elsewhere(tmp_path):
    with pytest.raises(ValueError, match=r"demonstrations\.camera=top is for a data set of LeRobot, .* leave it out"):
        find_demonstrations(DemonstrationSettings(episodes=4, folder=str(tmp_path), camera="top"), SPEC, 1)
    with pytest.raises(ValueError, match=r"statistics=demonstrations needs .* type demonstrations\.folder=FOLDER"):
        find_demonstrations(DemonstrationSettings(episodes=4, statistics="demonstrations"), SPEC, 1)


def test_an_evaluation_does_not_repeat_the_episodes_of_a_data_set(plain, tmp_path):
    pq, folder = pytest.importorskip("pyarrow.parquet"), tmp_path / "rollouts"
    shutil.copytree(plain, folder)
    settings = DemonstrationSettings(episodes=3, folder=str(folder))
    assert find_demonstrations(settings, SPEC, 7).folder.seeds == []
    (file,) = (folder / "meta" / "episodes").rglob("*.parquet")
    rows = pq.read_table(file)
    pq.write_table(rows.append_column("seed", [[5, 7, 7]]), file)  # as vla-recipe rollouts has it
    assert isinstance(find_demonstrations(settings, SPEC, 9), LeRobotDemonstrations)
    with pytest.raises(ValueError, match=r"eval\.seed=7 is the family .* of the demonstrations in .*; take"):
        find_demonstrations(settings, SPEC, 7)


# ---- statistics


def test_rows_of_statistics_are_there_in_the_largest_data_sets():
    class Rows:
        """More of them than float32 can count."""

        def __len__(self):
            return 2**24 + 4

        def select(self, *names):
            return self

        def __getitem__(self, rows):
            assert rows.max() == len(self) - 1
            return dict.fromkeys((keys.ACTION, keys.STATES, keys.STEP_MASK))

    _take_statistics(SimpleNamespace(take_statistics=lambda *_: None), Rows(), "set")


def checkpoint(kind, folder):
    """A tiny checkpoint that acts in Meta-World, with statistics of other data."""
    if kind.startswith("pi0"):
        make_pi0(folder, f"{kind}_tiny")
        return Pi0.from_pretrained(folder, benchmark="metaworld", config_name=f"{kind}_metaworld", num_action_chunks=3)
    make_checkpoint(folder, heads=kind == "oft_l1")
    if kind == "openvla":
        return OpenVLA.from_pretrained(folder, benchmark="metaworld")
    settings: dict = {
        "layout": "official",
        "num_action_chunks": 3,
        "head": kind.removeprefix("oft_"),
        "use_proprio": False,
    }
    return OpenVLAOFT.from_pretrained(folder, benchmark="metaworld", **settings)


def learnt_from(folder, policy, **settings):
    chosen = DemonstrationSettings(episodes=1, stride=1, folder=str(folder), **settings)
    return read(chosen, SPEC, policy, find_demonstrations(chosen, SPEC, 1))[0]


FAMILIES = ["pi0", "pi05", "openvla", "oft_tokens", "oft_l1"]


def normalised(policy, samples):
    """All actions as the model is to predict them."""
    rows = samples[torch.arange(len(samples))]
    states = [] if isinstance(policy, (OpenVLA, OpenVLAOFT)) else [rows[keys.STATES]]
    return policy.to_model(rows[keys.ACTION], *states)[rows[keys.STEP_MASK]]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_checkpoint_takes_statistics_of_the_data_set(kind, plain, tmp_path):
    policy = checkpoint(kind, tmp_path / "checkpoint")
    theirs = policy.statistics.key
    samples = learnt_from(plain, policy)
    assert policy.statistics.key == theirs  # unless it is asked for
    samples = learnt_from(plain, policy, statistics="demonstrations")
    assert policy.statistics.key == "set"
    found = normalised(policy, samples)
    rows = samples[torch.arange(len(samples))]
    actions = rows[keys.ACTION][rows[keys.STEP_MASK]]
    if kind == "pi0":
        assert torch.allclose(found.mean(0), torch.zeros(4), atol=1e-4)
        assert torch.allclose(found.std(0, correction=0), torch.ones(4), atol=1e-4)
    elif kind == "pi05":
        low, high = actions.quantile(torch.tensor([0.01, 0.99]), dim=0)
        assert torch.allclose(found, 2 * (actions - low) / (high - low) - 1, atol=1e-4)
    else:  # the dimensions that Meta-World has not are 0
        low, high = actions.quantile(torch.tensor([0.01, 0.99]), dim=0)
        expected = (2 * (actions - low) / (high - low) - 1).clamp(-1, 1)
        assert torch.allclose(found[:, [0, 1, 2, 6]], expected, atol=1e-4)
        assert (found[:, 3:6] == 0).all()
    stored = json.loads((plain / "meta" / "stats.json").read_text())["observation.state"]
    entry = policy.folder.statistics["set"]
    states = entry["state"] if kind.startswith("pi0") else entry["proprio"]
    for name in ("mean", "std", "q01", "q99"):  # LeRobot's own, of the same states
        assert states[name] == pytest.approx(stored[name], abs=1e-6), name
    loss = BehaviourCloning(policy, samples, steps=1, batch_size=4, state_noise=0.0).step()
    assert np.isfinite(loss)


@pytest.mark.parametrize("kind", ["pi05", "openvla"])
def test_what_is_saved_has_the_statistics(kind, plain, tmp_path):
    """The caller types neither a data set nor its name."""
    policy = checkpoint(kind, tmp_path / "checkpoint")
    learnt_from(plain, policy, statistics="demonstrations")
    policy.save_pretrained(tmp_path / "saved")
    again = type(policy).from_pretrained(tmp_path / "saved")
    assert again.statistics == policy.statistics
    assert set(again.folder.statistics) == {"set", *checkpoint(kind, tmp_path / "other").folder.statistics}


@pytest.mark.parametrize("kind", ["smolvla", "pi0", "pi05"])
def test_a_checkpoint_of_lerobot_for_another_robot_takes_the_statistics(kind, plain, tmp_path):
    """As lerobot/smolvla_base, whose states and actions have six numbers and whose cameras have other names."""
    folder, camera = tmp_path / "checkpoint", "observation.images.image"
    if kind == "smolvla":
        make_tiny("smolvla", folder)  # of LIBERO: 8 and 7 numbers
    else:
        make_lerobot(folder, PI0 if kind == "pi0" else PI05)
    family = "smolvla" if kind == "smolvla" else "pi0_lerobot"
    chosen = {"family": family, "checkpoint": folder, "cameras": (camera,), "max_prompt_length": 256}
    with pytest.raises(ValueError, match=r"statistics of state have 8 numbers, the benchmark has 4"):
        make_policy(SPEC, **chosen)
    if kind == "smolvla":  # LeRobot names no file where there are no statistics
        for file in folder.glob("policy_*.json"):
            content = json.loads(file.read_text())
            for step in content["steps"]:
                step.pop("state_file", None)
            file.write_text(json.dumps(content))
    policy = make_policy(SPEC, **chosen, num_action_chunks=3, new_statistics=True)
    with pytest.raises(ValueError, match=r"statistics of actions have 0 numbers"):
        BehaviourCloning(policy, learnt_from(plain, policy), steps=1, batch_size=4).step()
    samples = learnt_from(plain, policy, statistics="demonstrations")
    found = normalised(policy, samples)
    if kind == "pi05":  # by quantiles
        assert (found.abs() < 1.001).float().mean() > 0.9
    else:
        assert torch.allclose(found.mean(0), torch.zeros(4), atol=1e-4)
        assert torch.allclose(found.std(0, correction=0), torch.ones(4), atol=1e-4)
    assert np.isfinite(BehaviourCloning(policy, samples, steps=1, batch_size=4, state_noise=0.0).step())
    policy.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["output_features"]["action"]["shape"] == config["input_features"]["observation.state"]["shape"] == [4]
    again = load_policy(tmp_path / "saved")
    assert not again.config.new_statistics
    assert torch.equal(again.statistics.actions.first, policy.statistics.actions.first)


def test_prompts_list_states_by_the_new_statistics(plain, tmp_path):
    """pi0.5 writes normalised states into its prompt: tokens are made after the statistics are set."""
    policy = checkpoint("pi05", tmp_path / "checkpoint")
    policy.lists_states = True  # as in RoboTwin
    before = learnt_from(plain, policy)
    old = before[:4][keys.PROMPT_TOKENS]
    after = learnt_from(plain, policy, statistics="demonstrations")
    new = after[:4]
    assert not torch.equal(new[keys.PROMPT_TOKENS], old)
    fresh = policy.prompt_tokens(decode(new[keys.TASK_DESCRIPTIONS]), new[keys.STATES])
    assert torch.equal(new[keys.PROMPT_TOKENS], fresh)


def test_statistics_are_of_what_the_model_predicts(tmp_path):
    """Relative actions of pi0 in LIBERO; a gripper that OpenVLA sees as closed or open is not normalised."""
    random = torch.Generator().manual_seed(0)
    actions, states = torch.rand(50, 3, 7, generator=random), torch.rand(50, 8, generator=random)
    actions[..., 6] = torch.where(actions[..., 6] < 0.5, -1.0, 1.0)
    counted = torch.ones(50, 3, dtype=torch.bool)
    settings = {"benchmark": "libero", "config_name": "pi0_libero", "num_action_chunks": 3}
    pi0 = Pi0.from_pretrained(make_pi0(tmp_path / "pi0"), **settings)
    assert pi0.preset.relative
    pi0.take_statistics("new", actions, states, counted)
    found = pi0.to_model(actions, states).flatten(0, 1)
    assert torch.allclose(found.mean(0), torch.zeros(7), atol=1e-4)
    assert torch.allclose(found.std(0, correction=0), torch.ones(7), atol=1e-4)
    openvla = OpenVLA.from_pretrained(make_checkpoint(tmp_path / "openvla"), benchmark="libero")
    openvla.take_statistics("new", actions, states, counted)
    assert openvla.statistics.action.mask == (True,) * 6 + (False,)
    assert torch.equal(openvla.to_simulator(openvla.to_model(actions))[..., 6], actions[..., 6])


def test_percentiles_of_a_gripper_that_hardly_moves_are_its_extremes():
    values = torch.zeros(1000, 2)
    values[0] = 1.0
    values[:, 1] = torch.linspace(0, 1, 1000)
    found = summarise(values)
    assert (found["q01"][0], found["q99"][0]) == (0.0, 1.0)
    assert found["q01"][1] == pytest.approx(0.01, abs=1e-3)
