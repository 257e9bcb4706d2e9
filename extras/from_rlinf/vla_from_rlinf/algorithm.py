"""The algorithm: what RLinf's ``algorithm`` says."""

import math

from vla_from_rlinf.keys import DIFFERS, NONE, NOTHING, Keys

_ALGORITHM, _OPTIM, _TRAIN = "algorithm.", "actor.optim.", "env.train."
_LEVELS = {"token_level": "token", "action_level": "action", "chunk_level": "chunk"}
_LOSSES = {"actor_critic": "gae", "decoupled_actor_critic": "gae", "actor": "grpo"}
_FILTER = [f"{_ALGORITHM}{name}" for name in ("filter_rewards", "rewards_lower_bound", "rewards_upper_bound")]
_GROUPS, _EPOCHS = f"{_ALGORITHM}group_size", f"{_TRAIN}rollout_epoch"
_ENVS, _BATCH = f"{_TRAIN}total_num_envs", "actor.global_batch_size"
_AUTO, _IGNORE = f"{_TRAIN}auto_reset", f"{_TRAIN}ignore_terminations"


def algorithm(keys: Keys) -> str:
    """Return ``"ppo"`` or ``"grpo"``; ValueError if it is neither."""
    advantages, loss = f"{_ALGORITHM}adv_type", f"{_ALGORITHM}loss_type"
    found_loss = keys.get(loss)
    if not isinstance(found_loss, str) or found_loss not in _LOSSES:
        raise keys.error(loss, f"recipes are PPO and GRPO; RLinf's losses of these are {', '.join(_LOSSES)}")
    found = keys.choice(advantages, {"gae": "ppo", "grpo": "grpo"})
    if _LOSSES[found_loss] != keys.get(advantages):
        expected = f"{advantages}={_LOSSES[found_loss]}"
        raise keys.error(loss, f"goes with {expected}, the file has {keys.get(advantages)}")
    if keys.values.get("actor.enable_sft_co_train"):
        raise keys.error("actor.enable_sft_co_train", "no recipe learns from demonstrations while it learns by RL")
    if keys.values.get("reward.use_reward_model"):
        raise keys.error("reward.use_reward_model", "rewards are the benchmark's; there is no learnt one here")
    keys.account(advantages, "recipe")
    keys.account(loss, "recipe")
    return found


def is_asynchronous(keys: Keys) -> bool:
    """Tell whether batches are collected while earlier ones are learnt from."""
    return keys.values.get(f"{_ALGORITHM}loss_type") == "decoupled_actor_critic"


def read_algorithm(keys: Keys, name: str) -> None:
    """Set what is of the algorithm, whose ``name`` is ``"ppo"`` or ``"grpo"``."""
    summed = _summed_steps(keys)  # how many numbers RLinf averages that are summed here
    lower, higher, bonus = (f"{_ALGORITHM}{name}" for name in ("clip_ratio_low", "clip_ratio_high", "entropy_bonus"))

    def bounds() -> list[float]:
        low, high = keys.number(lower), keys.number(higher)
        return [low, high] if summed == 1 else [round(1 - (1 - low) ** summed, 3), round((1 + high) ** summed - 1, 3)]

    keys.put("loss.log_prob_level", keys.choice, f"{_ALGORITHM}logprob_type", _LEVELS)
    keys.put("loss.clip_epsilon", bounds)
    _read_entropy(keys, bonus, summed)
    if summed > 1:
        text = f"log-probabilities of all steps are summed here, RLinf averages {summed}"
        keys.remark(DIFFERS, [lower, higher, bonus], f"{text}: bounds to that power, the bonus divided by it")
    keys.settings.update({"loss.dual_clip": None, "loss.reference_kl_coeff": 0.0})
    keys.put("update.epochs", keys.whole, f"{_ALGORITHM}update_epoch", 1)
    keys.put("update.micro_batch_size", keys.whole, "actor.micro_batch_size")
    if name == "ppo":
        _read_ppo(keys)
        _read_critic(keys)
        _read_lag(keys)
    else:
        _read_grpo(keys)


def _summed_steps(keys: Keys) -> int:
    """Return how many log-probabilities RLinf averages where ours are summed: all steps and the first noise."""
    if keys.values.get("actor.model.model_type") != "openpi" or not keys.values.get("actor.model.openpi.joint_logprob"):
        return 1
    return keys.whole("actor.model.openpi.num_steps", 10) + 1


def _read_entropy(keys: Keys, bonus: str, summed: int) -> None:
    level = f"{_ALGORITHM}entropy_type"
    flow = keys.values.get("actor.model.model_type") == "openpi"
    if flow and keys.settings.get("policy.method") != "flow_noise" and keys.values.get(bonus):
        keys.settings["loss.entropy_coeff"] = 0.0
        keys.remark(NOTHING, [bonus], "its entropy of pi is 0 but for flow_noise: loss.entropy_coeff=0")
    else:
        keys.put("loss.entropy_coeff", lambda: round(keys.number(bonus, 0) / summed, 12))
    if not keys.settings.get("loss.entropy_coeff"):
        keys.remark(NOTHING, [level], "there is no entropy bonus")
    elif flow:
        keys.settings["loss.entropy_level"] = "token"
        text = "its model has taken the mean over a chunk's tokens before: loss.entropy_level=token"
        keys.remark(DIFFERS, [level], text)
    else:
        keys.put("loss.entropy_level", keys.choice, level, _LEVELS)


def _decisions(keys: Keys) -> int:
    """Return the decisions of an environment in an iteration."""
    steps, chunk = f"{_TRAIN}max_steps_per_rollout_epoch", keys.whole("actor.model.num_action_chunks")
    if keys.whole(steps) < chunk:
        raise keys.error(steps, f"is less than one chunk of {chunk}")
    return keys.whole(steps) // chunk * keys.whole(_EPOCHS, 1)


def _read_ppo(keys: Keys) -> None:
    filtered = keys.values.get(_FILTER[0])
    text = "drops groups; recipes/ppo.py has none, recipes/grpo.py has collector.success_bounds"
    keys.remark(NONE if filtered else NOTHING, _FILTER, text if filtered else f"{_FILTER[0]} is not set")
    keys.put("collector.decisions", _decisions, keys)
    keys.settings["update.minibatches"] = None
    keys.put("update.minibatch_size", keys.whole, _BATCH)
    alike = f"{_TRAIN}group_size"
    if keys.whole(alike, 1) > 1:
        keys.put("env.group_size", keys.whole, alike)
    else:
        keys.settings["env.group_size"] = 1
        keys.account(alike, "env.group_size")
    keys.remark(NOTHING, [_GROUPS], "read for GRPO and the filter; env.train.group_size counts")
    fixed = f"{_TRAIN}use_fixed_reset_state_ids"
    keys.remark(NOTHING, [fixed], "without groups each episode of an iteration is one of its own either way")


def _read_critic(keys: Keys) -> None:
    def aggregation() -> str:
        # Trajectories are weighed alike exactly where RLinf masks what follows an episode's end.
        return "trajectory_mean" if not keys.flag(_AUTO) and not keys.flag(_IGNORE) else "token_mean"

    def bootstrap() -> str:
        if not keys.flag(_AUTO):
            return "none"  # it is part of the automatic reset
        return keys.choice(f"{_ALGORITHM}bootstrap_type", {"always": "any_done", "standard": "truncation"}, "standard")

    keys.put("update.critic_warmup_steps", lambda: keys.whole(f"{_OPTIM}critic_warmup_steps", 0, least=0))
    keys.put("update.aggregation", aggregation)
    keys.put("gae.bootstrap", bootstrap)
    if not keys.flag(_AUTO):
        keys.remark(NOTHING, [f"{_ALGORITHM}bootstrap_type"], "env.train.auto_reset is False")
    if keys.values.get(_AUTO) is False:
        text = "RLinf waits for the longest episode, and masks; here the next one starts at once"
        keys.remark(DIFFERS, [_AUTO], text)
    keys.put("gae.gamma", keys.real, f"{_ALGORITHM}gamma")
    keys.put("gae.lmbda", keys.real, f"{_ALGORITHM}gae_lambda")
    keys.put("gae.reward_level", _reward_level, keys)
    keys.settings.update({"gae.normalize": True, "loss.critic_coeff": 1.0})
    keys.put("loss.clip_value", keys.get, f"{_ALGORITHM}value_clip", None)
    keys.put("loss.huber_delta", keys.real, f"{_ALGORITHM}huber_delta", 10.0)
    keys.put("optim.value_lr", keys.real, f"{_OPTIM}value_lr")


def _reward_level(keys: Keys) -> str:
    key, per_action = f"{_ALGORITHM}reward_type", "policy.value_per_action"
    found = keys.choice(key, {"action_level": "action", "chunk_level": "chunk"})
    if keys.whole("actor.model.num_action_chunks") == 1:
        return "chunk"  # of one action
    if found == "action" and not keys.settings.get(per_action):
        text = "the policy has one value per chunk; write chunk_level, or actor.model.value_type: action_level"
        raise keys.error(key, text)
    if found == "chunk" and keys.settings.get(per_action):
        keys.settings[per_action] = False
        text = f"one reward per chunk goes with one value: {per_action}=false"
        keys.remark(DIFFERS, ["actor.model.value_type"], text)
    return found


def _read_lag(keys: Keys) -> None:
    """Set what is of asynchronous runs."""
    threshold, weight = f"{_ALGORITHM}staleness_threshold", f"{_ALGORITHM}behave_weight_threshold"
    if not is_asynchronous(keys):
        keys.settings.update({"sync.lag": 0, "loss.max_behaviour_weight": None})
        keys.remark(NOTHING, [threshold, weight], "algorithm.loss_type is not decoupled_actor_critic")
        return
    keys.put("sync.lag", lambda: keys.whole(threshold, 1, least=0))
    text = "weights that collect are exactly sync.lag updates old; RLinf's are at most that old"
    keys.remark(DIFFERS, [threshold], text)
    keys.put("loss.max_behaviour_weight", keys.get, weight, None)
    keys.remark(DIFFERS, [weight], "a weight above it is bounded by it here; RLinf leaves the element out")
    if keys.values.get(f"{_ALGORITHM}clip_ratio_c", 3.0) is not None:
        keys.put("loss.dual_clip", keys.real, f"{_ALGORITHM}clip_ratio_c", 3.0)
    keys.put("gae.normalize", keys.flag, f"{_ALGORITHM}normalize_advantages", True)


def _read_grpo(keys: Keys) -> None:
    for key in (_AUTO, _IGNORE):
        if keys.flag(key):
            raise keys.error(key, "GRPO compares whole episodes; write False")
    keys.account(_AUTO, "recipe")
    keys.put("group_size", lambda: keys.whole(_GROUPS, least=2))

    def groups() -> int:
        episodes = keys.whole(_ENVS) * keys.whole(_EPOCHS, 1)
        number = episodes // keys.whole(_GROUPS, least=2)
        if not number:
            raise keys.error(_GROUPS, f"there are only {episodes} episodes in an iteration")
        return number

    keys.put("collector.groups", groups)
    keys.put("collector.max_groups", groups)
    _read_bounds(keys)
    keys.settings["update.minibatch_size"] = None
    keys.put("update.minibatches", lambda: math.ceil(keys.whole(_ENVS) * _decisions(keys) / keys.whole(_BATCH)))
    text = "RLinf counts decisions after an episode's end too"
    keys.remark(DIFFERS, [_BATCH], f"{text}; as many optimizer steps here, of those that were executed")
    keys.settings["update.aggregation"] = "trajectory_mean"
    _remark_on_groups(keys)
    unread = [f"{_ALGORITHM}{name}" for name in ("reward_type", "gamma", "gae_lambda")]
    keys.remark(NOTHING, unread, "GRPO compares the sums of an episode's rewards")
    critic = [f"{_ALGORITHM}{name}" for name in ("value_clip", "huber_delta", "bootstrap_type")]
    keys.remark(NOTHING, [*critic, f"{_OPTIM}value_lr", f"{_OPTIM}critic_warmup_steps"], "GRPO has no critic")
    keys.remark(NOTHING, [f"{_ALGORITHM}normalize_advantages"], "read for GAE alone")


def _read_bounds(keys: Keys) -> None:
    filtered, low, high = _FILTER
    coefficient = f"{_TRAIN}reward_coef"
    if not keys.flag(filtered, False):
        keys.settings["collector.success_bounds"] = None
        keys.remark(NOTHING, _FILTER, "algorithm.filter_rewards is not set")
        return

    def bounds() -> list[float]:
        least, most, unit = keys.number(low), keys.number(high), keys.number(coefficient, 1.0)
        keys.get(filtered)
        if keys.values.get(f"{_TRAIN}env_type") == "maniskill" or not unit > 0:
            raise keys.error(filtered, "bounds here are of success rates, these rewards are staged")
        return [round(max(0.0, least / unit), 12), round(min(1.0, most / unit), 12)]

    keys.put("collector.success_bounds", bounds)
    if coefficient in keys.used and keys.settings.get("collector.success_bounds", [0, 1])[1] < 0.5:
        text = "in success rates they drop each group in which half of the runs succeed"
        keys.remark(DIFFERS, [high], f"{text}; look whether they were meant for another env.train.reward_coef")


def _remark_on_groups(keys: Keys) -> None:
    values, alike, fixed = keys.values, f"{_TRAIN}group_size", f"{_TRAIN}use_fixed_reset_state_ids"
    if alike in values and values[alike] != values.get(_GROUPS):
        text = f"RLinf starts {values[alike]} runs alike and compares {values.get(_GROUPS)}, of different tasks"
        keys.remark(DIFFERS, [alike], f"{text}; here all of a group start alike")
    elif alike in values:
        keys.account(alike, "group_size")
    if values.get(f"{_TRAIN}env_type") == "robotwin":
        keys.remark(NOTHING, [fixed], "its RoboTwin repeats a seed in a group either way, as here")
    elif values.get(fixed):
        keys.account(fixed, "group_size")
    elif fixed in values:
        text = "RLinf draws each run's start by itself, so that groups mix tasks; here all of a group start alike"
        keys.remark(DIFFERS, [fixed], text)
