"""The section ``env`` of what RLinf's ``env.train`` says."""

import math
from pathlib import PurePath

from vla_common.errors import unknown_name
from vla_envs import list_envs
from vla_from_rlinf.keys import DIFFERS, NONE, NOTHING, SAME, Keys

TRAIN = "env.train."
PLATE25 = "PutOnPlateInScene25Main-v3"
_TASK = f"{TRAIN}task_config."
_BENCHMARKS = ("calvin", "libero", "maniskill", "metaworld", "robotwin")
_OBJECTS = ("train", "test", "all")
_HORIZON, _IGNORE = f"{TRAIN}max_episode_steps", f"{TRAIN}ignore_terminations"
_SUITES = {
    "libero": {f"libero_{name}": f"libero/{name}" for name in ("spatial", "object", "goal", "10", "90", "130")},
    "metaworld": {
        "metaworld_50": "metaworld/MT50",
        "metaworld_45_ind": "metaworld/ML45-train",
        "metaworld_45_ood": "metaworld/ML45-test",
    },
    "calvin": {"calvin_d": "calvin/D", "calvin_abc": "calvin/ABC", "calvin_abcd": "calvin/ABCD"},
}
_RANDOMIZATION = {  # in RoboTwin's task_config/demo_clean.yml and demo_randomized.yml
    "random_background": (False, True),
    "cluttered_table": (False, True),
    "clean_background_rate": (1, 0.02),
    "random_head_camera_dis": (0, 0),
    "random_table_height": (0, 0.03),
    "random_light": (False, True),
    "crazy_random_light_rate": (0, 0.02),
}


def benchmark(keys: Keys) -> str:
    """Return which benchmark the file trains on; ValueError for none of ours."""
    return keys.choice(f"{TRAIN}env_type", _BENCHMARKS)


def read_env(keys: Keys, *, groups: bool) -> None:
    """Set the section ``env``; ``groups``: the algorithm is GRPO. ValueError: no such task; has the nearest name."""
    kind = benchmark(keys)
    keys.account(f"{TRAIN}env_type", "env")
    {"robotwin": _read_robotwin, "maniskill": _read_maniskill}.get(kind, _read_suite)(keys, kind)
    if kind == "libero":
        _read_libero(keys)
    if kind == "calvin":
        keys.settings["env.chains"] = "published"  # its calvin_gym_env.py knows these alone
    keys.put("env.num_envs", keys.whole, f"{TRAIN}total_num_envs")
    if kind != "robotwin":
        cut = keys.whole(f"{TRAIN}max_steps_per_rollout_epoch") if groups else math.inf  # all are reset then
        keys.put("env.max_episode_steps", lambda: min(keys.whole(_HORIZON), cut))
    keys.put("env.ignore_terminations", keys.flag, _IGNORE)
    _read_rewards(keys, kind, groups=groups)
    if keys.values.get(f"{TRAIN}is_eval"):
        text = "training draws from the initial states of training; evaluations have their own"
        keys.remark(NONE, [f"{TRAIN}is_eval"], text)


def _read_suite(keys: Keys, kind: str) -> None:
    keys.put("env.id", keys.choice, f"{TRAIN}task_suite_name", _SUITES[kind])
    height, width = f"{TRAIN}init_params.camera_heights", f"{TRAIN}init_params.camera_widths"

    def size() -> int:
        if keys.whole(height) != keys.whole(width, keys.get(height)):
            raise keys.error(height, f"and camera_widths={keys.get(width)}: frames here are as wide as high")
        return keys.whole(height)

    keys.put("env.image_size", size)


def _read_libero(keys: Keys) -> None:
    variant = f"{TRAIN}libero_variant"
    if keys.values.get(variant, "standard") != "standard":
        raise keys.error(variant, "LIBERO itself is the only variant here; write standard")
    keys.settings["env.protocol"] = "rlinf"
    keys.put("env.reset_gripper_open", keys.flag, f"{TRAIN}reset_gripper_open", True)
    if keys.has(f"{TRAIN}task_id_filter"):
        keys.put("env.task_ids", keys.get, f"{TRAIN}task_id_filter")
    if keys.has(f"{TRAIN}specific_reset_id"):
        text = "no setting for one initial state that is named; env.task_ids and episode_order=fixed come near it"
        keys.remark(NONE, [f"{TRAIN}specific_reset_id"], text)


def _read_maniskill(keys: Keys, kind: str) -> None:
    made = f"{TRAIN}init_params."
    keys.put("env.id", lambda: f"maniskill/{keys.choice(f'{made}id', [PLATE25])}")
    keys.put("env.object_set", keys.choice, f"{made}obj_set", _OBJECTS)
    setup = "actor.model.policy_setup"
    if "widowx" not in keys.text(setup, "widowx_bridge"):
        raise keys.error(setup, "plate-25 has a WidowX arm: widowx_bridge")
    keys.account(setup, "env.id")
    mode, rewards = f"{TRAIN}reward_mode", {"default": None, "only_success": "success"}
    if keys.values.get(mode, "default") in rewards:
        keys.put("env.reward_type", keys.choice, mode, rewards, "default")
    else:
        keys.remark(NONE, [mode], "rewards are staged or of success: env.reward_type")
    plates, counts = f"{made}use_multiple_plates", f"{made}max_episode_steps"
    if keys.values.get(plates):
        keys.remark(NONE, [plates], "another task here: env.id=maniskill/PutOnPlateInScene25MultiPlate-v1")
    else:
        keys.account(plates, "env.id")
    if keys.values.get(_HORIZON) == keys.values.get(counts):
        keys.account(counts, "env.max_episode_steps")
    else:
        keys.remark(DIFFERS, [counts], f"episodes have one horizon: {_HORIZON}")


def _read_robotwin(keys: Keys, kind: str) -> None:
    tasks = [name.partition("/")[2] for name in list_envs() if name.startswith("robotwin/")]
    task, limit, seeds = f"{_TASK}task_name", f"{_TASK}step_lim", f"{TRAIN}seeds_path"
    if (name := keys.text(task)) not in tasks:
        raise keys.error(task, str(unknown_name("task", name, tasks)))
    keys.put("env.id", lambda: f"robotwin/{keys.text(task)}")
    keys.put("env.step_lim", lambda: min(keys.whole(_HORIZON), keys.whole(limit)))
    if keys.values.get(_HORIZON) != keys.values.get(limit):
        keys.remark(DIFFERS, [_HORIZON, limit], "an episode has one limit, the lower of the two: env.step_lim")
    keys.put("env.embodiment", keys.get, f"{_TASK}embodiment")
    cameras = [f"{_TASK}camera.{place}_camera_type" for place in ("head", "wrist")]
    for camera in cameras:
        keys.choice(camera, ["D435"], "D435")
    keys.remark(SAME, cameras, "all cameras are RoboTwin's D435")
    keys.put("env.collect_wrist_camera", keys.flag, f"{_TASK}camera.collect_wrist_camera")
    keys.put("env.center_crop", keys.flag, f"{TRAIN}center_crop", False)
    keys.settings["env.instruction_type"] = "seen"  # its envs/robotwin asks for these alone
    written = keys.values.get(seeds)
    if isinstance(written, str) and PurePath(written).name == "train_seeds.json":  # in any folder
        keys.settings["env.seeds"] = "solved"
        keys.account(seeds, "env.seeds")
    elif seeds in keys.values:
        if written is None:
            keys.put("env.seeds", lambda: "range")
        text = "env.seeds=solved has the seeds of RLinf's train_seeds.json; no file of seeds is read"
        keys.remark(NONE, [seeds], text)
    _read_randomization(keys)
    custom = f"{TRAIN}use_custom_reward"
    if keys.values.get(custom):
        keys.remark(SAME, [custom], "rewards are of success alone")
    else:
        keys.remark(NONE, [custom], "there is no dense reward; rewards are of success alone")


def _read_randomization(keys: Keys) -> None:
    names = [f"{_TASK}domain_randomization.{name}" for name in _RANDOMIZATION]
    drawn = [keys.values.get(name) for name in names]
    clean, randomized = zip(*_RANDOMIZATION.values(), strict=True)
    for config, expected in (("demo_clean", clean), ("demo_randomized", randomized)):
        if drawn == list(expected):
            keys.settings["env.task_config"] = config
            for name in names:
                keys.account(name, "env.task_config")
    if "env.task_config" not in keys.settings:
        keys.remark(NONE, names, "scenes are those of RoboTwin's demo_clean or demo_randomized: env.task_config")


def _read_rewards(keys: Keys, kind: str, *, groups: bool) -> None:
    coefficient, relative, penalty = f"{TRAIN}reward_coef", f"{TRAIN}use_rel_reward", f"{TRAIN}use_step_penalty"
    if kind == "maniskill":
        keys.remark(NOTHING, [coefficient], "its ManiSkill reads no such key")
    elif groups:
        keys.settings["env.reward_coef"] = 1.0
        text = "divided out: GRPO divides by the deviation of the group; collector.success_bounds are success rates"
        keys.remark(DIFFERS, [coefficient], text)
    else:
        keys.put("env.reward_coef", keys.real, coefficient, 1.0)
    if kind == "calvin":
        keys.settings["env.relative_reward"] = False
        keys.remark(NOTHING, [relative], "its CALVIN does not read it: each finished task is paid once, as here")
    elif kind == "maniskill" or keys.flag(_IGNORE):
        keys.put("env.relative_reward", keys.flag, relative)
    else:
        keys.settings["env.relative_reward"] = False
        text = "success ends the episode here and is paid once either way: env.relative_reward=false"
        keys.remark(DIFFERS, [relative], text)
    if kind != "libero":
        keys.settings["env.step_penalty"] = 0.0
        keys.remark(NOTHING, [penalty], "read for LIBERO alone")
    elif keys.values.get(penalty) and keys.values.get(relative):
        keys.settings["env.step_penalty"] = 0.0
        text = "with use_rel_reward RLinf pays the change of it"
        keys.remark(NONE, [penalty], f"{text}: 1 in the first step of an episode and nothing afterwards")
    else:
        keys.put("env.step_penalty", lambda: float(keys.flag(penalty, False)))
