"""Advantages over decisions: a chunk of primitive actions is one time step, or each of its actions is."""

from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives.value.functional import generalized_advantage_estimate

from vla_algos.levels import ONE_RATIO, Level
from vla_common import keys
from vla_common.settings import Fraction, NonNegative, checked
from vla_policies.policy import VLAPolicy

Bootstrap = Literal["truncation", "none", "any_done"]
RewardLevel = Literal["chunk", "action"]


def valid_decisions(batch: TensorDictBase) -> Tensor:
    """Find decisions of which at least one primitive action was executed: bool ``[..., 1]``.

    The others (the simulator died, or the slot was idle) carry no information and enter no statistic.
    """
    return batch[keys.NEXT, keys.STEP_MASK].any(-1, keepdim=True)


def ends_for_good(after: TensorDictBase, bootstrap: Bootstrap) -> Tensor:
    """Find decisions beyond which nothing has value, see :func:`gae`: bool ``[..., 1]``, as ``after`` has them."""
    never = torch.zeros_like(after[keys.DONE])
    return {"truncation": after[keys.TERMINATED], "none": after[keys.DONE], "any_done": never}[bootstrap]


def check_levels(loss_module: nn.Module, policy: VLAPolicy, reward_level: RewardLevel) -> None:
    """Refuse (``ValueError``) a ``reward_level`` of :func:`gae` that does not fit policy and loss, before any work."""
    if getattr(loss_module, "has_critic", True):
        _check_values(reward_level, policy.num_values, policy.chunk_size)
    if reward_level == "action" and getattr(loss_module, "log_prob_level", None) == "chunk":
        raise ValueError(ONE_RATIO)


def _check_values(reward_level: RewardLevel, num_values: int, chunk_size: int) -> None:
    needed = chunk_size if reward_level == "action" else 1
    if num_values != needed:
        raise ValueError(
            f"reward_level={reward_level!r} needs {needed} values per decision, the policy has {num_values}: 'action' "
            "goes with policy.value_per_action=true, 'chunk' with one value; without a critic: loss.critic_coeff=null"
        )


@checked
def gae(
    batch: TensorDictBase,
    gamma: Fraction = 0.99,
    lmbda: Fraction = 0.95,
    normalize: bool = True,
    bootstrap: Bootstrap = "truncation",
    reward_level: RewardLevel = "chunk",
) -> TensorDictBase:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438).

    ``done`` (terminated or truncated) cuts the recursion. Which of them also ends the future, ``bootstrap`` says;
    the other ones, and the end of the rollout, are worth the value of the true final observation, which the
    collector stores as ``("next", "state_value")``:

    * ``"truncation"``: only termination ends it. Running out of time is an accident of the recording.
    * ``"none"``: both end it. The horizon is part of the task, running out of time is a failure.
    * ``"any_done"``: neither does. Success is worth its reward and whatever the critic promises after it.

    Without values in the batch (``StepCollector(..., values=False)``, an actor without critic) the advantage is the
    discounted sum of the rewards until the end of the episode or of the rollout; ``lmbda`` is then 1.

    Args:
        batch: ``[N, T]`` in time order, with ``state_value`` and, under ``"next"``, ``state_value``,
            ``reward`` (or ``step_rewards``), ``done``, ``terminated`` and ``step_mask`` ``[N, T, C]``.
        gamma: discount per time step: per decision, or per primitive action with ``reward_level="action"``.
        lmbda: weight of the longer returns.
        normalize: whether to normalise with :func:`normalize_advantages`.
        bootstrap: see above.
        reward_level: ``"chunk"`` takes a decision as one step with the sum of its rewards and one value
            (``[N, T, 1]``); ``"action"`` takes each executed primitive action as one, with a value (``[N, T, C]``).

    Returns:
        ``batch`` itself, with ``advantage`` and ``value_target`` (never normalised), ``[N, T, 1]`` or ``[N, T, C]``.

    Raises:
        ValueError: an unknown choice, values that do not fit it, or ``step_rewards`` that are not those of ``reward``.
    """
    values = batch.get(keys.STATE_VALUE, None)
    next_values = batch.get((keys.NEXT, keys.STATE_VALUE), None)
    if values is not None and next_values is None:
        raise ValueError(
            f"the batch lacks {(keys.NEXT, keys.STATE_VALUE)}, the values of what follows each decision: collect with "
            "StepCollector, or, where 'next' has the observations, have the critic write them: critic(batch['next'])"
        )
    if values is None:
        rewards = batch[keys.NEXT, keys.STEP_REWARDS if reward_level == "action" else keys.REWARD]
        values, next_values, lmbda = torch.zeros_like(rewards), torch.zeros_like(rewards), 1.0
    _check_values(reward_level, values.shape[-1], batch[keys.NEXT, keys.STEP_MASK].shape[-1])
    valid = valid_decisions(batch)
    # A decision that was never executed says nothing about the one before it, which therefore ends in a
    # bootstrap from the value of the observation they share.
    done = batch[keys.NEXT, keys.DONE].clone()
    done[:, :-1] |= ~valid[:, 1:]
    final = ends_for_good(batch[keys.NEXT], bootstrap)
    reward = batch[keys.NEXT, keys.REWARD]
    if reward_level == "action":
        _check_step_rewards(batch)
        valid, reward = batch[keys.NEXT, keys.STEP_MASK], batch[keys.NEXT, keys.STEP_REWARDS]
        # The last executed action of a decision leads to the next decision, those before it to the next action.
        last = torch.arange(valid.shape[-1], device=valid.device) == valid.sum(-1, keepdim=True) - 1
        next_values = torch.where(last, next_values[..., :1], values.roll(-1, dims=-1))
        done, final = last & done, last & final
    # What was never executed may hold anything, even a NaN: it enters nothing.
    values, reward = torch.where(valid, values, 0.0), torch.where(valid, reward, 0.0)
    next_values = torch.where(valid & ~final, next_values, 0.0)
    if next_values.isnan().any():
        raise ValueError(
            f"bootstrap={bootstrap!r} needs the value of final observations that are not there (NaN): "
            f"collect with StepCollector(..., bootstrap={bootstrap!r})"
        )
    # One row of time steps per environment, those that were executed first: the recursion steps over the others.
    order = (~valid).flatten(1).to(torch.int8).argsort(dim=1, stable=True)
    steps = lambda x: x.flatten(1).gather(1, order).unsqueeze(-1)  # noqa: E731  [N, T, K] -> [N, T * K, 1]
    results = generalized_advantage_estimate(
        gamma,
        lmbda,
        state_value=steps(values),
        next_state_value=steps(next_values),
        reward=steps(reward),
        done=steps(done),
        terminated=steps(final),
    )
    advantage, value_target = (
        torch.empty_like(x).squeeze(-1).scatter(1, order, x.squeeze(-1)).reshape(values.shape) for x in results
    )
    batch[keys.ADVANTAGE] = normalize_advantages(advantage, valid) if normalize else advantage
    batch[keys.VALUE_TARGET] = value_target
    return batch


def _check_step_rewards(batch: TensorDictBase) -> None:
    """Refuse a ``reward`` that something has changed without the ``step_rewards``, which alone would be read."""
    mask = batch[keys.NEXT, keys.STEP_MASK]
    steps = torch.where(mask, batch[keys.NEXT, keys.STEP_REWARDS], 0.0)
    rewards = torch.where(valid_decisions(batch), batch[keys.NEXT, keys.REWARD], 0.0)
    differ = (steps.sum(-1, keepdim=True) - rewards).abs() > 1e-6 + 1e-4 * steps.abs().sum(-1, keepdim=True)
    if differ.any():
        raise ValueError(
            f"reward_level='action' reads 'step_rewards', whose sum is not 'reward' in {int(differ.sum())} decisions: "
            "a transform has changed one of them alone, or added a number to both; let it change both, such as "
            "RewardScaling(0.0, scale, in_keys=['reward', 'step_rewards']), or use reward_level='chunk'"
        )


@checked
def normalize_advantages(advantage: Tensor, valid: Tensor, eps: NonNegative = 1e-5) -> Tensor:
    """Compute ``(A - mean) / (std + eps)`` with mean and unbiased std over the valid elements only.

    Args:
        advantage: float ``[...]``, as what is returned.
        valid: bool, same shape; a single valid element, which has no standard deviation, becomes 0.
        eps: added to the standard deviation.
    """
    sample = advantage[valid]
    if sample.numel() < 2:
        return torch.zeros_like(advantage)
    return (advantage - sample.mean()) / (sample.std() + eps)


@checked
def group_advantages(scores: Tensor, groups: Tensor, eps: NonNegative = 1e-6) -> Tensor:
    """Compute group-relative advantages of GRPO (Shao et al. 2024, arXiv 2402.03300): one number per trajectory.

    Args:
        scores: float ``[E]``, return of each trajectory.
        groups: int64 ``[E]``, label of its group; members need not be neighbours.
        eps: added to the standard deviation.

    Returns:
        ``(score - mean) / (std + eps)`` ``[E]`` with mean and unbiased std of the group; exactly 0 where all members
        score the same, and for a group of one.
    """
    _, index, count = groups.unique(return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(count), device=scores.device)
    centred = scores - (zeros.index_add(0, index, scores) / count)[index]
    variance = zeros.index_add(0, index, centred**2) / (count - 1).clamp(min=1)
    lowest = zeros.scatter_reduce(0, index, scores, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, index, scores, "amax", include_self=False)
    # Equal scores may differ from their mean by rounding, which the division would blow up.
    return torch.where((lowest < highest)[index], centred / (variance.sqrt()[index] + eps), 0.0)


def trajectory_weights(batch: TensorDictBase, log_prob_level: Level) -> TensorDictBase:
    """Write ``weight``, with which every trajectory of ``batch`` counts the same in the loss, however long it is.

    A decision of a trajectory with ``n`` valid elements weighs ``1 / n``, scaled so that the mean weight of an element
    is 1. The loss over all of ``batch`` is then the mean over trajectories of their own means, and that of a random
    minibatch an unbiased estimate of it. ``batch`` is ``[D]`` or ``[N, T]``, last dimension in time order, and
    returned; ``done`` ends a trajectory, as does a row. An element is a decision at the level ``"chunk"``, else an
    executed primitive action. ``weight`` is ``[..., 1]``, 0 for decisions without valid elements.
    """
    elements = valid_decisions(batch) if log_prob_level == "chunk" else batch[keys.NEXT, keys.STEP_MASK]
    elements = elements.sum(-1).float()
    done = batch[keys.NEXT, keys.DONE].squeeze(-1).long()
    rows = torch.arange(done[..., 0].numel(), device=done.device).reshape(*done.shape[:-1], 1)
    label = done.cumsum(-1) - done + rows * (done.shape[-1] + 1)
    _, index = label.unique(return_inverse=True)
    length = torch.zeros(int(index.max()) + 1, device=done.device).index_add(0, index.flatten(), elements.flatten())
    trajectories = (length > 0).sum()
    weight = elements.sum() / (trajectories * length[index]).clamp(min=1)
    return batch.set(keys.WEIGHT, torch.where(elements > 0, weight, 0.0).unsqueeze(-1))
