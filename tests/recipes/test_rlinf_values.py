"""Every experiment of RLinf's guides has RLinf's values, but for those that docs/algorithms.md lists with a reason."""

import dataclasses
import fnmatch
import functools
import json
import math

import pytest
import yaml
from omegaconf import OmegaConf
from paths import CONF, GOLDEN, ROOT

from vla_algos.run.arguments import compose_settings
from vla_algos.run.environments import make_env_spec
from vla_common.experiments import find_experiments
from vla_envs.robotwin import BENCHMARK
from vla_policies.registry import get_policy_class

GUIDE = json.loads((GOLDEN / "rlinf_experiments.json").read_text())
EXPERIMENTS = find_experiments(CONF)
WITHOUT_A_ROW = {
    "calvin_abc_d_grpo_openvlaoft": "the guide names it and RLinf has no file of it but a smoke test",
    "calvin_scenes_ppo_small": "ours alone: on a CPU",
    "libero_10_ppo_openvlaoft": "the guide names it and RLinf has no file of it",
    "libero_grpo_lerobot": "ours alone: checkpoints of LeRobot",
    "libero_ppo_lerobot": "ours alone: checkpoints of LeRobot",
    "maniskill_push_cube_ppo_small": "ours alone: on a CPU",
    "metaworld_50_ppo_smolvla": "ours alone: checkpoints of LeRobot",
    "metaworld_button_ppo_smallflow": "ours alone",
    "metaworld_faucets_ppo_small": "ours alone",
    "metaworld_mt50_ppo_small": "ours alone: on a CPU",
    "metaworld_mt50_sft_small": "cloning",
    "metaworld_ppo_small": "ours alone: on a CPU",
    "robotwin_bell_ppo_small": "ours alone: on a CPU",
}
FAMILIES = {"openpi": "pi0", "openvla": "openvla", "openvla_oft": "openvla_oft"}
SUITES = {"calvin_d": "calvin/D", "metaworld_50": "metaworld/MT50", "metaworld_45_ind": "metaworld/ML45-train"}
RANDOMIZATION = {  # of RoboTwin's task_config/
    "demo_clean": {
        "random_background": False,
        "cluttered_table": False,
        "clean_background_rate": 1,
        "random_head_camera_dis": 0,
        "random_table_height": 0,
        "random_light": False,
        "crazy_random_light_rate": 0,
    },
    "demo_randomized": {
        "random_background": True,
        "cluttered_table": True,
        "clean_background_rate": 0.02,
        "random_head_camera_dis": 0,
        "random_table_height": 0.03,
        "random_light": True,
        "crazy_random_light_rate": 0.02,
    },
}


class Row(dict):
    """What RLinf's run uses, by its own names; ``unread`` are those that were not read yet."""

    def __init__(self, values):
        super().__init__({**GUIDE["where_a_file_is_silent"], **values})
        self.unread = set(values)

    def __getitem__(self, name):
        self.unread.discard(name)
        return super().__getitem__(name)


def in_our_words(row: Row) -> dict:
    """What RLinf's run comes to in our settings."""
    gae = row["algorithm.adv_type"] == "gae"
    assert row["algorithm.loss_type"] == ("actor_critic" if gae else "actor")
    ours = dict(settings_of_both(row))
    for part in (settings_of_ppo if gae else settings_of_grpo, settings_of_env, settings_of_optim, settings_of_policy):
        ours.update(part(row))
    assert not row.unread, f"recorded and compared with nothing: {sorted(row.unread)}"
    return ours


def level(name):
    return name.removesuffix("_level")


def settings_of_both(row):
    yield "recipe", "ppo" if row["algorithm.adv_type"] == "gae" else "grpo"
    yield "iterations", row["runner.max_epochs"]
    yield "episode_order", "ordered" if row["env.train.use_ordered_reset_state_ids"] else "random"
    yield "loss.log_prob_level", level(row["algorithm.logprob_type"])
    yield "loss.clip_epsilon", [row["algorithm.clip_ratio_low"], row["algorithm.clip_ratio_high"]]
    yield "loss.entropy_coeff", row["algorithm.entropy_bonus"]
    entropy = level(row["algorithm.entropy_type"])
    if row["algorithm.entropy_bonus"]:
        yield "loss.entropy_level", entropy
    yield "loss.dual_clip", None  # algorithm.clip_ratio_c is in every file and handed on by none
    yield "loss.reference_kl_coeff", 0.0  # nor is algorithm.kl_beta
    yield "update.epochs", row["algorithm.update_epoch"]
    yield "update.micro_batch_size", row["actor.micro_batch_size"]


def rollout(row):
    """Decisions of an environment in an iteration."""
    decisions = row["env.train.max_steps_per_rollout_epoch"] // row["actor.model.num_action_chunks"]
    return decisions * row["env.train.rollout_epoch"]


def settings_of_ppo(row):
    assert not row["algorithm.filter_rewards"]
    yield "env.group_size", row["algorithm.group_size"]
    yield "collector.decisions", rollout(row)
    yield "update.minibatch_size", row["actor.global_batch_size"]
    yield "update.minibatches", None
    # Trajectories are weighed alike exactly where RLinf masks what follows an episode's end.
    masked = not (row["env.train.auto_reset"] or row["env.train.ignore_terminations"])
    yield "update.aggregation", "trajectory_mean" if masked else "token_mean"
    yield "update.critic_warmup_steps", row["actor.optim.critic_warmup_steps"]
    yield "gae.gamma", row["algorithm.gamma"]
    yield "gae.lmbda", row["algorithm.gae_lambda"]
    yield "gae.reward_level", level(row["algorithm.reward_type"])
    yield "gae.normalize", True
    bootstrap = {"always": "any_done", "standard": "truncation"}[row["algorithm.bootstrap_type"]]
    yield "gae.bootstrap", bootstrap if row["env.train.auto_reset"] else "none"  # it is part of the automatic reset
    yield "loss.critic_coeff", 1.0
    yield "loss.clip_value", row["algorithm.value_clip"]
    yield "loss.huber_delta", row["algorithm.huber_delta"]
    yield "optim.value_lr", row["actor.optim.value_lr"]
    # Fixed or drawn again, without groups each episode of an iteration is one of its own.
    assert row["env.train.group_size"] == 1
    assert row["env.train.use_fixed_reset_state_ids"] in (True, False)


def settings_of_grpo(row):
    assert not row["env.train.auto_reset"]
    assert not row["env.train.ignore_terminations"]
    episodes = row["env.train.total_num_envs"] * row["env.train.rollout_epoch"]
    yield "group_size", row["algorithm.group_size"]
    alike, fixed = row["env.train.group_size"], row["env.train.use_fixed_reset_state_ids"]
    fixed |= row["env.train.env_type"] == "robotwin"  # which repeats a seed in a group either way
    yield "runs of a group that start alike", alike if fixed else 1
    yield "collector.groups", episodes // row["algorithm.group_size"]
    yield "collector.max_groups", episodes // row["algorithm.group_size"]
    bounds = None
    if row["algorithm.filter_rewards"]:
        of_rewards = [row["algorithm.rewards_lower_bound"], row["algorithm.rewards_upper_bound"]]
        bounds = [bound / row["env.train.reward_coef"] for bound in of_rewards]
    yield "collector.success_bounds", bounds
    decisions = row["env.train.total_num_envs"] * rollout(row)
    assert decisions % row["actor.global_batch_size"] == 0
    yield "update.minibatch_size", None
    yield "update.minibatches", decisions // row["actor.global_batch_size"]
    yield "update.aggregation", "trajectory_mean"


def settings_of_env(row):
    kind = row["env.train.env_type"]
    if kind == "maniskill":
        yield "env.id", f"maniskill/{row['env.train.init_params.id']}"
        yield "env.object_set", row["env.train.init_params.obj_set"]
    elif kind == "robotwin":
        yield from settings_of_robotwin(row)
    else:
        suite = row["env.train.task_suite_name"]
        yield "env.id", SUITES.get(suite) or f"{kind}/{suite.removeprefix('libero_')}"
        yield "env.image_size", row["env.train.init_params.camera_heights"]
    if kind == "libero":
        yield "env.reset_gripper_open", row["env.train.reset_gripper_open"]
    if kind == "calvin":
        yield "env.chains", "published"  # its calvin_gym_env.py has these alone
    yield "env.num_envs", row["env.train.total_num_envs"]
    yield "env.max_episode_steps", row["env.train.max_episode_steps"]
    yield "env.ignore_terminations", row["env.train.ignore_terminations"]
    yield "env.reward_coef", row["env.train.reward_coef"]
    yield "env.relative_reward", row["env.train.use_rel_reward"]
    yield "env.step_penalty", float(row["env.train.use_step_penalty"])


def settings_of_robotwin(row):
    task = "env.train.task_config."
    yield "env.id", f"robotwin/{row[task + 'task_name']}"
    assert row[task + "step_lim"] == row["env.train.max_episode_steps"]
    assert row["env.train.use_custom_reward"]  # of success, not the task's unfinished dense one
    yield "env.embodiment", row[task + "embodiment"]
    assert row[f"{task}camera.head_camera_type"] == row[f"{task}camera.wrist_camera_type"] == "D435"
    yield "env.collect_wrist_camera", row[f"{task}camera.collect_wrist_camera"]
    yield "env.center_crop", row["env.train.center_crop"]
    assert row["env.train.seeds_path"] == "train_seeds.json"
    yield "env.seeds", "solved"
    yield "env.instruction_type", "seen"  # its envs/robotwin asks for these alone
    drawn = {name: row[f"{task}domain_randomization.{name}"] for name in RANDOMIZATION["demo_clean"]}
    yield "env.task_config", next(name for name, values in RANDOMIZATION.items() if values == drawn)


def settings_of_optim(row):
    yield "optim.eps", row["actor.optim.adam_eps"]
    yield "optim.lr", row["actor.optim.lr"]
    yield "optim.betas", [row["actor.optim.adam_beta1"], row["actor.optim.adam_beta2"]]
    yield "optim.weight_decay", row["actor.optim.weight_decay"]
    yield "optim.max_grad_norm", row["actor.optim.clip_grad"]
    yield "optim.schedule", row["actor.optim.lr_scheduler"]
    yield "optim.warmup_updates", max(0, row["actor.optim.lr_warmup_steps"])  # below 0: a share of the steps, 0
    if row["actor.optim.lr_scheduler"] == "cosine":
        assert row["actor.optim.num_cycles"] == 0.5
        assert row["actor.optim.total_training_steps"] == row["runner.max_epochs"]  # a step per iteration
        yield "optim.final_lr", row["actor.optim.min_lr_rate"]


def settings_of_policy(row):
    family = FAMILIES[row["actor.model.model_type"]]
    head = row["actor.model.add_value_head"]
    yield "policy.family", family
    yield "policy.value_head", head
    yield "policy.gradient_checkpointing", row["actor.fsdp_config.gradient_checkpointing"]
    yield "policy.lora_rank", row["actor.model.lora_rank"] if row["actor.model.is_lora"] else None
    chunk = row["actor.model.num_action_chunks"]
    if row["env.train.env_type"] == "robotwin":
        assert row["actor.model.action_dim"] == len(BENCHMARK.schema.actions)
    if family == "openvla":
        assert chunk == 1
    else:
        yield "policy.num_action_chunks", chunk
    yield from settings_of_flow(row, head) if family == "pi0" else settings_of_tokens(row, family, head)


def settings_of_tokens(row, family, head):
    yield "policy.dtype", {"bf16": "bfloat16"}[row["actor.model.precision"]]
    yield "policy.unnorm_key", row["actor.model.unnorm_key"]
    yield "policy.temperature", row["rollout.sampling_params.temperature_train"]
    yield "policy.top_k", max(0, row["rollout.sampling_params.top_k"])  # -1 and 0: all
    if family == "openvla":
        assert row["actor.model.use_proprio"] is False
        return
    yield "policy.layout", row["actor.model.implement_version"]
    for name in ("num_images_in_input", "use_proprio", "use_film"):
        yield f"policy.{name}", row[f"actor.model.{name}"]
    if row["env.train.env_type"] == "robotwin":
        assert row["actor.model.proprio_dim"] == len(BENCHMARK.schema.states)
        yield "policy.statistics", "min_max"  # ROBOT_PLATFORM=ALOHA, of the guide
        yield "policy.center_crop", False  # actor.model.center_crop does nothing, and env.train.center_crop has cropped
        yield "policy.image_resize", "bicubic"  # of frames that have the model's size
    if head:
        yield "policy.value_per_action", row["actor.model.value_type"] == "action_level"


def settings_of_flow(row, head):
    assert row["actor.model.precision"] is None
    for name in ("config_name", "num_images_in_input", "num_steps", "action_horizon", "train_expert_only"):
        yield f"policy.{name}", row[f"actor.model.openpi.{name}"]
    yield "policy.method", row["actor.model.openpi.noise_method"]
    level = row["actor.model.openpi.noise_level"]
    if row["actor.model.openpi.noise_method"] == "flow_sde":
        yield "policy.noise_level", level
    yield "policy.noise_std_range", [0.08, 0.16]  # the class's, no file has another
    joint = row["actor.model.openpi.joint_logprob"]
    yield "policy.joint_log_prob", joint
    if head:
        reads = row["actor.model.openpi.value_after_vlm"]
        yield (
            "policy.value_after_vlm",
            row["actor.model.openpi.value_vlm_mode"].removesuffix("_token") if reads else None,
        )
        yield "policy.detach_critic", bool(row["actor.model.openpi.detach_critic_input"])


@functools.cache
def composed(experiment):
    """Our values, by the name that is typed, with ``null`` replaced by what it stands for."""
    recipe = EXPERIMENTS[experiment].recipe
    config = OmegaConf.to_container(compose_settings(recipe, [f"experiment={experiment}"], CONF), resolve=True)
    family, policy = config["policy"]["family"], config["policy"]
    defaults = {field.name: field.default for field in dataclasses.fields(get_policy_class(family).config_class)}
    policy.update({name: default for name, default in defaults.items() if policy.get(name) is None})
    policy["dtype"] = policy["dtype"] or "float32"
    if policy.get("joint_log_prob", False) is None:
        policy["joint_log_prob"] = policy["method"] == "flow_noise"
    config["env"]["max_episode_steps"] = make_env_spec(config["env"]).max_episode_steps
    config["runs of a group that start alike"] = config.get("group_size")
    values = {}
    for name, value in config.items():
        section = value if isinstance(value, dict) else None
        values.update({name: value} if section is None else {f"{name}.{key}": each for key, each in section.items()})
    return values


def same(one, other):
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if any(isinstance(value, (bool, str, type(None))) for value in (one, other)):
        return type(one) is type(other) and one == other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


def listed():
    """Rows of the table of deviations: setting, patterns of experiments, RLinf's value, ours."""
    text = (ROOT / "docs" / "algorithms.md").read_text()
    table = text.partition("## Where the experiments differ")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    for line in lines:
        setting, experiments, theirs, ours, why = (cell.strip() for cell in line.strip("|").split("|"))
        assert why, f"{setting}: a deviation without a reason"
        patterns = [pattern.strip(" `") for pattern in experiments.split(",")]
        yield setting.strip("`"), patterns, yaml.safe_load(theirs.strip("`")), yaml.safe_load(ours.strip("`"))


def listed_of(experiment):
    return {
        setting: (theirs, ours)
        for setting, patterns, theirs, ours in listed()
        if any(fnmatch.fnmatch(experiment, pattern) for pattern in patterns)
    }


def test_every_experiment_has_a_row_or_is_ours_alone():
    files_of_rows = {each.file for each in EXPERIMENTS.values() if each.suite}
    named = {name for name, each in EXPERIMENTS.items() if each.suite or each.file not in files_of_rows}
    assert named == set(GUIDE["runs"]) | set(WITHOUT_A_ROW)
    assert not set(GUIDE["runs"]) & set(WITHOUT_A_ROW)


@pytest.mark.parametrize("experiment", GUIDE["runs"])
def test_values_are_those_of_rlinf_but_for_what_is_listed(experiment):
    theirs, ours = in_our_words(Row(GUIDE["runs"][experiment])), composed(experiment)
    assert len(theirs) > 30
    found = {name: (value, ours[name]) for name, value in theirs.items() if not same(value, ours[name])}
    expected = listed_of(experiment)
    not_listed = {name: values for name, values in found.items() if name not in expected}
    assert not not_listed, "set RLinf's value, or list the deviation in docs/algorithms.md (RLinf's, ours)"
    assert not expected.keys() - found.keys(), "listed in docs/algorithms.md, and not a deviation (any more)"
    for name, values in found.items():
        assert all(map(same, values, expected[name])), f"{name}: {values}, docs/algorithms.md has {expected[name]}"


def test_every_listed_deviation_is_of_some_experiment():
    for setting, patterns, *_ in listed():
        for pattern in patterns:
            assert fnmatch.filter(GUIDE["runs"], pattern), f"{setting}: no experiment is called {pattern}"


def test_a_value_that_differs_is_found():
    """The comparison can fail: for each setting of a row, another value in RLinf's file gives another one of ours."""
    row = GUIDE["runs"]["libero_10_ppo_openpi_pi05"]
    changed = {name: value for name, value in row.items() if type(value) in (int, float)}
    derived = {"actor.optim.total_training_steps", "actor.optim.num_cycles"}
    asserted = {"algorithm.group_size", "env.train.group_size", "runner.max_epochs"} | derived
    before = in_our_words(Row(row))
    for name in changed.keys() - asserted:
        assert in_our_words(Row({**row, name: row[name] * 2 or 1})) != before, name
