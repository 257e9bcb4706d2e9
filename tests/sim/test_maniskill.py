"""ManiSkill: plate-25 and its variants, the same in every process, and errors that say what to type."""

import json
import math
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from simulators import needs_maniskill_driver, needs_plate25, some

import vla_envs.maniskill.simulator as simulator_module
from vla_envs import EpisodeSampler, evaluation_episodes, make_env, make_spec
from vla_envs.maniskill import assets
from vla_envs.maniskill.simulator import episode_id_of, shuffled
from vla_envs.maniskill.spec import BUILT_IN, suites
from vla_envs.maniskill.variants import (
    FACTORS,
    INITIAL_JOINTS,
    MOVE_STEP,
    OBJECT_SETS,
    TEMPLATES,
    VARIANTS,
    make_split,
    places,
)
from vla_envs.rendering import vulkan
from vla_envs.rendering.egl import WORKER
from vla_envs.simulator import Episode

pytestmark = pytest.mark.timeout(900)  # the first frame of a process compiles shaders for ten seconds of CPU time
MAIN = "PutOnPlateInScene25Main-v3"
# Made with RL4VLA's and RLinf's own scene classes, by their names:
# - SPLIT|ids, |factors (object, plate, extra, table), |places (object, plate, third; of RLinf), |settled_heights (of
#   RL4VLA), |rotations (w, x, y, z of the object), |joints (offsets), |pairs (of MultiCarrot and MultiPlate: all);
# - CODE|SPLIT|ID|...: on the CPU in the stand-in scene, after a reset: |poses of object and plate [2, 7], |boxes [2, 3]
#   of both, |frame by the shader "default", every eighth pixel; after ACTIONS: |last_poses, |last_joints, |last_frame.
GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "maniskill_plate25.npz", allow_pickle=False)
COUNTS = {  # configurations in train and test, as published
    "Main-v3": (802_816, 141_120),
    "VisionImage-v1": (None, 250_880),
    "VisionTexture03-v1": (None, 12_845_056),
    "VisionTexture05-v1": (None, 12_845_056),
    "VisionWhole03-v1": (None, 12_845_056),
    "VisionWhole05-v1": (None, 12_845_056),
    "Carrot-v1": (None, 451_584),
    "Plate-v1": (None, 12_845_056),
    "Instruct-v1": (None, 12_845_056),
    "MultiCarrot-v1": (32_317_440, 9_695_232),
    "MultiPlate-v1": (45_244_416, 678_666_240),
    "Position-v1": (None, 643_072),
    "EEPose-v1": (None, 11_540_480_000),
    "PositionChangeTo-v1": (2_154_496, 2_154_496),
}


def case_of(name, object_set="test"):
    return make_split(f"PutOnPlateInScene25{name}", object_set)


# ---- the variants, without a simulator

CAMERA = {"eye": [0.5, 0, 0.5], "target": [0, 0, 0], "fov": 0.5}


def test_counts_of_configurations_are_those_of_the_benchmark():
    assert [f"PutOnPlateInScene25{name}" for name in COUNTS] == list(VARIANTS)
    for name, (train, test) in COUNTS.items():
        assert len(case_of(name, "test")) == test
        assert train is None or len(case_of(name, "train")) == train
    assert {variant.group for variant in VARIANTS.values()} == {"Training", "Vision", "Semantic", "Execution"}


@pytest.mark.parametrize("object_set", OBJECT_SETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_episode_ids_cover_every_value_of_every_factor(variant, object_set):
    split = make_split(variant, object_set)
    for number in (0, 1, len(split) // 3, len(split) - 1):
        assert split.episode_id(split.factor_indices(number)) == number
    for factor in FACTORS:  # an id for each value: whatever the others are, it decodes to that value
        seen = {
            split.values[factor][
                split.factor_indices(split.episode_id({**split.factor_indices(len(split) // 2), factor: digit}))[factor]
            ]
            for digit in range(len(split.values[factor]))
        }
        assert seen == set(split.values[factor])
    found = [split.decode(int(n)) for n in np.random.default_rng(0).integers(len(split), size=200)]
    for now in found:
        assert now.object in split.values["object"]
        assert now.plate in split.plates
        assert now.other_object != now.object
        assert now.other_plate != now.plate
        assert np.linalg.norm(now.places[0, :2] - now.places[1, :2]) > 0.07
        assert now.moves == (variant.endswith("PositionChangeTo-v1") and object_set != "train")
    assert {now.yaw for now in found} == {
        case_yaw for number in split.values["yaw"] for case_yaw in [2 * math.pi / 8 * number if number < 4 else
                                                                   -math.pi / 8 * (2 * number - 7)]
    }  # fmt: skip


def test_what_the_extra_factor_stands_for():
    split = case_of("EEPose-v1")
    assert all(not np.array_equal(split.decode(n).joints, INITIAL_JOINTS) for n in (7, 11_000_000_001))
    texture = case_of("VisionTexture05-v1")
    number = texture.factor_indices(1_000_000)
    assert texture.decode(1_000_000).texture == 1 + number["extra"] != texture.decode(1_000_000).table
    assert case_of("Instruct-v1").decode(12_845_055).template == 16
    assert len(TEMPLATES) == 17
    many = case_of("MultiCarrot-v1")
    pairs = {(c.object, c.other_object) for c in (many.decode(n) for n in range(0, len(many), 2104 * 4))}
    assert len(pairs) == 9 * 8
    assert places("pair").shape == (784, 3, 2)
    assert places("pair and outer pair").shape == (1412, 3, 2)


def test_an_episode_id_means_what_it_means_in_both_codes_of_the_benchmark():
    """tests/golden/maniskill_plate25.npz has what RL4VLA's and RLinf's own classes made of 48 ids of each split."""
    columns = ("object", "plate", "extra", "table")
    for name, split in [(name, make_split(name, chosen)) for name in VARIANTS for chosen in OBJECT_SETS]:
        key = f"{name.removeprefix('PutOnPlateInScene25')}:{split.object_set}"
        kind = split.variant.extra_factor
        for row, number in enumerate(GOLDEN[f"{key}|ids"]):
            wanted = dict(zip(columns, GOLDEN[f"{key}|factors"][row].tolist(), strict=True))
            now = split.decode(int(number))
            assert (now.object, now.plate, now.table) == (wanted["object"], wanted["plate"], wanted["table"]), key
            found = {"object": now.other_object, "plate": now.other_plate, "texture": now.texture}
            if kind == "template":
                assert now.template == wanted["extra"]
            elif kind == "robot pose":
                assert np.allclose(now.joints, INITIAL_JOINTS + GOLDEN[f"{key}|joints"][row], atol=1e-12, rtol=0)
            elif kind and not (kind == "object" and wanted["extra"] == wanted["object"]):  # beside itself
                assert found[kind] == wanted["extra"], (key, number)
            places, used = GOLDEN[f"{key}|places"][row], 3 if split.variant.layout.startswith("far") else 2
            assert np.array_equal(now.places[:used], places[:used])
            settled = make_split(name, split.object_set, start="rl4vla").decode(int(number))
            assert np.array_equal(settled.places[:used, :2], places[:used, :2])
            assert np.array_equal(settled.places[:used, 2], GOLDEN[f"{key}|settled_heights"][:used])
            turned = [math.cos(now.yaw / 2), 0, 0, math.sin(now.yaw / 2)]
            assert np.allclose(turned, GOLDEN[f"{key}|rotations"][row], atol=1e-12, rtol=0)


@pytest.mark.parametrize("object_set", OBJECT_SETS)
def test_what_lies_beside_an_object_or_a_plate_is_the_benchmarks(object_set):
    """All pairs; only where the benchmark has an object beside itself is there another."""
    own = 0
    for name in ("MultiCarrot-v1", "MultiPlate-v1"):
        split, first = case_of(name, object_set), name == "MultiCarrot-v1"
        factor, step = ("object" if first else "plate"), 2104 * 4 * (16 if first else 21)  # ids of a pair
        wanted = GOLDEN[f"{name}:{object_set}|pairs"].tolist()
        assert len(wanted) == len(split.values[factor]) * len(split.values["extra"])
        now = [split.decode(number * step) for number in range(len(wanted))]
        found = [[c.object, c.other_object] if first else [c.plate, c.other_plate] for c in now]
        assert len(set(map(tuple, found))) == len(found)
        different = [theirs for ours, theirs in zip(found, wanted, strict=True) if ours != theirs]
        assert all(one == other for one, other in different)
        own += len(different)
    assert own == (9 if object_set == "test" else 0)


def test_trials_walk_through_all_configurations_in_an_order_of_their_seed():
    for size in (1, 2, 10, 1000):
        assert sorted(shuffled(place, size, 3) for place in range(size)) == list(range(size))
    split = make_split(MAIN, "train")
    drawn = [split.decode(episode_id_of(split, trial, 0, {})).object for trial in range(320)]
    assert set(drawn) == set(range(16))
    assert max(map(drawn.count, range(16))) < 40
    assert [episode_id_of(split, t, 1, {}) for t in range(5)] != [episode_id_of(split, t, 2, {}) for t in range(5)]
    only = {"object": (0, 4), "table": (3,), "position": (0,), "yaw": (0, 2)}
    kept = [split.decode(episode_id_of(split, trial, 0, only)) for trial in range(4)]
    assert {(c.object, c.table, round(math.degrees(c.yaw))) for c in kept} == {
        (0, 3, 0), (0, 3, 90), (4, 3, 0), (4, 3, 90)
    }  # fmt: skip
    assert episode_id_of(split, 4, 0, only) == episode_id_of(split, 0, 0, only)


def test_suites_and_what_departs_from_the_protocol():
    assert set(suites()) == {*VARIANTS, "plate25-ood", *BUILT_IN}
    spec = make_spec("maniskill/plate25-ood")
    assert [task.name for task in spec.tasks[:2]] == [f"{MAIN}:train", "PutOnPlateInScene25VisionImage-v1:test"]
    assert [task.name for task in spec.tasks[-2:]] == [
        "PutOnPlateInScene25MultiCarrot-v1:train", "PutOnPlateInScene25MultiPlate-v1:train"
    ]  # fmt: skip
    groups = [task.group for task in spec.tasks]
    assert [groups.count(name) for name in ("Vision", "Semantic", "Execution")] == [5, 7, 3]
    assert len(spec.tasks) == 16
    assert spec.trials == 64
    assert spec.max_episode_steps == 80
    own = make_spec(
        f"maniskill/{MAIN}+PutOnPlateInScene25Carrot-v1:test",
        max_episode_steps=7, image_size=32, only={"plate": [0]}, render_quality="fast",
    )  # fmt: skip
    assert [text for text in own.protocol_deviations if "stand-ins" not in text] == [
        "horizon 7 instead of 80", "32 x 32 pixels instead of 480 x 640", "only plate 0",
        "at most 451584 configurations of a task, which training and evaluation share",
        "start as in RLinf: things fall as the episode starts (RL4VLA: they have settled)",
        "ManiSkill's shader minimal instead of default: about one level brighter",
    ]  # fmt: skip
    of_rlinf = make_spec("maniskill/plate25-ood", textures="rlinf")
    of_rl4vla = make_spec("maniskill/plate25-ood", start="rl4vla")
    assert [text for text in (*of_rlinf.protocol_deviations, *of_rl4vla.protocol_deviations) if "as in" in text] == [
        "start as in RLinf: things fall as the episode starts (RL4VLA: they have settled)",
        "textures as in RLinf's code: the table's (RL4VLA: the episode's)",
        "start as in RL4VLA: things have settled (RLinf: they fall as the episode starts)",
        "textures as in RL4VLA: the episode's (RLinf's code: its table's)",
    ]
    assert any(text.startswith("MultiCarrot: another distractor") for text in of_rlinf.protocol_deviations)
    few = make_spec(f"maniskill/{MAIN}", only={"object": [0], "table": [0], "position": [3], "yaw": [0, 2]})
    assert few.trials == few.initial_states == 2
    with pytest.raises(ValueError, match="has 2 initial states per task, got trials=3"):
        evaluation_episodes(few, 3)
    kept = {"object": [0], "table": [0], "position": [3], "yaw": [0]}  # one configuration of Main, 15 of the other
    assert make_spec(f"maniskill/{MAIN}+PutOnPlateInScene25MultiCarrot-v1", only=kept).initial_states == 1
    wrist = make_spec("maniskill/StackCube-v1")
    seen = make_spec("maniskill/PushCube-v1", camera=CAMERA)
    described = "camera with eye [0.5, 0.0, 0.5], target [0.0, 0.0, 0.0], fov 0.5"
    assert seen.protocol_deviations == (f"{described} instead of ManiSkill's",)
    assert wrist.wrist_image_shape == (1, 128, 128)
    assert wrist.state_dim == 9
    assert wrist.protocol_deviations == ()


@pytest.mark.parametrize(
    ("id", "options", "message"),
    [
        ("maniskill/PutOnPlateInScene25Mian-v3", {}, "did you mean PutOnPlateInScene25Main-v3"),
        ("maniskill/PickCub-v1", {}, "did you mean PickCube-v1"),
        (f"maniskill/{MAIN}", {"object_set": "tset"}, "did you mean test"),
        (f"maniskill/{MAIN}:tests", {}, "did you mean test"),
        (f"maniskill/{MAIN}+{MAIN}", {}, "names a variant twice"),
        (f"maniskill/{MAIN}", {"only": {"objects": [0]}}, "must be 'object', 'plate'"),
        (f"maniskill/{MAIN}", {"only": {"object": [16]}}, "numbers from 0 to 15"),
        (f"maniskill/{MAIN}", {"reward_type": "dense"}, "known are staged, success"),
        (f"maniskill/{MAIN}", {"image_size": 0}, "image_size=0: must be"),
        (f"maniskill/{MAIN}", {"max_episode_steps": 0}, "max_episode_steps=0: must be"),
        (f"maniskill/{MAIN}", {"max_episode_steps": "80"}, 'max_episode_steps="80": must be'),
        (f"maniskill/{MAIN}", {"max_episode_steps": 2.5}, "max_episode_steps=2.5: must be"),
        (f"maniskill/{MAIN}", {"image_size": True}, "image_size=true: must be"),
        (f"maniskill/{MAIN}", {"only": [0, 4]}, r"only=\[0, 4\]: must be"),
        (f"maniskill/{MAIN}", {"only": "object"}, "only=object: must be"),
        (f"maniskill/{MAIN}", {"only": {"object": 3}}, "only=.*: must be"),
        (f"maniskill/{MAIN}", {"only": {"object": None}}, "only=.*: must be"),
        (f"maniskill/{MAIN}", {"only": {"object": []}}, "numbers from 0 to 15"),
        (f"maniskill/{MAIN}", {"reward_type": ["staged"]}, "reward_type=.*: must be"),
        (f"maniskill/{MAIN}", {"backend": ["cuda"]}, "backend=.*: must be"),
        (f"maniskill/{MAIN}", {"object_set": ["test"]}, "object_set=.*: must be"),
        ("maniskill/plate25-ood", {"object_set": "test"}, "has an object set for each of its tasks"),
        ("maniskill/plate25-ood:test", {}, "type maniskill/plate25-ood"),
        ("maniskill/PushCube-v1+PickCube-v1", {}, "only variants of plate-25 are joined"),
        ("maniskill/PushCube-v1", {"control_mode": ["pd_ee_delta_pos"]}, "control_mode=.*: must be"),
        ("maniskill/PushCube-v1", {"camera": {**CAMERA, "eye": [0, 1, math.nan]}}, "entry 2: must be a finite number"),
        ("maniskill/PushCube-v1", {"camera": {**CAMERA, "eye": "123"}}, r"camera\.eye=.*: must be a list"),
        (f"maniskill/{MAIN}", {"camera": "side"}, "camera=side: must be"),
        (f"maniskill/{MAIN}", {"control_mode": "pd_ee_delta_pos"}, "has the benchmark's camera and control"),
        ("maniskill/PushCube-v1", {"control_mode": "pd_ee_delta_pse"}, "did you mean pd_ee_delta_pose"),
        ("maniskill/PushCube-v1", {"camera": "side"}, "camera=side: must be"),
        ("maniskill/PushCube-v1", {"camera": {"eye": [0, 0, 1]}}, r"camera\.target=null: must be a list"),
        ("maniskill/PushCube-v1", {"camera": {**CAMERA, "eye": [0, 1]}}, r"camera\.eye=.*: entry 2 is missing"),
        ("maniskill/PushCube-v1", {"camera": {**CAMERA, "eye": 1}}, r"camera\.eye=1: must be a list"),
        ("maniskill/PushCube-v1", {"camera": {**CAMERA, "fov": "wide"}}, r"camera\.fov=wide: must be a valid number"),
        ("maniskill/PushCube-v1", {"camera": {**CAMERA, "target": CAMERA["eye"]}}, "must be another place than camera"),
        ("maniskill/PushCube-v1", {"camera": {**CAMERA, "fov": 60}}, r"camera\.fov=.*: must be less than 3\.14"),
        ("maniskill/PickCube-v1", {"object_set": "test"}, "belong to plate-25"),
        ("maniskill/PickCube-v1", {"render_quality": "fast"}, "belong to plate-25"),
        (f"maniskill/{MAIN}", {"start": "rl4vl"}, "did you mean rl4vla"),
        (f"maniskill/{MAIN}", {"textures": "table"}, "must be 'rl4vla' or 'rlinf'"),
        (f"maniskill/{MAIN}", {"render_quality": "minimal"}, "must be 'benchmark' or 'fast'"),
        (f"maniskill/{MAIN}", {"start": "rl4vla", "backend": "cuda"}, "type backend=processes, or start=rlinf"),
    ],
)
def test_wrong_options_are_one_clear_error(id, options, message):
    with pytest.raises(ValueError, match=message):
        make_spec(id, **options)


def test_an_episode_id_out_of_range_is_refused():
    for number in (802_816, -1):
        with pytest.raises(ValueError, match=f"{number} is out of bounds"):
            make_split(MAIN, "train").decode(number)


# ---- what may be missing


def test_missing_and_half_downloaded_assets(tmp_path, monkeypatch):
    monkeypatch.delenv("VLA_TORCHRL_ASSETS", raising=False)
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        assets.find_assets()
    pack = tmp_path / "data"
    (pack / "robots" / "widowx").mkdir(parents=True)  # what a failed download leaves
    with pytest.raises(FileNotFoundError, match=r"incomplete, lacks robots/widowx/wx250s.urdf and .* more"):
        assets.find_assets()
    for name in ("robots/widowx/wx250s.urdf", "robots/widowx/meshes_wx250s/WXSA-250-M-10-Finger.stl",
                 "tasks/bridge_v2_real2sim_dataset/stages/bridge_table_1_v1.glb"):  # fmt: skip
        (pack / name).parent.mkdir(parents=True, exist_ok=True)
        (pack / name).write_text("x")
    models = {"object": ("more_carrot", 25), "plate": ("more_plate", 17), "table": ("more_table", 21)}
    for kind, (folder, number) in models.items():
        for k in range(number):
            files = ("imgs/{}", "textures/{}") if kind == "table" else ("{}/collision.obj", "{}/textured.glb")
            for file in files:
                path = pack / "carrot" / folder / file.format(k)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("x")
        entries = {str(k): {"texture": str(k)} for k in range(number)}
        (pack / "carrot" / folder / "model_db.json").write_text(json.dumps(entries))
    assert assets.find_assets() == pack
    assert assets.describe_assets() == ()
    (pack / "carrot" / "more_carrot" / "3" / "collision.obj").write_text("")
    with pytest.raises(FileNotFoundError, match=r"lacks carrot/more_carrot/3/collision.obj; a download"):
        assets.find_assets()
    with pytest.raises(FileNotFoundError, match="vla_envs fetch maniskill-assets"):
        make_env(f"maniskill/{MAIN}", num_envs=1)  # before any worker is started


@pytest.mark.parametrize(
    "said",
    [  # what SAPIEN 3.0.3 says without a driver, and with Mesa 22.3
        "RuntimeError: vk::createInstanceUnique: ErrorIncompatibleDriver",
        'RuntimeError: Failed to find a supported physical device "cpu"',
    ],
)
def test_a_missing_or_old_vulkan_driver_is_one_clear_error(monkeypatch, said):
    monkeypatch.setattr(vulkan, "try_driver", lambda: (False, said))
    meaning = re.escape(f"no Vulkan driver that SAPIEN can draw with ({said})")
    with pytest.raises(vulkan.VulkanError, match=meaning) as found:
        vulkan.check_driver()
    assert "scripts/install_vulkan_driver.py" in str(found.value)
    with pytest.raises(vulkan.VulkanError, match=meaning):
        gymnasium.make("vla_envs:vla/ManiSkill-PushCube-v0").reset()
    monkeypatch.setattr(vulkan, "has_gpu", lambda: True)  # installing another driver would not help
    with pytest.raises(vulkan.VulkanError, match=r"NVIDIA GPU: .*VK_ICD_FILENAMES=.*nvidia_icd.json"):
        vulkan.check_driver()


def test_whoever_hides_the_gpu_wants_the_cpu_to_draw(monkeypatch):
    monkeypatch.setattr(vulkan, "loads", lambda name: True)
    monkeypatch.setattr(vulkan.Path, "exists", lambda path: True)
    for name in ("CUDA_VISIBLE_DEVICES", *vulkan._CHOICES):
        monkeypatch.delenv(name, raising=False)
    assert vulkan.has_gpu()
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("VK_ICD_FILENAMES", str(vulkan.MANIFEST))):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not vulkan.has_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert vulkan.has_gpu()


def test_workers_take_turns_on_the_gpus(monkeypatch):
    monkeypatch.setattr(simulator_module, "has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    found = []
    for worker in ("0", "3", "5"):
        monkeypatch.setenv(WORKER, worker)
        found.append(simulator_module._render_backend())
    assert found == ["cuda:0", "cuda:3", "cuda:1"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES= before the command"):
        simulator_module._render_backend()
    monkeypatch.setattr(simulator_module, "has_gpu", lambda: False)
    assert simulator_module._render_backend() == "cpu"


# ---- the simulator

pytest.importorskip("mani_skill", reason="ManiSkill is not installed: pip install 'vla-torchrl[maniskill]'")


ACTIONS = np.random.default_rng(1).uniform(-1, 1, (12, 7)).astype(np.float32) * 0.05


@pytest.fixture(scope="module")
def simulator():
    """One world for all variants, and for all tests: building it takes a while."""
    made = make_spec("maniskill/plate25-ood", render_quality="fast").make()
    yield made
    made.close()


def trajectory(simulator, episode):
    simulator.reset(episode)
    first = simulator.observe()
    for action in ACTIONS:
        simulator.step(action)
    last = simulator.observe()
    world = simulator._world
    positions = np.concatenate([world.object_positions().numpy(), world.plate_positions().numpy()])
    return {"first": first.images, "last": last.images, "states": last.states, "positions": positions}


def same(first, second):
    return all(np.array_equal(first[key], second[key]) for key in first)


@needs_plate25
@pytest.mark.parametrize("task", range(14))
def test_every_variant_resets_steps_and_is_drawn(simulator, task):
    simulator.reset(Episode(task, 0, 3))
    before = simulator.observe()
    assert before.images.shape == (480, 640, 3)
    assert before.images.dtype == np.uint8
    assert before.states.shape == (8,)
    now = simulator._world.configurations[0]
    assert np.allclose(before.states, now.joints, atol=1e-6)
    outcomes = [simulator.step(action) for action in ACTIONS]
    assert not any(outcome.success for outcome in outcomes)
    assert all(outcome.reward == 0 for outcome in outcomes)
    after = simulator.observe()
    assert before.images.std() > 5
    assert (before.images != after.images).any()
    assert after.task_description.lower().startswith(before.task_description.lower())
    assert simulator.spec.tasks[task].name.startswith(simulator._world._running[0].variant.id)


@needs_plate25
def test_an_episode_is_the_same_in_any_order_and_any_process(simulator, caplog):
    first = trajectory(simulator, Episode(0, 1, 3))
    other = trajectory(simulator, Episode(3, 0, 3))  # another variant in between, and an interrupted episode
    simulator.reset(Episode(7, 5, 3))
    simulator.step(ACTIONS[0])
    assert same(first, trajectory(simulator, Episode(0, 1, 3)))
    assert not np.array_equal(first["last"], other["last"])

    # Workers have a smaller world, with the objects of their variants; two runs of a group share the initial state.
    others = (8, *some((13, 4, 12, 10, 9), 3))  # of each extra factor and layout
    suite = "+".join(simulator.spec.tasks[task].name for task in (0, *others))
    env = make_env(
        f"maniskill/{suite}", 2, len(ACTIONS), seed=0, num_workers=1, group_size=2, step_timeout=400.0,
        relative_reward=True, render_quality="fast",
    )  # fmt: skip
    try:
        spec = env.simulator_spec
        env.pool.reset({0: Episode(0, 1, 3), 1: Episode(0, 2, 3)})
        assert np.array_equal(env.pool.arrays.images[0], first["first"])
        env.pool.arrays.actions[:] = ACTIONS
        assert env.pool.step([0, 1]) == []
        assert np.array_equal(env.pool.arrays.images[0], first["last"])
        assert np.array_equal(env.pool.arrays.states[0], first["states"])
        env.episodes = EpisodeSampler(spec, 7, group_size=2)
        seen = env.reset()["images"]
        assert np.array_equal(seen[0], seen[1])
        env.pool.reset({1: Episode(0, 2, 3)})  # the other slot stays as it is
        now = env.pool.arrays.images
        assert np.array_equal(now[0], seen[0])
        assert (now[1] != seen[0].numpy()).any()
        assert env.rollout(2, break_when_any_done=False)["next", "step_mask"].all()
        for place, task in enumerate(others, start=1):
            here = trajectory(simulator, Episode(task, 2, 3))
            env.pool.reset({0: Episode(place, 2, 3)})
            assert np.array_equal(env.pool.arrays.images[0], here["first"]), task
            env.pool.arrays.actions[:] = ACTIONS
            assert env.pool.step([0]) == []
            assert np.array_equal(env.pool.arrays.images[0], here["last"]), task
            assert np.array_equal(env.pool.arrays.states[0], here["states"]), task
        assert env.worker_restarts == 0
        assert "observe() returned the instruction" not in caplog.text  # it is one that the task declares
    finally:
        env.close()


def test_a_resized_frame_does_not_depend_on_the_number_of_threads():
    import torch

    from vla_envs.maniskill.overlay import resize

    frames = torch.randint(256, (4, 480, 640, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found.append([resize(frames, *size) for size in ((224, 224), (96, 96), (80, 80), (256, 320))])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))
    assert resize(torch.full((1, 480, 640, 3), 200, dtype=torch.uint8), 96, 96).unique().tolist() == [200]


HIT = "400001"  # the arm hits its object, which flies elsewhere on a CPU that rounds the joints otherwise, by 1e-6 rad


@needs_plate25
@pytest.mark.skipif(not assets.describe_assets(), reason="the golden states and frames are of the stand-in scene")
@pytest.mark.parametrize("code", ["rlinf", "rl4vla"])
def test_an_episode_is_that_of_its_own_code(code):
    """Of RL4VLA's and RLinf's own classes: states to 10 micrometres, frames but for rounded textures."""
    cases = [name.split("|")[1:3] for name in GOLDEN.files if name.startswith(f"{code}|") and name.endswith("|poses")]
    names = list(dict.fromkeys(split for split, _ in cases))
    suite = "+".join(f"PutOnPlateInScene25{name}" for name in names)
    made = make_spec(f"maniskill/{suite}", start=code, textures=code).make()
    world, seen = made._world, []

    def poses():
        now = world.configurations[0]
        actors = world._objects[now.object], world._plates[now.plate]
        return np.concatenate([actor.pose.raw_pose.numpy() for actor in actors])

    def check(wanted, name, found, tolerance=1e-5):
        assert np.allclose(found, GOLDEN[f"{wanted}|{name}"], atol=tolerance, rtol=0), (wanted, name)

    def check_frame(wanted, name):
        frame, golden = made.observe().images[::8, ::8], GOLDEN[f"{wanted}|{name}"]
        assert (abs(frame.astype(int) - golden) <= ("Vision" in wanted)).mean() > 0.99, (wanted, name)
        return frame

    assert cases
    for split, number in [*cases, cases[0]]:  # the first again: nothing is left of those in between
        wanted = f"{code}|{split}|{number}"
        world.reset(options={"split": names.index(split), "episode_id": int(number)})
        check(wanted, "poses", poses())
        check(wanted, "boxes", [2 * world._half_size[kind][0].numpy() for kind in ("object", "plate")])
        first = check_frame(wanted, "frame")
        for action in ACTIONS:
            made.step(action)
        check(wanted, "last_joints", made.observe().states)
        if number != HIT:
            check(wanted, "last_poses", poses())
            check_frame(wanted, "last_frame")
        seen.append([first, made.observe().images.copy(), poses()])
    made.close()
    assert all(np.array_equal(one, again) for one, again in zip(seen[0], seen[-1], strict=True))


@needs_plate25
def test_the_background_is_the_photograph(simulator):
    world = simulator._world
    for task in (0, 1):
        simulator.reset(Episode(task, 2, 3))
        seen = world._get_obs_sensor_data()["3rd_view_camera"]
        things = world.overlay.foreground(seen["segmentation"])[0]
        photograph = world.overlay._tables[world.configurations[0].table]
        assert 0.01 < things.float().mean() < 0.4
        assert (seen["rgb"][0] == photograph)[~things].all()
        assert (seen["rgb"][0] != photograph)[things].any(-1).float().mean() > 0.9


@needs_plate25
def test_textures_follow_the_extra_factor_and_cover_what_they_should(simulator):
    world, splits = simulator._world, simulator._world.splits
    by_name = {split.variant.id: place for place, split in enumerate(splits)}

    def frame(place, **digits):
        split = splits[place]
        number = split.episode_id({**split.factor_indices(0), **digits})
        world.reset(options={"split": place, "episode_id": number})
        seen = world._get_obs_sensor_data()["3rd_view_camera"]
        return seen["rgb"][0].numpy(), world.overlay.foreground(seen["segmentation"])[0].numpy()

    plain, things = frame(by_name["PutOnPlateInScene25VisionImage-v1"])
    weak, _ = frame(by_name["PutOnPlateInScene25VisionTexture03-v1"], extra=4)
    strong, _ = frame(by_name["PutOnPlateInScene25VisionTexture05-v1"], extra=4)
    other, _ = frame(by_name["PutOnPlateInScene25VisionTexture05-v1"], extra=5)
    background = world.overlay._tables[world.configurations[0].table].numpy()
    assert (strong[~things] == background[~things]).all()
    assert (strong != other).any()
    untouched, _ = frame(0)  # Main in training, of the same digits
    mixed, less = strong.astype(float) - untouched, weak.astype(float) - untouched
    assert (abs(mixed)[things] > 5).mean() > 0.5
    assert abs(less - 0.6 * mixed)[things].max() <= 2
    whole, _ = frame(by_name["PutOnPlateInScene25VisionWhole05-v1"], extra=4)
    assert (whole[~things] != background[~things]).mean() > 0.5
    assert (plain[things] != strong[things]).any()


@needs_plate25
def test_a_texture_over_the_whole_picture_is_opencvs(simulator):
    """The benchmark doubles it with OpenCV, takes the part at the middle of the rectangle around robot and objects, and
    mixes in single precision.
    """
    import torch

    cv2 = pytest.importorskip("cv2")
    overlay, rng = simulator._world.overlay, np.random.default_rng(0)
    frame = rng.integers(0, 256, (480, 640, 3), dtype=np.uint8)
    foreground = torch.zeros(480, 640, dtype=torch.bool)
    foreground[100:301, 200:501] = True  # its middle: row 200, column 350
    for number, strength in ((4, 0.3), (9, 0.5)):
        doubled = cv2.resize(overlay._textures[number].numpy(), (1280, 960))[200:680, 350:990]
        share = np.float32(overlay._mix[number] * strength)
        expected = (frame * (1 - share) + doubled * share).astype(np.uint8)
        found = overlay.perturb(torch.from_numpy(frame), foreground, number, strength, everywhere=True)
        assert np.array_equal(found.numpy(), expected)


@needs_plate25
def test_success_and_the_staged_reward(simulator):
    """Success by state: the object put on the plate counts, in the air above it or beside it does not."""
    from mani_skill.utils.structs.pose import Pose

    world, still = simulator._world, np.array([0, 0, 0, 0, 0, 0, 1], np.float32)
    simulator.reset(Episode(0, 0, 3))
    for _ in range(3):
        assert not simulator.step(still).success  # where it starts, beside the plate
    object_actor = world._objects[world.configurations[0].object]
    plate = world.plate_positions()[0]

    def put(dx, height):
        pose = object_actor.pose.raw_pose.clone()
        pose[0, :3] = plate + pose.new_tensor([dx, 0.0, height])
        object_actor.set_pose(Pose.create(pose))
        object_actor.set_linear_velocity(pose.new_zeros(3))

    put(0.0, 0.03)
    outcomes = [simulator.step(still) for _ in range(6)]
    assert outcomes[-1].success
    assert outcomes[-1].reward == 0
    world._was_held[:] = True
    assert simulator.step(still).reward == pytest.approx(1.1)
    world._was_held_long[:] = True
    assert simulator.step(still).reward == pytest.approx(1.2)
    world.get_info(), world.get_info()  # looking twice changes nothing
    assert simulator.step(still).reward == pytest.approx(1.2)
    put(0.1, 0.03)
    assert not [simulator.step(still) for _ in range(4)][-1].success
    assert simulator.step(still).reward == pytest.approx(0.2)


@needs_plate25
def test_the_expert_earns_every_stage(simulator):
    simulator.reset(Episode(0, 3, 11))
    rewards = []
    while len(rewards) < 80 and not (rewards and rewards[-1] > 1):
        rewards.append(round(simulator.step(simulator.expert_action()).reward, 3))
    assert sorted(set(rewards)) in ([0.0, 0.1, 0.2, 1.2], [0.0, 0.1, 1.1, 1.2])
    assert rewards == sorted(rewards)


@needs_plate25
def test_position_change_moves_the_object_at_its_own_time(simulator):
    world = simulator._world
    place = [split.variant.moves for split in world.splits].index(True)
    simulator.reset(Episode(place, 0, 3))
    start, target = world.configurations[0].places[0, :2], world.configurations[0].places[2, :2]
    for step in range(1, 9):
        simulator.step(np.array([0, 0, 0, 0, 0, 0, 1], np.float32))
        now = world.object_positions()[0, :2].numpy()
        wanted = start if step < MOVE_STEP else target
        assert np.linalg.norm(now - wanted) < 0.06, step


@needs_plate25
def test_the_expert_solves_episodes_it_was_not_made_with(simulator):
    solved = 0
    for trial in range(4):
        simulator.reset(Episode(0, trial, 424242))
        solved += any(simulator.step(simulator.expert_action()).success for _ in range(80))
    assert solved >= 3


@needs_maniskill_driver
def test_the_expert_of_push_cube_and_a_camera_of_ones_own():
    """It comes back from disturbed actions, and the camera changes what is seen and nothing else."""
    pushing = make_spec("maniskill/PushCube-v1", image_size=32).make()
    random, solved = np.random.default_rng(0), 0
    for trial in range(3):
        pushing.reset(Episode(0, trial, 424242))
        for _ in range(pushing.spec.max_episode_steps):
            action = pushing.expert_action()
            assert action.shape == (7,)
            assert action.dtype == np.float32
            assert abs(action).max() <= 1
            disturbed = np.clip(action + 0.1 * random.standard_normal(7), -1, 1)
            if pushing.step(disturbed).success:
                solved += 1
                break
    assert solved >= 2
    pushing.reset(Episode(0, 0, 424242))
    usual = pushing.observe()
    pushing.close()
    nearer = make_spec("maniskill/PushCube-v1", image_size=32, camera=CAMERA, control_mode="pd_ee_delta_pos").make()
    nearer.reset(Episode(0, 0, 424242))
    own = nearer.observe()
    assert any(nearer.step(nearer.expert_action()).success for _ in range(20))
    nearer.close()
    assert np.array_equal(own.states, usual.states)
    assert not np.array_equal(own.images, usual.images)


@needs_plate25
def test_the_batched_simulation_with_one_world_is_the_same(simulator, monkeypatch, caplog):
    """What can be tested of it without CUDA: its rewards, masks, clock and pictures, over the end of an episode."""
    import torch

    from vla_envs.maniskill.batch import BatchedWorlds
    from vla_envs.maniskill.overlay import resize

    spec = make_spec(f"maniskill/{MAIN}", max_episode_steps=28, image_size=64, backend="cuda", render_quality="fast")
    assert spec.batched.endswith("BatchedWorlds")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="backend=cuda needs a GPU"):
            make_env(f"maniskill/{MAIN}", num_envs=2, backend="cuda")
    worlds = BatchedWorlds(spec, 1, len(ACTIONS), ignore_terminations=False, device="cpu")
    worlds.reset({0: Episode(0, 1, 3)})
    simulator.reset(Episode(0, 1, 3))
    assert worlds.texts == [simulator.observe().task_description]
    assert worlds.arrays.images.shape == (1, 64, 64, 3)
    worlds.arrays.actions[0] = ACTIONS
    for executed in (12, 12, 4):
        assert worlds.step([0]) == []
        assert worlds.arrays.executed.sum() == executed
        assert not any(simulator.step(action).success for action in ACTIONS[:executed])
        seen = simulator.observe()
        assert np.array_equal(worlds.arrays.states[0], seen.states)
        assert torch.equal(worlds.arrays.images[0], resize(torch.from_numpy(seen.images)[None], 64, 64)[0])
    assert worlds.step([]) == []
    assert not worlds.arrays.executed.any()

    robot = worlds._world.agent.robot
    with monkeypatch.context() as patch:  # physics that has exploded
        patch.setattr(type(robot), "get_qpos", lambda self: torch.full((1, 8), torch.nan))
        worlds.reset({0: Episode(0, 2, 11)})
        assert not worlds.arrays.states.any()
    assert worlds.step([0]) == [0]
    assert not worlds.arrays.executed.any()
    assert worlds.restarts == 1
    assert worlds.errors[0].startswith("states are [nan")
    assert "task Main trial 2 seed 11" in caplog.text.replace(spec.tasks[0].name, "Main")

    worlds.reset({0: Episode(0, 3, 11)})  # what the expert does, with its rewards, to success
    simulator.reset(Episode(0, 3, 11))
    actions, outcomes = [], []
    while len(actions) < 28 and not (outcomes and outcomes[-1].success):
        actions.append(simulator.expert_action())
        outcomes.append(simulator.step(actions[-1]))
    assert outcomes[-1].success
    done, rewards, successes = 0, [], []
    while done < len(actions):
        worlds.arrays.actions[0] = (actions[done:] + [actions[-1]] * len(ACTIONS))[: len(ACTIONS)]
        worlds.step([0])
        executed = worlds.arrays.executed[0]
        rewards.extend(worlds.arrays.rewards[0, executed])
        successes.extend(worlds.arrays.successes[0, executed])
        done += len(ACTIONS)
    assert rewards == [np.float32(outcome.reward) for outcome in outcomes]
    assert max(rewards) > 0
    assert successes == [outcome.success for outcome in outcomes]
    with pytest.raises(ValueError, match="backend=processes"):
        worlds.map("module:function", [])
    worlds.close()


@needs_maniskill_driver
@pytest.mark.parametrize("name", some(BUILT_IN, 3))
def test_every_task_of_maniskill_runs(name):
    made = make_spec(f"maniskill/{name}", image_size=32).make()
    made.reset(Episode(0, 0, 3))
    first = made.observe()
    assert first.images.shape == (32, 32, 3)
    assert first.images.std() > 5
    assert first.states.shape == (9,)
    assert (first.wrist_images is not None) == BUILT_IN[name].wrist_camera
    outcome = made.step(np.full(7, 0.1, np.float32))
    assert not outcome.success
    assert outcome.reward == 0
    made.close()


@needs_maniskill_driver
def test_the_goal_of_pick_cube_is_seen():
    """ManiSkill hides it from cameras, and a policy is given no coordinates."""
    made = make_spec("maniskill/PickCube-v1").make()
    visible = 0
    for trial in range(4):  # the arm may be in front of it
        made.reset(Episode(0, trial, 3))
        seen = made.observe().images
        made._world.goal_site.hide_visual()
        visible += (made.observe().images != seen).any()
    made.close()
    assert visible >= 2


@needs_maniskill_driver
def test_a_task_of_maniskill_by_gymnasium():
    env = gymnasium.make("vla_envs:vla/ManiSkill-StackCube-v0", image_size=64, horizon=2)
    first, _ = env.reset(seed=3, options={"task_id": 0, "trial_id": 1})
    again, _ = env.reset(seed=3, options={"task_id": 0, "trial_id": 1})
    assert first["wrist_images"].shape == (1, 64, 64, 3)
    assert first["images"].shape == (64, 64, 3)
    assert first["task_descriptions"] == "stack the red cube on the green cube"
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert env.observation_space.contains(first)
    env.step(env.action_space.sample())
    assert env.step(env.action_space.sample())[3]
    env.close()


@needs_plate25
@pytest.mark.parametrize(
    ("name", "only"),
    [*((name, None) for name in VARIANTS), *((name, {"object": [17, 20]}) for name in some(VARIANTS, 5))],
)
def test_every_instruction_of_an_episode_is_known_before_the_simulator_starts(name, only):
    split = make_split(name, "test")
    if only and not set(only["object"]) <= set(split.values["object"]):
        only = {"object": [3, 5]}
    (task,) = make_spec(f"maniskill/{name}:test", only=only).tasks
    folder, rng, met = assets.find_assets(), np.random.default_rng(0), set()
    for number in rng.integers(len(split), size=2000):
        now = split.decode(int(number))
        if only is None or now.object in only["object"]:
            met.add(assets.instruction(folder, TEMPLATES[now.template], now.object, now.plate))
    assert met <= set(task.instructions)
    assert len(met) > 0.9 * len(task.instructions)  # and few that no episode has


def test_without_assets_there_are_no_instructions_yet(tmp_path):
    assert make_spec(f"maniskill/{MAIN}", assets=str(tmp_path)).tasks[0].instructions == ()
