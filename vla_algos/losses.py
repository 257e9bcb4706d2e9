"""The clipped policy-gradient losses of PPO and GRPO for chunked, tokenised actions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, Lt
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import ValueEstimatorBase

from vla_algos.levels import Level, count, expand, mean, reference_kl, to_level
from vla_algos.policies import loss_keys
from vla_common import keys
from vla_common.settings import Count, Factor, Positive, checked
from vla_policies.sharding import compute_device

_Below = Annotated[float, Gt(0), Lt(1)]  # a ratio of 1 - x is positive
_Above = Annotated[float, Gt(0), Le(10)]


class ChunkPolicyLoss(ClipPPOLoss):
    """What PPO's and GRPO's losses share: the clipped objective of policies that decide on a chunk of actions at once.

    What it adds to :class:`~torchrl.objectives.ClipPPOLoss`: primitive actions that were never executed (``step_mask``
    False) contribute nothing, the probability ratio is taken at a chosen level, decisions may be weighted, the ratio of
    bad actions may be bounded (dual clip), and a frozen policy may hold the trained one back.
    Coefficient buffers (``loss.entropy_coeff = ...`` schedules them), tensor keys and clip bounds are TorchRL's.

    Each term is a sum over valid elements of ``weight * term``, divided by their number. Without a ``weight``
    in the batch that is the mean over valid elements (``token_mean``); with the weights of
    :func:`~vla_algos.advantages.trajectory_weights` every trajectory counts the same (``trajectory_mean``).

    Args:
        policy: with ``evaluate_actions(td) -> (log_prob [B, C, A], entropy [B, C, A], value [B, 1], [B, C] or None)``
            and ``loss_keys``, the entries that this reads, as every :class:`~vla_policies.policy.VLAPolicy` has.
        log_prob_level: one ratio per ``"token"`` (action dimension), per primitive ``"action"`` (sum over
            ``A``) or per ``"chunk"`` (sum over the executed actions and ``A``).
        clip_epsilon: ``x`` clips the ratio to ``[1 - x, 1 + x]``, ``(low, high)`` to ``[1 - low, 1 + high]``.
        dual_clip: ``c > 1`` bounds the loss of a bad action (negative advantage ``A``) at ``c |A|``, however
            likely it has become (Ye et al. 2020, arXiv 1912.09729); ``None`` for no bound.
        entropy_coeff: weight of the entropy bonus; below 0 it is a malus.
        entropy_level: likewise, of the bonus and the reported entropy.
        reference_kl_coeff: weight of the KL divergence per token from the frozen policy of ``reference_log_prob``,
            estimated by ``exp(d) - d - 1``, ``d = reference - log_prob`` (at most 20); 0 needs no such entry.
        decoupled: for batches of older weights: decoupled PPO (Hilton et al. 2021, arXiv 2110.00641). What is clipped,
            and measured by ``kl_...`` and ``..._ratio``, is the ratio to the weights that the update starts from, whose
            log-probabilities are in ``proximal_log_prob``; each element counts by its behaviour weight ``pi_proximal /
            pi_behaviour`` (detached, at ``log_prob_level``), ``pi_behaviour`` being the policy that acted. Of a batch
            of the same weights it is the plain loss.
        max_behaviour_weight: bound of these weights, ``min(weight, bound)`` (truncated importance sampling, Ionides
            2008, the ``rho`` of V-trace): some bias for a bounded variance; ``None`` for no bound.

    The output of ``forward`` has the terms to add up, ``loss_objective``, ``loss_entropy`` and ``loss_reference_kl``
    (with that coefficient), and detached diagnostics, all of them means over the valid elements of what was passed:

    * ``policy_loss``: the clipped objective that is minimised, weights included;
    * ``kl_approx``: mean of ``log_prob_old - log_prob`` (k1: unbiased, may be negative); ``kl_k3``: mean of
      ``ratio - 1 - log(ratio)`` (never negative), both per element of the chosen level;
    * ``clip_fraction``: share of elements where clipping changes the objective, so that they get no gradient;
    * ``dual_clip_fraction``: share of elements at the bound of ``dual_clip``, where it is used;
    * ``ratio``, ``clipped_ratio``: means of the ratio before and after clipping;
    * ``log_ratio_per_token``: mean of ``|log_prob - log_prob_old|``; before the first step only rounding;
    * with ``decoupled``, where ``log_prob_old`` above is ``proximal_log_prob``: ``behaviour_weight``, their mean before
      they are bounded; ``behaviour_log_ratio``, mean of ``|proximal_log_prob - log_prob_old|`` per token, how old the
      weights are that acted; ``behaviour_weight_bounded``, the share at ``max_behaviour_weight``;
    * ``entropy``: at ``entropy_level``, in nats; ``reference_kl`` per token, in nats.

    ``"weights"`` has, by the same names, how many valid elements each of them is a mean over: its weight in means over
    minibatches. A subclass that adds a diagnostic to both has it logged as ``train/<name>``.

    Attributes:
        metric_names: what the log calls a diagnostic, after ``train/``, where it is not its own name.
    """

    metric_names: ClassVar[Mapping[str, str]] = {
        "policy_loss": "actor/policy_loss",
        "kl_approx": "actor/approx_kl",
        "kl_k3": "actor/kl_k3",
        "clip_fraction": "actor/clip_fraction",
        "dual_clip_fraction": "actor/dual_clip_fraction",
        "ratio": "actor/ratio",
        "clipped_ratio": "actor/clipped_ratio",
        "log_ratio_per_token": "actor/log_ratio",
        "reference_kl": "actor/reference_kl",
        "behaviour_weight": "actor/behaviour_weight",
        "behaviour_weight_bounded": "actor/behaviour_weight_bounded",
        "behaviour_log_ratio": "actor/behaviour_log_ratio",
        "entropy": "entropy_loss",
    }
    _critic: tuple[float | None, float | None] = None, None  # critic_coeff, clip_value; set before this constructor

    @checked
    def __init__(
        self,
        policy: TensorDictModuleBase,
        *,
        log_prob_level: Level = "token",
        clip_epsilon: _Below | tuple[_Below, _Above] = 0.2,
        dual_clip: Annotated[float, Gt(1), Le(100)] | None = None,
        entropy_coeff: Annotated[float, Ge(-1), Le(1)] = 0.0,
        entropy_level: Level = "token",
        reference_kl_coeff: Factor = 0.0,
        decoupled: bool = False,
        max_behaviour_weight: Annotated[float, Ge(1), Le(1000)] | None = None,
    ):
        lacking = [name for name in ("evaluate_actions", "loss_keys") if not hasattr(policy, name)]
        if lacking:
            raise ValueError(
                f"{type(policy).__name__} has no {' and no '.join(lacking)}, which {type(self).__name__} reads; derive "
                "it from VLAPolicy, or take TorchRL's loss: Learner(ClipPPOLoss(actor, critic), ...)"
            )
        if policy.out_keys and keys.ACTION_LOG_PROB not in policy.out_keys:
            raise ValueError(
                "this policy acts without a distribution (an L1 head, or method='flow_ode'): no log-probability; "
                "clone demonstrations (BehaviourCloning, the recipe sft), or set head='tokens' or method='flow_sde'"
            )
        if max_behaviour_weight is not None and not decoupled:
            raise ValueError(
                f"max_behaviour_weight={max_behaviour_weight:g} bounds weights of the decoupled loss, which is off; "
                "set decoupled=True (ppo_async: sync.lag=1 or more), or max_behaviour_weight=None"
            )
        critic_coeff, clip_value = self._critic
        # functional=False: the loss works on the policy's own parameters, no copies. The policy is actor
        # and critic at once; without a critic TorchRL wants None.
        super().__init__(
            policy,
            policy if critic_coeff else None,
            clip_epsilon=clip_epsilon,
            entropy_coeff=entropy_coeff,
            critic_coeff=critic_coeff,
            clip_value=clip_value,
            functional=False,
            device=next(map(compute_device, policy.parameters()), None),  # not where cpu_offload keeps them
        )
        self.log_prob_level, self.entropy_level = log_prob_level, entropy_level
        self.dual_clip, self.reference_kl_coeff = dual_clip, reference_kl_coeff
        self.decoupled, self.max_behaviour_weight = decoupled, max_behaviour_weight
        self.set_keys(
            sample_log_prob=keys.ACTION_LOG_PROB,
            advantage=keys.ADVANTAGE,
            value_target=keys.VALUE_TARGET,
            value=keys.STATE_VALUE,
        )
        names = ["loss_objective", "loss_entropy", "policy_loss", "kl_approx", "kl_k3", "clip_fraction"]
        names += ["ratio", "clipped_ratio", "log_ratio_per_token", "entropy"]
        names += ["dual_clip_fraction"] if dual_clip is not None else []
        names += ["loss_reference_kl", "reference_kl"] if reference_kl_coeff else []
        names += ["behaviour_weight", "behaviour_log_ratio"] if decoupled else []
        names += ["behaviour_weight_bounded"] if max_behaviour_weight is not None else []
        self._out_keys = [*names, *(("weights", key) for key in names if not key.startswith("loss_"))]

    @property
    def has_critic(self) -> bool:
        """Whether a value loss is part of the loss."""
        return self._has_critic

    def _set_in_keys(self) -> None:
        read = [*loss_keys(self.actor_network), self.tensor_keys.sample_log_prob, self.tensor_keys.advantage]
        self._in_keys = [*read, (keys.NEXT, keys.STEP_MASK)]

    def make_value_estimator(self, value_type: ValueEstimatorBase | None = None, **hyperparams: Any) -> Self:
        """Keep an estimator that was made elsewhere, for code that calls ``loss.value_estimator``.

        The loss makes none of its own (``ValueError``): actor and critic share one pass, and what follows each decision
        has its value from the collector.
        """
        if not isinstance(value_type, ValueEstimatorBase) or hyperparams:
            raise ValueError(
                f"{type(self).__name__} makes no value estimator: call gae(batch) before it, or pass one of "
                "torchrl.objectives.value: make_value_estimator(GAE(gamma=0.99, lmbda=0.95, value_network=None))"
            )
        return super().make_value_estimator(value_type)

    def forward(self, tensordict: TensorDictBase, whole: TensorDictBase | None = None) -> TensorDict:
        """Compute the loss terms of a minibatch or of a part of one: a TensorDict of scalars, see the class.

        Args:
            tensordict: batch ``[B]`` with :attr:`in_keys`; ``advantage`` and ``value_target`` ``[B, 1]`` per
                decision or ``[B, C]`` per primitive action. Any other batch, such as ``[N, T]``, is flattened.
            whole: the minibatch of which ``tensordict`` is a part (gradient accumulation). The loss terms are
                then shares: over the parts they add up to those of the whole, however its valid elements are
                spread. Diagnostics are always means over ``tensordict``.

        Raises:
            ValueError: an entry is missing or of another shape, or levels do not fit each other.
        """
        tensordict, whole = tensordict.reshape(-1), None if whole is None else whole.reshape(-1)
        needed = [*self.in_keys, *([keys.REFERENCE_LOG_PROB] if self.reference_kl_coeff else [])]
        needed += [keys.PROXIMAL_LOG_PROB] if self.decoupled else []
        missing = [key for key in needed if tensordict.get(key, None) is None]
        if missing:
            raise ValueError(
                f"the batch lacks {missing}. Log-probabilities and values come from the rollout (see the policy's "
                "out_keys), 'advantage' and 'value_target' from gae() or grpo(), 'reference_log_prob' and "
                "'proximal_log_prob' from add_log_prob()"
            )
        log_prob, entropy, value = self.actor_network.evaluate_actions(tensordict)
        if log_prob.shape[:-1] != tensordict[keys.NEXT, keys.STEP_MASK].shape:
            raise ValueError(
                f"evaluate_actions gives log-probabilities {list(log_prob.shape)}, must be [B, C, A], one per element "
                "of an action: the loss adds them up (log_prob_level)"
            )
        return self.terms(tensordict, log_prob, entropy, value, whole)

    def terms(
        self,
        tensordict: TensorDictBase,
        log_prob: Tensor,
        entropy: Tensor,
        value: Tensor | None,
        whole: TensorDictBase | None = None,
    ) -> TensorDict:
        """Compute the loss terms of what one pass of the policy has given: the place for a term of a subclass.

        Args:
            tensordict: batch ``[B]``, see :meth:`forward`.
            log_prob: of the stored actions ``[B, C, A]``.
            entropy: ``[B, C, A]``.
            value: ``[B, 1]`` or ``[B, C]``; ``None`` without a critic.
            whole: ``[W]``, see :meth:`forward`.
        """
        mask = tensordict[keys.NEXT, keys.STEP_MASK]  # [B, C]
        all_of_it = mask if whole is None else whole[keys.NEXT, keys.STEP_MASK]
        weight, width = tensordict.get(keys.WEIGHT, None), log_prob.shape[-1]
        # Masked first: nothing at positions that were never executed, even a NaN, reaches loss or gradient.
        old = keys.PROXIMAL_LOG_PROB if self.decoupled else self.tensor_keys.sample_log_prob
        log_ratio = torch.where(mask.unsqueeze(-1), log_prob - tensordict[old], 0.0)
        objective, valid, measured = self._objective(tensordict, log_ratio, mask)
        entropy, entropy_valid = to_level(torch.where(mask.unsqueeze(-1), entropy, 0.0), mask, self.entropy_level)

        loss_entropy = mean(entropy, entropy_valid, weight, count(all_of_it, self.entropy_level, width))
        loss_objective = mean(-objective, valid, weight, count(all_of_it, self.log_prob_level, width))
        out = TensorDict({"loss_objective": loss_objective, "loss_entropy": -self.entropy_coeff * loss_entropy})
        tokens = mask.sum() * width
        weights = dict.fromkeys(("log_ratio_per_token", "reference_kl", "behaviour_log_ratio"), tokens)
        weights["entropy"] = entropy_valid.sum()
        if self.reference_kl_coeff:
            kl, kl_valid = reference_kl(tensordict[keys.REFERENCE_LOG_PROB] - log_prob, mask)
            kl_share = mean(kl, kl_valid, weight, count(all_of_it, "token", width))
            out["loss_reference_kl"] = self.reference_kl_coeff * kl_share
            out["reference_kl"] = mean(kl.detach(), kl_valid)
        out["policy_loss"] = mean(-objective.detach(), valid, weight)
        out["entropy"] = mean(entropy.detach(), entropy_valid)
        out.update(measured)
        names, elements = [name for name, _ in out.items() if not name.startswith("loss_")], valid.sum()
        out["weights"] = TensorDict({name: weights.get(name, elements) for name in names})
        return out

    def _objective(
        self, tensordict: TensorDictBase, log_ratio: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return what is maximised of each element of :attr:`log_prob_level`, which are valid, and diagnostics."""
        log_weight, valid = to_level(log_ratio, mask, self.log_prob_level)
        advantage = expand(tensordict[self.tensor_keys.advantage], log_weight, mask)
        clipped = log_weight.clamp(*self._clip_bounds)
        gain, clipped_gain = log_weight.clamp(max=80).exp() * advantage, clipped.exp() * advantage  # 0 * inf is NaN
        objective = torch.minimum(gain, clipped_gain)
        with torch.no_grad():
            measured = {
                "kl_approx": mean(-log_weight, valid),
                "kl_k3": mean(log_weight.exp() - 1 - log_weight, valid),
                "clip_fraction": mean((gain > clipped_gain).float(), valid),
                "ratio": mean(log_weight.exp(), valid),
                "clipped_ratio": mean(clipped.exp(), valid),
                "log_ratio_per_token": mean(*to_level(log_ratio.abs(), mask, "token")),
            }
        if self.dual_clip is not None:
            bound = torch.where(advantage < 0, self.dual_clip * advantage, -torch.inf)
            measured["dual_clip_fraction"] = mean((objective < bound).float(), valid)
            objective = torch.maximum(objective, bound)
        if self.decoupled:
            behaviour, age = self.behaviour_weight(tensordict)[0], self._behaviour_log_ratio(tensordict).abs()
            measured["behaviour_weight"] = mean(behaviour, valid)
            measured["behaviour_log_ratio"] = mean(*to_level(age, mask, "token"))
            if (most := self.max_behaviour_weight) is not None:
                measured["behaviour_weight_bounded"] = mean((behaviour > most).float(), valid)
                behaviour = behaviour.clamp(max=most)
            objective = objective * behaviour
        return objective, valid, measured

    @torch.no_grad()
    def behaviour_weight(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return ``pi_proximal / pi_behaviour`` of decisions ``[B]``, not bounded, and which of them are valid.

        Both are at ``log_prob_level``: ``[B, C, A]``, ``[B, C]`` or ``[B]``; 1 where nothing was executed.
        """
        log_ratio = self._behaviour_log_ratio(tensordict)
        log_weight, valid = to_level(log_ratio, tensordict[keys.NEXT, keys.STEP_MASK], self.log_prob_level)
        return log_weight.exp(), valid

    def _behaviour_log_ratio(self, tensordict: TensorDictBase) -> Tensor:
        difference = tensordict[keys.PROXIMAL_LOG_PROB] - tensordict[self.tensor_keys.sample_log_prob]
        return torch.where(tensordict[keys.NEXT, keys.STEP_MASK].unsqueeze(-1), difference, 0.0)


class ChunkGRPOLoss(ChunkPolicyLoss):
    """GRPO's loss, without a critic: advantages are those of :func:`~vla_algos.groups.grpo`, among runs of an episode.

    Objective, arguments and output are those of :class:`ChunkPolicyLoss` (Shao et al. 2024, arXiv 2402.03300).
    """


class ChunkClipPPOLoss(ChunkPolicyLoss):
    """PPO's loss: that of :class:`ChunkPolicyLoss` and a critic, which share **one** backbone pass.

    Args:
        policy: as there.
        critic_coeff: weight of the value loss; ``None`` or 0 trains no critic.
        clip_value: largest change of the value, from when the policy acted, that is rewarded; ``None`` for no clipping.
        huber_delta: error at which the value loss (Huber's) turns from quadratic to linear.
        **options: ``log_prob_level`` and the others of :class:`ChunkPolicyLoss`.

    With a critic the output of ``forward`` has the term ``loss_critic`` too, and as diagnostics ``value_loss`` (without
    ``critic_coeff``) and ``value_clip_fraction``, the share of values that moved by more than ``clip_value``.
    """

    metric_names: ClassVar[Mapping[str, str]] = {
        **ChunkPolicyLoss.metric_names,
        "value_loss": "critic/value_loss",
        "value_clip_fraction": "critic/value_clip_ratio",
    }

    @checked
    def __init__(
        self,
        policy: TensorDictModuleBase,
        *,
        critic_coeff: Factor | None = 1.0,
        clip_value: Positive | None = 0.2,
        huber_delta: Positive = 10.0,
        **options: Any,
    ):
        self._critic = critic_coeff, clip_value
        super().__init__(policy, **options)
        self.huber_delta = huber_delta
        names = ["loss_critic", "value_loss"] if self._has_critic else []
        names += ["value_clip_fraction"] if self._has_critic and clip_value is not None else []
        self._out_keys += [*names, *(("weights", key) for key in names if not key.startswith("loss_"))]

    def _set_in_keys(self) -> None:
        super()._set_in_keys()
        self._in_keys += [self.tensor_keys.value, self.tensor_keys.value_target] if self._has_critic else []

    def terms(
        self,
        tensordict: TensorDictBase,
        log_prob: Tensor,
        entropy: Tensor,
        value: Tensor | None,
        whole: TensorDictBase | None = None,
    ) -> TensorDict:
        """Compute those of :class:`ChunkPolicyLoss`, and the critic's: a clipped Huber loss of the value.

        It is of Schulman et al.'s PPO2 form: the worse of the two errors.
        """
        out = super().terms(tensordict, log_prob, entropy, value, whole)
        if not self._has_critic:
            return out
        if value is None:
            raise ValueError(
                f"critic_coeff is {float(self.critic_coeff):g}, but the policy has no value head: "
                "build the policy with one, or pass critic_coeff=None"
            )
        target = tensordict[self.tensor_keys.value_target]
        if value.shape != target.shape:
            raise ValueError(
                f"the policy's value is {list(value.shape)} and 'value_target' {list(target.shape)}: a value per "
                "primitive action goes with reward_level='action', one per decision with reward_level='chunk'"
            )
        mask, weight = tensordict[keys.NEXT, keys.STEP_MASK], tensordict.get(keys.WEIGHT, None)
        per_action = value.shape == mask.shape
        valid = mask if per_action else mask.any(-1, keepdim=True)
        all_of_it = mask if whole is None else whole[keys.NEXT, keys.STEP_MASK]
        number = count(all_of_it, "action" if per_action else "chunk", 1)
        value, target = torch.where(valid, value, 0.0), torch.where(valid, target, 0.0)  # as above: not even a NaN
        loss = F.huber_loss(value, target, reduction="none", delta=self.huber_delta)
        if self.clip_value is not None:
            old = torch.where(valid, tensordict[self.tensor_keys.value], 0.0)
            change = value - old
            near = old + change.clamp(-self.clip_value, self.clip_value)
            loss = torch.maximum(loss, F.huber_loss(near, target, reduction="none", delta=self.huber_delta))
            out["value_clip_fraction"] = mean((change.detach().abs() > self.clip_value).float(), valid)
            out["weights", "value_clip_fraction"] = valid.sum()
        out["loss_critic"] = self.critic_coeff * mean(loss, valid, weight, number)
        out["value_loss"] = mean(loss.detach(), valid, weight)
        out["weights", "value_loss"] = valid.sum()
        return out


@torch.no_grad()
@checked
def add_log_prob(
    batch: TensorDictBase,
    policy: TensorDictModuleBase,
    key: str,
    minibatch_size: Count,
    device: torch.device | str | None = None,
) -> TensorDictBase:
    """Write the log-probabilities of the stored actions under ``policy`` as ``key``. Returns ``batch``.

    ``reference_log_prob`` is of a frozen policy, ``proximal_log_prob`` of the one that an update starts from. ``batch``
    has ``[B]`` decisions with the policy's ``loss_keys``; ``minibatch_size`` of them pass at once, on ``device``, which
    is the policy's; ``None``: that of the batch.
    """
    parts = batch.split(minibatch_size)
    log_probs = [policy.evaluate_actions(part if device is None else part.to(device))[0] for part in parts]
    return batch.set(key, torch.cat(log_probs).to(batch[keys.ACTION_LOG_PROB].device))
