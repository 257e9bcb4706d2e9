"""RoboTwin without its simulator: names, options, seeds, packages and assets that lack, what is refused."""

import json
import sys
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from vla_envs import Episode, EpisodeSampler, evaluation_episodes, list_envs, make_spec, robotwin
from vla_envs.folders import digest_of
from vla_envs.gym.env import resolve_spec
from vla_envs.probe import Finding
from vla_envs.robotwin import package, planning
from vla_envs.robotwin.seeds import RANGE, candidates_of, seeds_of, solved_seeds
from vla_envs.robotwin.simulator import STOOD, RoboTwinSimulator
from vla_envs.robotwin.spec import REFUSED, TASKS
from vla_envs.robotwin.world import UnstableEpisode, World, crop

PHYSICS_RATE = 250  # Hz


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A checkout and assets in outline."""
    for name in ("ROBOTWIN_PATH", "ASSETS_PATH", "VLA_TORCHRL_ASSETS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    checkout, assets = tmp_path / "code", tmp_path / "data"
    for name in package.CHECKOUT.files:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    (checkout / "envs" / "click_bell.py").write_text('create_actor(modelname="050_bell")')
    for name in ("objects/objaverse", "objects/050_bell", "background_texture/unseen", "embodiments/aloha-agilex"):
        (assets / "assets" / name).mkdir(parents=True)
    for name in ("objects/same.json", "objects/objaverse/list.json", "embodiments/aloha-agilex/config.yml"):
        (assets / "assets" / name).touch()
    return checkout, assets


def test_46_tasks_and_all_of_them():
    assert len(TASKS) == 46
    assert sum(name.startswith("robotwin/") for name in list_envs()) == 47
    spec = make_spec("robotwin/all")
    assert [task.name for task in spec.tasks] == sorted(TASKS)
    assert spec.control_frequency is None
    assert (spec.action_dim, spec.state_dim, spec.chain_length) == (14, 14, 1)
    assert len(make_spec("robotwin/click_bell+turn_switch").tasks) == 2


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_four_tasks_are_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=f"RoboTwin's task {name} cannot be run: its (reset|success)"):
        make_spec(f"robotwin/{name}")


def test_options_with_the_guides_names():
    openvla = make_spec(
        "robotwin/place_empty_cup",
        embodiment=["piper", "piper", 0.6],
        task_config="demo_randomized",
        collect_wrist_camera=False,
        center_crop=True,
        step_lim=200,
    )
    assert openvla.image_shape == (224, 224)
    assert openvla.wrist_image_shape is None
    assert openvla.max_episode_steps == 200
    arms, seeds = "piper and piper 0.6 m apart", "seeds that demonstrations have solved"
    assert openvla.protocol == f"demo_randomized, {arms}, {seeds}, 200 actions"
    assert "at most 200 actions instead of 500" in openvla.protocol_deviations
    assert "images are their middle 0.9 by area, 224 x 224" in openvla.protocol_deviations
    pi0 = make_spec("robotwin/adjust_bottle")
    assert pi0.image_shape == (240, 320)
    assert pi0.wrist_image_shape == (2, 240, 320)
    assert pi0.max_episode_steps == 400
    own = make_spec("robotwin/place_shoe", shader="rt", instruction_type="unseen")
    assert [text for text in own.protocol_deviations if "STAND-IN" not in text] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embodiment": ["piper", "piper"]}, r"embodiment=\['piper', 'piper'\]: is \[aloha-agilex\]"),
        ({"embodiment": ["franka-panda"]}, "type embodiment="),
        ({"embodiment": ["piper", "piper", -1]}, "at most 2"),
        ({"embodiment": ["piper", "piper", True]}, "entry 2: must be"),
        ({"embodiment": []}, "embodiment="),
        ({"task_config": "demo_random"}, "task_config=demo_random: must be 'demo_clean' or 'demo_randomized'"),
        ({"instruction_type": "train"}, "instruction_type=train: must be 'seen' or 'unseen'"),
        ({"seeds": "test"}, "seeds=test: must be"),
        ({"shader": "raytracing"}, "shader=raytracing: must be"),
        ({"render_quality": "quick"}, "render_quality=quick: must be"),
        ({"step_lim": 0}, "step_lim=0: must be greater than or equal to 1"),
        ({"center_crop": "perhaps"}, "center_crop"),
        ({"collect_wrist_cameras": True}, "did you mean collect_wrist_camera"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_spec("robotwin/click_bell", **options)


def test_frames_are_reduced_by_whole_pixels():
    with pytest.raises(ValueError, match=r"does not divide frames of 240 x 320 pixels; type image_size=\[60,80\]"):
        make_spec("robotwin/click_bell", image_size=[80, 90])
    spec = make_spec("robotwin/click_bell", image_size=[60, 80])
    assert (spec.image_shape, spec.wrist_image_shape) == ((60, 80), (2, 60, 80))
    assert "images reduced to 60 x 80 pixels" in spec.protocol_deviations
    cropped = make_spec("robotwin/click_bell", center_crop=True, image_size=56)
    assert (cropped.image_shape, cropped.wrist_image_shape) == ((56, 56), (2, 56, 56))
    for options in ({}, {"image_size": [240, 320]}):
        whole = make_spec("robotwin/click_bell", **options)
        assert not any("reduced" in text for text in whole.protocol_deviations)


def test_wrong_tasks_are_refused():
    with pytest.raises(ValueError, match="unknown RoboTwin task 'place_empty_cups'; did you mean place_empty_cup"):
        make_spec("robotwin/place_empty_cups")
    with pytest.raises(ValueError, match="names a task twice"):
        make_spec("robotwin/click_bell+click_bell")


def test_training_and_evaluation_never_share_a_seed():
    assert set(solved_seeds("train")) == set(solved_seeds("eval"))
    assert len(solved_seeds("eval")) == 22
    assert set(solved_seeds("eval")) <= set(TASKS)
    for name in TASKS:
        train, held_out = seeds_of(name, "solved")
        assert not set(train) & set(held_out)
        assert len(set(train)) == len(train)
        assert len(held_out) >= 150
    # Of RLinf's files: numbers, first and last, also where they are in no order.
    numbers = {name: (len(found), found[0], found[-1]) for name, found in solved_seeds("train").items()}
    assert numbers["adjust_bottle"] == (1000, 0, 1262)
    assert numbers["pick_dual_bottles"] == (1250, 100002, 108340)
    assert numbers["put_bottles_dustbin"][0] == 996
    sums = {kind: sum(map(sum, solved_seeds(kind).values())) for kind in ("train", "eval")}
    assert sums == {"train": 2_561_678_910, "eval": 500_653_262_622}
    assert (max(solved_seeds("train")["place_shoe"]), max(solved_seeds("eval")["place_shoe"])) == (244490, 100287909)
    assert seeds_of("click_bell", "range") == seeds_of("turn_switch", "solved")
    assert (RANGE[0], len(RANGE)) == (10000, 190000)
    assert [(part[0], part[-1]) for part in seeds_of("click_bell", "range")] == [(10000, 149999), (150000, 199999)]


@pytest.mark.parametrize("seeds", ["solved", "range"])
@pytest.mark.parametrize("task", ["click_bell", "turn_switch"])
def test_evaluations_and_training_never_run_the_same_seed(task, seeds):
    spec = make_spec(f"robotwin/{task}", seeds=seeds)
    training, evaluation = seeds_of(task, seeds)

    def seed_of(episode):
        return next(candidates_of(task, seeds, episode.trial_id))

    assert [seed_of(episode) for episode in evaluation_episodes(spec, 150)] == [*evaluation[:150]]
    for mode in ("random", "ordered"):
        drawn = {seed_of(EpisodeSampler(spec, seed, mode=mode).next()) for seed in range(200)}
        assert drawn <= set(training)
        assert not drawn & set(evaluation)


def test_there_are_no_more_trials_than_seeds():
    with pytest.raises(ValueError, match="has 150 initial states per task, got trials=151"):
        evaluation_episodes(make_spec("robotwin/click_bell"), 151)
    with pytest.raises(ValueError, match="trials 0 to 999 and 1000000 to 1000149, got trial_id=1000"):
        candidates_of("click_bell", "solved", 1000)
    with pytest.raises(ValueError, match="got trial_id=2000000"):
        candidates_of("click_bell", "solved", 2_000_000)


def test_an_unstable_seed_is_not_replaced_by_one_of_the_other_part():
    assert [*islice(candidates_of("turn_switch", "solved", 139_998), 3)] == [149_998, 149_999, 200_000]
    assert [*islice(candidates_of("turn_switch", "solved", 1_000_000), 2)] == [150_000, 150_001]
    training, evaluation = map(set, seeds_of("place_shoe", "solved"))
    assert all(training.isdisjoint(islice(candidates_of("place_shoe", "solved", 10**6 + n), 21)) for n in range(150))
    assert all(evaluation.isdisjoint(islice(candidates_of("place_shoe", "solved", n), 21)) for n in range(150))


def test_trials_are_as_many_as_there_are_seeds():
    def numbers(suite, **options):
        spec = make_spec(suite, **options)
        return spec.initial_states, len(spec.evaluation_trials), spec.trials

    assert numbers("robotwin/adjust_bottle") == (1000, 150, 100)
    assert numbers("robotwin/adjust_bottle", seeds="range") == (140_000, 50_000, 100)
    assert numbers("robotwin/turn_switch") == (140_000, 50_000, 100)
    assert numbers("robotwin/all")[1:] == (150, 100)


def test_the_step_limits_are_those_of_the_checkout():
    try:
        folder = package.CHECKOUT.find()
    except FileNotFoundError as error:
        pytest.skip(str(error).splitlines()[-1])
    lines = (folder / "task_config" / "_eval_step_limit.yml").read_text().splitlines()
    published = {name: int(limit) for name, limit in (line.split(":") for line in lines)}
    assert {name: published[name] for name in TASKS} == TASKS
    assert set(published) == set(TASKS) | set(REFUSED)
    assert package.CHECKOUT.describe() == ()


def test_checkout_and_assets_are_found_where_they_are_named(folders, monkeypatch):
    checkout, assets = folders
    with pytest.raises(
        FileNotFoundError,
        match=r"no checkout of RoboTwin. Looked in(\n.*no such folder)+\n  Type: python -m vla_envs fetch robotwin",
    ):
        package.CHECKOUT.find()
    monkeypatch.setenv("ROBOTWIN_PATH", str(checkout))
    monkeypatch.setenv("ASSETS_PATH", str(assets))
    assert package.CHECKOUT.find() == checkout
    assert package.find_assets() == assets
    monkeypatch.setattr(package, "_imported_assets", {str(assets): str(assets)})  # as once RoboTwin is imported
    assert package.find_assets() == assets
    assert package.describe_assets() == ()
    assert package.missing_assets(assets, ["click_bell"], ["aloha-agilex"], checkout) == []
    assert package.CHECKOUT.describe() == (f"{checkout} is not RoboTwin at {package.CHECKOUT.commit[:12]}",)
    (assets / "STANDIN.json").write_text('{"standin": "robotwin"}')
    assert package.describe_assets()[0].startswith("STAND-IN objects and arms")
    spec = make_spec("robotwin/click_bell")
    assert spec.protocol_deviations[0].startswith("STAND-IN objects and arms")
    with pytest.raises(FileNotFoundError, match="no checkout of RoboTwin"):
        package.CHECKOUT.find("/nowhere")


def test_real_assets_in_the_checkout_come_before_stand_ins(folders, monkeypatch, tmp_path):
    checkout, assets = folders
    pack = tmp_path / "packs" / "robotwin"
    pack.mkdir(parents=True)
    (pack / "RoboTwin").symlink_to(checkout)
    (pack / "objects_standin").symlink_to(assets)
    monkeypatch.setenv("VLA_TORCHRL_ASSETS", str(pack.parent))
    assert package.find_assets() == assets
    (checkout / "assets").symlink_to(assets / "assets")
    assert package.find_assets() == checkout


def test_incomplete_assets_are_one_line_that_says_what_to_type(folders, monkeypatch):
    checkout, assets = folders
    monkeypatch.setenv("ROBOTWIN_PATH", str(checkout))
    monkeypatch.setenv("ASSETS_PATH", str(assets))
    package.check_packages(tasks=["click_bell"], arms=["aloha-agilex"])
    with pytest.raises(
        FileNotFoundError, match=r"lacks assets/embodiments/piper/config.yml; type: python -m vla_envs f"
    ):
        package.check_packages(tasks=["click_bell"], arms=["piper"])
    (assets / "assets" / "objects" / "050_bell").rmdir()
    with pytest.raises(FileNotFoundError, match="lacks assets/objects/050_bell; type:"):
        package.check_packages(tasks=["click_bell"])
    package.check_packages(tasks=["turn_switch"])
    monkeypatch.setenv("ASSETS_PATH", str(assets / "assets"))
    with pytest.raises(FileNotFoundError, match="it is the folder around assets/ that is to be named"):
        package.find_assets()


def test_missing_packages_and_other_versions():
    modules = mock.patch.dict(package._MODULES, {"no_such_module": "no-such-package"}, clear=True)
    with (
        modules,
        pytest.raises(ModuleNotFoundError, match="RoboTwin needs no-such-package, not installed; type: pip install"),
    ):
        package.check_modules()
    modules = mock.patch.dict(package._MODULES, clear=True)
    versions = mock.patch.dict(package.VERSIONS, {"numpy": "0.1"}, clear=True)
    with (
        modules,
        versions,
        pytest.raises(RuntimeError, match=r"RoboTwin's episodes belong to numpy 0.1, there is .*; type: pip install"),
    ):
        package.check_modules()


def test_the_digest_does_not_depend_on_line_ends_or_pictures(folders):
    checkout, _ = folders
    before = digest_of(checkout, package.CHECKOUT.parts)
    (checkout / "envs" / "picture.png").touch()
    file = checkout / "envs" / "click_bell.py"
    file.write_bytes(file.read_bytes() + b"\n")
    changed = digest_of(checkout, package.CHECKOUT.parts)
    assert changed != before
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert digest_of(checkout, package.CHECKOUT.parts) == changed


def test_the_crop_is_tensorflows():
    """``crop_and_resize`` of the central box with 0.9 of the area, by its formula in float64."""
    image = np.random.default_rng(0).integers(0, 256, (240, 320, 3), dtype=np.uint8)
    ours, theirs, side = crop(image), image / 255, 0.9**0.5
    for axis in (0, 1):
        position = (theirs.shape[axis] - 1) * ((1 - side) / 2 + side * np.arange(224) / 223)
        before = position.astype(int)
        rows, following = theirs.take(before, axis), theirs.take(before + 1, axis)
        theirs = rows + (following - rows) * np.expand_dims(position - before, tuple({0, 1, 2} - {axis}))
    theirs = (theirs * 255.5).astype(np.uint8)
    difference = np.abs(ours.astype(int) - theirs)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3  # float32 there


def test_frames_are_cropped_before_they_are_reduced():
    color = np.random.default_rng(0).random((240, 320, 4), np.float32)

    def image(**options):
        return World._image(SimpleNamespace(_options=options), color)

    whole = image(center_crop=False, image_size=None)
    assert np.array_equal(whole, (color[..., :3] * 255).astype(np.uint8))
    cropped = image(center_crop=True, image_size=None)
    assert np.array_equal(cropped, crop(whole))
    blocks = cropped.reshape(56, 4, 56, 4, 3).astype(float).mean((1, 3))
    assert np.abs(image(center_crop=True, image_size=(56, 56)) - blocks).max() <= 0.5


class StillCamera:
    """Sees the number that is its pose."""

    def __init__(self, pose):
        self.entity = SimpleNamespace(pose=pose, set_pose=lambda new: setattr(self.entity, "pose", new))

    def take_picture(self):
        self.seen = np.full((2, 2, 4), self.entity.pose, np.float32)

    def get_picture(self, _):
        return self.seen


def test_views_are_head_then_left_then_right_hand():
    head, left, right = (StillCamera(number) for number in range(3))
    cameras = SimpleNamespace(static_camera_list=[StillCamera(9), head], static_camera_name=["front", "head_camera"])
    cameras.left_camera, cameras.right_camera = left, right
    task = SimpleNamespace(cameras=cameras, scene=SimpleNamespace(update_render=lambda: None))
    world = object.__new__(World)
    vars(world).update(task=task, _wrist=True)
    for _ in range(2):  # poses are as they were
        assert [picture[0, 0, 0] for picture in world._pictures()] == [0, 1, 2]


def test_each_world_has_numpys_random_numbers_for_itself():
    worlds = [SimpleNamespace(_random=None), SimpleNamespace(_random=None)]
    np.random.seed(3)
    found = []
    for _ in range(3):
        for seed, world in enumerate(worlds):
            with World._own_random(world):
                if len(found) < 2:
                    np.random.seed(seed)
                found.append(np.random.rand())
    expected = [np.random.RandomState(seed).rand(3) for seed in range(2)]
    assert found == [*np.stack(expected, 1).flatten()]
    assert np.random.rand() == np.random.RandomState(3).rand()


@pytest.mark.parametrize(
    ("steps", "checks", "action"),
    # Of 10 actions, 100 physics steps are 10 for each, as RoboTwin gives them to the grippers; the first is number 1.
    [
        *[((100, 40), 1, 0), ((100, 40), 10, 0), ((100, 40), 11, 1), ((40, 100), 95, 9), ((100, 100), 100, 9)],
        *[((None, None), 26, 5), ((30, None), 26, 5), ((0, 0), 50, 9)],  # an arm that stands takes 50
    ],
)
def test_success_came_in_the_action_whose_share_of_the_motion_it_was(steps, checks, action):
    planners = [SimpleNamespace(planner=SimpleNamespace(last_steps=7, failed=True)) for _ in steps]
    robot = SimpleNamespace(left_mplib_planner=planners[0], right_mplib_planner=planners[1])

    def move(chunk):
        for arm, number in zip(planners, steps, strict=True):
            arm.planner.last_steps, arm.planner.failed = number, number is None
        task.checks = checks
        return None, [True], None, None

    task = SimpleNamespace(robot=robot, gen_sparse_reward_data=move)
    world = SimpleNamespace(task=task, _own_random=nullcontext)
    assert World.execute(world, np.zeros((10, 14), np.float32)) == action
    assert world.stood == (None in steps)


class StillWorld:
    """No world: 10001 and 10002 are unstable, and nothing is ever solved."""

    untouchable, stood = (), False

    def reset(self, name, seed):
        if seed in (10001, 10002):
            raise UnstableEpisode("it rolls")

    def execute(self, chunk):
        self.stood = len(chunk) == 2


def test_seeds_limits_and_remarks_are_those_of_the_running_episode():
    simulator = RoboTwinSimulator.__new__(RoboTwinSimulator)
    simulator.spec, simulator.world = make_spec("robotwin/click_bell", seeds="range", step_lim=6), StillWorld()
    found = []
    for trial in (0, 1, 0, 3):
        simulator.reset(Episode(0, trial))
        outcomes = [simulator.execute(np.zeros((4, 14), np.float32)) for _ in range(2)]
        assert [len(some) for some in outcomes] == [4, 2]
        assert [outcome.ends_episode for some in outcomes for outcome in some] == [False] * 5 + [True]
        found.append((simulator.seed, simulator.remark))
    replaced = "RoboTwin's seed 10001 is unstable, 10003 runs in its place"
    assert found == [(10000, STOOD), (10003, f"{replaced}; {STOOD}"), (10000, STOOD), (10003, STOOD)]


def test_what_a_reset_asks_again_is_remembered():
    asked = []

    def distance(first, second):
        asked.append((first.copy(), second.copy()))
        return np.float64(np.abs(first - second).sum())

    remembered = package._remembered(distance, 1024)
    lying, turned = np.array([1, 0, 0, 0], np.float32), np.array([0.6, 0.8, 0, 0], np.float32)
    found = [remembered(lying, other) for other in (lying, turned, lying.astype(np.float64), turned.copy())]
    assert found == [distance(lying, other) for other in (lying, turned, lying, turned)]
    assert [second.dtype for _, second in asked[:3]] == [np.float32, np.float32, np.float64]
    assert len(asked) == 3 + 4  # which are those of the comparison


def test_the_order_of_files_is_not_the_file_systems(monkeypatch):
    monkeypatch.setattr(package.glob, "glob", lambda pattern: ["base2", "base0", "base1"])
    assert package._sorted_files("base*") == ["base0", "base1", "base2"]


def test_topp_obeys_its_limits_and_goes_through_the_path():
    pytest.importorskip("toppra")
    path = np.array([[0.0, 0.0], [0.3, 0.1], [0.5, -0.2], [0.2, 0.4]])
    planner = planning.Planner()
    times, positions, velocities, _, duration = planner.TOPP(path, 1 / PHYSICS_RATE)
    assert len(times) == len(positions) == planner.last_steps == planning.LONGEST
    times = np.linspace(0, duration, int(duration * PHYSICS_RATE))  # all of them
    motion = planning.fastest_motion(path)
    positions, velocities = motion(times), motion(times, 1)
    assert np.allclose(positions[[0, -1]], path[[0, -1]], atol=1e-6)
    assert np.abs(velocities).max() <= planning.VELOCITY_LIMIT + 1e-3
    assert np.abs(np.diff(velocities, axis=0)).max() * PHYSICS_RATE <= planning.ACCELERATION_LIMIT + 0.05
    for point in path:
        assert np.abs(positions - point).max(1).min() < 5e-3
    # Rest to rest over a distance d, at most v and a: v / a + d / v seconds where v is reached.
    far = planner.TOPP(np.linspace([0.0], [2.0], 5), 1 / PHYSICS_RATE)[-1]
    assert far == pytest.approx(3.0, rel=0.02)
    with pytest.raises(RuntimeError, match="motion planning"):
        planner.plan_pose()


def test_motions_are_toppras_own_to_the_bit():
    """Its grid and its samples, computed another way; more than 500 samples are those that RoboTwin takes of them."""
    pytest.importorskip("toppra")
    from toppra import SplineInterpolator, algorithm, constraint

    random = np.random.default_rng(0)
    for number in range(20):
        path = random.normal(0, 10 ** random.uniform(-3, 0), (random.integers(2, 40), 6)).cumsum(0)
        limits = [
            constraint.JointVelocityConstraint(np.full(6, planning.VELOCITY_LIMIT)),
            constraint.JointAccelerationConstraint(np.full(6, planning.ACCELERATION_LIMIT)),
        ]
        spline = SplineInterpolator(np.linspace(0, 1, len(path)), path)
        moved = algorithm.TOPPRA(limits, spline, parametrizer="ParametrizeConstAccel").compute_trajectory()
        times = np.linspace(0, moved.duration, int(moved.duration * PHYSICS_RATE))
        if len(times) > 500:
            times = times[np.unique(np.linspace(0, len(times) - 1, 500).astype(int))]
        planner = planning.Planner()
        found = planner.TOPP(path, 1 / PHYSICS_RATE)
        assert found[-1] == moved.duration
        assert planner.last_steps == len(times)
        assert not planner.failed
        for ours, theirs in zip(found, (times, moved(times), moved(times, 1)), strict=False):
            assert np.array_equal(ours, theirs), number


def test_the_longest_sentences_are_known_before_a_simulator_starts(folders, monkeypatch):
    checkout, assets = folders
    monkeypatch.setenv("ROBOTWIN_PATH", str(checkout))
    monkeypatch.setenv("ASSETS_PATH", str(assets))
    assert make_spec("robotwin/turn_switch").tasks[0].instructions == ()
    texts = checkout / "description"
    (texts / "task_instruction").mkdir()
    (texts / "objects_description" / "050_bell").mkdir(parents=True)
    (texts / "objects_description" / "050_bell" / "base0.json").write_text(
        json.dumps({"seen": ["bell", "round golden bell"], "unseen": []})
    )
    patterns = {"seen": ["Click {A}.", "Click {A} with {a}."], "unseen": ["Ring {A} by {B}."]}
    (texts / "task_instruction" / "click_bell.json").write_text(json.dumps(patterns))
    code = checkout / "envs" / "click_bell.py"
    code.write_text('info = {"{A}": f"050_bell/base{number}", "{a}": str(arm), "{B}": "red block"}')
    said = {kind: make_spec("robotwin/click_bell", instruction_type=kind).tasks[0].instructions for kind in patterns}
    assert said["seen"] == ("Click the round golden bell with the right arm.", "Click the round golden bell.")
    assert said["unseen"] == ("Ring the round golden bell by red block.",)


def test_stand_ins_are_seen_only_while_they_are_needed():
    before = {name: sys.modules.get(name) for name in ("mplib", "open3d")}
    with planning.stand_ins():
        import mplib.sapien_utils

        assert mplib.sapien_utils.SapienPlanner is planning.Planner
    assert {name: sys.modules.get(name) for name in before} == before


def test_the_seeds_are_data_of_the_package():
    file = Path(package.__file__).parent / "seeds.json"
    assert file.stat().st_size < 100_000
    assert set(json.loads(file.read_text())) == {"train", "eval"}


def test_gymnasiums_horizon_is_the_benchmarks_and_is_said():
    for name in ("click_bell", "all"):
        spec = resolve_spec(f"robotwin/{name}", 200, {})
        assert spec == make_spec(f"robotwin/{name}", step_lim=200)
        assert set(spec.options["limits"].values()) == {spec.max_episode_steps} == {200}
        assert any(text.startswith("at most 200 actions instead of") for text in spec.protocol_deviations)


def test_the_doctor_says_what_lacks_and_what_to_type(folders, monkeypatch):
    checkout, assets = folders
    monkeypatch.setattr(robotwin, "check_extra", lambda *_: [])
    monkeypatch.setattr(robotwin, "check_vulkan", lambda _: Finding("ok", "Vulkan", ""))
    found = {finding.name: finding for finding in robotwin.check()}
    assert [found[f"RoboTwin's {what}"].status for what in ("checkout", "assets")] == ["missing", "missing"]
    for what, variable in (("checkout", "ROBOTWIN_PATH"), ("assets", "ASSETS_PATH")):
        assert found[f"RoboTwin's {what}"].remedy.startswith("python -m vla_envs fetch robotwin ")
        assert f"export {variable}=FOLDER" in found[f"RoboTwin's {what}"].remedy
    monkeypatch.setenv("ROBOTWIN_PATH", str(checkout))
    monkeypatch.setenv("ASSETS_PATH", str(assets))
    (assets / "STANDIN.json").write_text('{"standin": "robotwin"}')
    found = {finding.name: finding for finding in robotwin.check()}
    assert all(finding.status == "ok" for finding in found.values())
    assert "STAND-IN" in found["RoboTwin's assets"].detail
