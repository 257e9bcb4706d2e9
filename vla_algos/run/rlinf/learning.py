"""The algorithm: what RLinf's ``algorithm`` says."""

from __future__ import annotations

import math
from functools import partial

from vla_algos.run.rlinf.keys import Keys, NotGiven
from vla_algos.run.rlinf.untranslated import DIFFERS, NONE, NOTHING

_ALGORITHM, _OPTIM, _TRAIN = "algorithm.", "actor.optim.", "env.train."
_LEVELS = {"token_level": "token", "action_level": "action", "chunk_level": "chunk"}
_LOSSES = {"actor_critic": "gae", "decoupled_actor_critic": "gae", "actor": "grpo"}
_CRITIC = ("value_clip", "huber_delta")
_FILTER = ("filter_rewards", "rewards_lower_bound", "rewards_upper_bound")


def recipe(keys: Keys) -> str:
    """Return which of our recipes is meant.

    Raises:
        ValueError: none of them.
    """
    advantages, loss = f"{_ALGORITHM}adv_type", f"{_ALGORITHM}loss_type"
    known = {"gae": "ppo", "grpo": "grpo"}
    found_loss = keys.get(loss)
    if not isinstance(found_loss, str) or found_loss not in _LOSSES:
        raise keys.error(loss, f"recipes are PPO and GRPO; RLinf's losses of these are {', '.join(_LOSSES)}")
    found = keys.choice(advantages, known)
    if _LOSSES[found_loss] != keys.get(advantages):
        raise keys.error(
            loss, f"goes with algorithm.adv_type={_LOSSES[found_loss]}, the file has {keys.get(advantages)}"
        )
    if keys.configuration.values.get("actor.enable_sft_co_train"):
        raise keys.error("actor.enable_sft_co_train", "no recipe learns from demonstrations while it learns by RL")
    if keys.configuration.values.get("reward.use_reward_model"):
        raise keys.error("reward.use_reward_model", "rewards are the benchmark's; there is no learnt one here")
    keys.account(advantages, "recipe")
    keys.account(loss, "recipe")
    return found


def read_algorithm(keys: Keys, name: str) -> None:
    """Set what is of the algorithm.

    Args:
        keys: of the file.
        name: ``"ppo"`` or ``"grpo"``.
    """
    summed = _summed_steps(keys)  # how many numbers RLinf averages that are summed here

    def bounds() -> list[float]:
        low, high = keys.number(f"{_ALGORITHM}clip_ratio_low"), keys.number(f"{_ALGORITHM}clip_ratio_high")
        if summed == 1:
            return [low, high]
        return [round(1 - (1 - low) ** summed, 3), round((1 + high) ** summed - 1, 3)]

    bonus = f"{_ALGORITHM}entropy_bonus"
    keys.put("loss.log_prob_level", lambda: keys.choice(f"{_ALGORITHM}logprob_type", _LEVELS))
    keys.put("loss.clip_epsilon", bounds)
    _read_entropy(keys, bonus, summed)
    if summed > 1:
        changed = [f"{_ALGORITHM}clip_ratio_low", f"{_ALGORITHM}clip_ratio_high", bonus]
        text = (
            f"log-probabilities of all steps are summed here, RLinf averages {summed}: bounds to that "
            "power, the bonus divided by it"
        )
        keys.remark(DIFFERS, changed, text)
    keys.settings.update({"loss.dual_clip": None, "loss.reference_kl_coeff": 0.0})
    keys.put("update.epochs", lambda: keys.whole(f"{_ALGORITHM}update_epoch", 1))
    keys.put("update.micro_batch_size", lambda: keys.whole("actor.micro_batch_size"))
    (_read_ppo if name == "ppo" else _read_grpo)(keys)


def _summed_steps(keys: Keys) -> int:
    """Return how many log-probabilities RLinf averages where ours are summed: all steps and the first noise."""
    values = keys.configuration.values
    if values.get("actor.model.model_type") != "openpi" or not values.get("actor.model.openpi.joint_logprob"):
        return 1
    try:
        return keys.whole("actor.model.openpi.num_steps", 10) + 1
    except NotGiven:
        return 1


def _read_entropy(keys: Keys, bonus: str, summed: int) -> None:
    values = keys.configuration.values
    level = f"{_ALGORITHM}entropy_type"
    flow = values.get("actor.model.model_type") == "openpi"
    if flow and keys.settings.get("policy.method") != "flow_noise" and values.get(bonus):
        keys.settings["loss.entropy_coeff"] = 0.0
        keys.remark(NOTHING, [bonus], "its entropy of pi is 0 but for flow_noise: loss.entropy_coeff=0")
    else:
        keys.put("loss.entropy_coeff", lambda: round(keys.number(bonus, 0) / summed, 12))
    if not keys.settings.get("loss.entropy_coeff"):
        keys.remark(NOTHING, [level], "there is no entropy bonus")
    elif flow:
        keys.settings["loss.entropy_level"] = "token"
        keys.remark(
            DIFFERS, [level], "its model has taken the mean over a chunk's tokens before: loss.entropy_level=token"
        )
    else:
        keys.put("loss.entropy_level", lambda: keys.choice(level, _LEVELS))


def _decisions(keys: Keys) -> int:
    """Return the decisions of an environment in an iteration."""
    steps, chunk = keys.whole(f"{_TRAIN}max_steps_per_rollout_epoch"), keys.whole("actor.model.num_action_chunks")
    if steps < chunk:
        raise keys.error(f"{_TRAIN}max_steps_per_rollout_epoch", f"is less than one chunk of {chunk}")
    return steps // chunk * keys.whole(f"{_TRAIN}rollout_epoch", 1)


def _read_ppo(keys: Keys) -> None:
    if keys.configuration.values.get(f"{_ALGORITHM}filter_rewards"):
        text = "drops groups; recipes/ppo.py has none, recipes/grpo.py has collector.success_bounds"
        keys.remark(NONE, [f"{_ALGORITHM}{name}" for name in _FILTER], text)
    else:
        keys.remark(NOTHING, [f"{_ALGORITHM}{name}" for name in _FILTER], "algorithm.filter_rewards is not set")
    keys.put("collector.decisions", lambda: _decisions(keys))
    keys.settings["update.minibatches"] = None
    keys.put("update.minibatch_size", lambda: keys.whole("actor.global_batch_size"))
    keys.put("update.critic_warmup_steps", lambda: keys.whole(f"{_OPTIM}critic_warmup_steps", 0, least=0))
    auto, ignore = f"{_TRAIN}auto_reset", f"{_TRAIN}ignore_terminations"

    def aggregation() -> str:
        # Trajectories are weighed alike exactly where RLinf masks what follows an episode's end.
        masked = not keys.flag(auto) and not keys.flag(ignore)
        return "trajectory_mean" if masked else "token_mean"

    def bootstrap() -> str:
        if not keys.flag(auto):
            return "none"  # it is part of the automatic reset
        return keys.choice(f"{_ALGORITHM}bootstrap_type", {"always": "any_done", "standard": "truncation"}, "standard")

    keys.put("update.aggregation", aggregation)
    keys.put("gae.bootstrap", bootstrap)
    if not keys.where(lambda: keys.flag(auto)):
        keys.remark(NOTHING, [f"{_ALGORITHM}bootstrap_type"], "env.train.auto_reset is False")
    if keys.configuration.values.get(auto) is False:
        text = "RLinf waits for the longest episode, and masks; here the next one starts at once"
        keys.remark(DIFFERS, [auto], text)
    keys.put("gae.gamma", lambda: keys.real(f"{_ALGORITHM}gamma"))
    keys.put("gae.lmbda", lambda: keys.real(f"{_ALGORITHM}gae_lambda"))
    keys.put("gae.reward_level", lambda: _reward_level(keys))
    keys.settings.update({"gae.normalize": True, "loss.critic_coeff": 1.0})
    keys.put("loss.clip_value", lambda: keys.get(f"{_ALGORITHM}value_clip", None))
    keys.put("loss.huber_delta", lambda: keys.real(f"{_ALGORITHM}huber_delta", 10.0))
    keys.put("optim.value_lr", lambda: keys.real(f"{_OPTIM}value_lr"))
    if keys.where(lambda: keys.whole(f"{_TRAIN}group_size", 1) > 1):
        keys.put("env.group_size", lambda: keys.whole(f"{_TRAIN}group_size"))
    else:
        keys.settings["env.group_size"] = 1
        keys.account(f"{_TRAIN}group_size", "env.group_size")
    keys.remark(NOTHING, [f"{_ALGORITHM}group_size"], "read for GRPO and the filter; env.train.group_size counts")
    fixed = f"{_TRAIN}use_fixed_reset_state_ids"
    keys.remark(NOTHING, [fixed], "without groups each episode of an iteration is one of its own either way")
    _read_lag(keys)


def _reward_level(keys: Keys) -> str:
    level = {"action_level": "action", "chunk_level": "chunk"}
    key = f"{_ALGORITHM}reward_type"
    found = keys.choice(key, level)
    if keys.whole("actor.model.num_action_chunks") == 1:
        return "chunk"  # of one action
    if found == "action" and not keys.settings.get("policy.value_per_action"):
        raise keys.error(
            key, "the policy has one value per chunk; write chunk_level, or actor.model.value_type: action_level"
        )
    if found == "chunk" and keys.settings.get("policy.value_per_action"):
        keys.settings["policy.value_per_action"] = False
        keys.remark(
            DIFFERS,
            ["actor.model.value_type"],
            "one reward per chunk goes with one value: policy.value_per_action=false",
        )
    return found


def _read_lag(keys: Keys) -> None:
    """Set what is of asynchronous runs."""
    threshold, weight = f"{_ALGORITHM}staleness_threshold", f"{_ALGORITHM}behave_weight_threshold"
    decoupled = keys.configuration.values.get(f"{_ALGORITHM}loss_type") == "decoupled_actor_critic"
    if not decoupled:
        keys.settings.update({"sync.lag": 0, "loss.max_behaviour_weight": None})
        keys.remark(NOTHING, [threshold, weight], "algorithm.loss_type is not decoupled_actor_critic")
        return
    keys.put("sync.lag", lambda: keys.whole(threshold, 1, least=0))
    keys.remark(
        DIFFERS, [threshold], "weights that collect are exactly sync.lag updates old; RLinf's are at most that old"
    )
    keys.put("loss.max_behaviour_weight", lambda: keys.get(weight, None))
    keys.remark(DIFFERS, [weight], "a weight above it is bounded by it here; RLinf leaves the element out")
    if keys.has(f"{_ALGORITHM}clip_ratio_c"):
        keys.put("loss.dual_clip", lambda: keys.real(f"{_ALGORITHM}clip_ratio_c"))
    keys.put("gae.normalize", lambda: keys.flag(f"{_ALGORITHM}normalize_advantages", True))


def _read_grpo(keys: Keys) -> None:
    values = keys.configuration.values
    for name in ("auto_reset", "ignore_terminations"):
        if keys.where(partial(keys.flag, f"{_TRAIN}{name}")):
            raise keys.error(f"{_TRAIN}{name}", "GRPO compares whole episodes; write False")
    keys.account(f"{_TRAIN}auto_reset", "recipe")
    keys.put("group_size", lambda: keys.whole(f"{_ALGORITHM}group_size", least=2))

    def groups() -> int:
        episodes = keys.whole(f"{_TRAIN}total_num_envs") * keys.whole(f"{_TRAIN}rollout_epoch", 1)
        number = episodes // keys.whole(f"{_ALGORITHM}group_size", least=2)
        if not number:
            raise keys.error(f"{_ALGORITHM}group_size", f"there are only {episodes} episodes in an iteration")
        return number

    keys.put("collector.groups", groups)
    keys.put("collector.max_groups", groups)
    _read_bounds(keys)

    def minibatches() -> int:
        return math.ceil(
            keys.whole(f"{_TRAIN}total_num_envs") * _decisions(keys) / keys.whole("actor.global_batch_size")
        )

    keys.settings["update.minibatch_size"] = None
    keys.put("update.minibatches", minibatches)
    text = (
        "RLinf counts decisions after an episode's end too; as many optimizer steps here, of those that were executed"
    )
    keys.remark(DIFFERS, ["actor.global_batch_size"], text)
    keys.settings["update.aggregation"] = "trajectory_mean"
    _remark_on_groups(keys)
    text = "GRPO compares the sums of an episode's rewards"
    keys.remark(NOTHING, [f"{_ALGORITHM}{name}" for name in ("reward_type", "gamma", "gae_lambda")], text)
    keys.remark(NOTHING, [f"{_ALGORITHM}{name}" for name in (*_CRITIC, "bootstrap_type")], "GRPO has no critic")
    keys.remark(NOTHING, [f"{_OPTIM}{name}" for name in ("value_lr", "critic_warmup_steps")], "GRPO has no critic")
    keys.remark(NOTHING, [key for key in values if key == f"{_ALGORITHM}normalize_advantages"], "read for GAE alone")


def _read_bounds(keys: Keys) -> None:
    if not keys.where(lambda: keys.flag(f"{_ALGORITHM}filter_rewards", False)):
        keys.settings["collector.success_bounds"] = None
        keys.remark(NOTHING, [f"{_ALGORITHM}{name}" for name in _FILTER], "algorithm.filter_rewards is not set")
        return

    def bounds() -> list[float]:
        low, high = (keys.number(f"{_ALGORITHM}rewards_{name}_bound") for name in ("lower", "upper"))
        coefficient = keys.number(f"{_TRAIN}reward_coef", 1.0)
        keys.get(f"{_ALGORITHM}filter_rewards")
        if keys.configuration.values.get(f"{_TRAIN}env_type") == "maniskill" or not coefficient > 0:
            raise keys.error(
                f"{_ALGORITHM}filter_rewards", "bounds here are of success rates, these rewards are staged"
            )
        return [round(max(0.0, low / coefficient), 12), round(min(1.0, high / coefficient), 12)]

    keys.put("collector.success_bounds", bounds)
    if f"{_TRAIN}reward_coef" in keys.used and keys.settings.get("collector.success_bounds", [0, 1])[1] < 0.5:
        text = (
            "in success rates they drop each group in which half of the runs succeed; look whether they "
            "were meant for another env.train.reward_coef"
        )
        keys.remark(DIFFERS, [f"{_ALGORITHM}rewards_upper_bound"], text)


def _remark_on_groups(keys: Keys) -> None:
    values = keys.configuration.values
    alike, fixed = f"{_TRAIN}group_size", f"{_TRAIN}use_fixed_reset_state_ids"
    robotwin = values.get(f"{_TRAIN}env_type") == "robotwin"
    if alike in values and values[alike] != values.get(f"{_ALGORITHM}group_size"):
        text = (
            f"RLinf starts {values[alike]} runs alike and compares "
            f"{values.get(f'{_ALGORITHM}group_size')}, of different tasks; here all of a group start alike"
        )
        keys.remark(DIFFERS, [alike], text)
    elif alike in values:
        keys.account(alike, "group_size")
    if robotwin:
        keys.remark(NOTHING, [fixed], "its RoboTwin repeats a seed in a group either way, as here")
    elif values.get(fixed):
        keys.account(fixed, "group_size")
    elif fixed in values:
        keys.remark(
            DIFFERS,
            [fixed],
            "RLinf draws each run's start anew, so that groups mix tasks; here all of a group start alike",
        )
