"""Policy-gradient losses for chunked, tokenised actions."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.objectives import ClipPPOLoss

from vla_keys import (
    ACTION_LOG_PROB,
    ADVANTAGE,
    NEXT,
    STATE_VALUE,
    STEP_MASK,
    VALUE_TARGET,
)

LogProbLevel = Literal["token", "action", "chunk"]


class ChunkClipPPOLoss(ClipPPOLoss):
    """TorchRL's clipped PPO loss for policies that decide on a chunk of actions at once.

    What it adds to :class:`~torchrl.objectives.ClipPPOLoss`: actor and critic share **one** backbone
    pass, primitive actions that were never executed (``step_mask`` False) contribute nothing, the
    probability ratio is taken at a chosen level, and the critic uses the Huber loss.

    Constructor, coefficient buffers (``loss.entropy_coeff = ...`` schedules them), tensor keys, clip
    bounds and the masked reduction are TorchRL's. ``forward`` is our own, because TorchRL's
    calls actor and critic separately and averages its diagnostics over invalid positions too.

    Args:
        policy: a policy with ``evaluate_actions(td) -> (log_prob [B, C, A], entropy [B, C, A],
            value [B, 1] or None)`` and ``loss_keys``, the entries this method reads.
        log_prob_level: one ratio per ``"token"`` (action dimension), per primitive ``"action"`` (sum over
            ``A``) or per ``"chunk"`` (sum over the executed actions and ``A``).
        clip_epsilon: ``x`` clips the ratio to ``[1 - x, 1 + x]``, ``(low, high)`` to ``[1 - low, 1 + high]``.
        entropy_coeff: weight of the entropy bonus; the entropy is a mean per token at every level.
        critic_coeff: weight of the value loss; ``None`` trains no critic.
        clip_value: largest change of the value that is rewarded, ``None`` for no clipping.
        huber_delta: error at which the value loss turns from quadratic to linear.

    The output of ``forward`` has the terms to add up, ``loss_objective``, ``loss_entropy`` and
    ``loss_critic`` (with a critic), and detached diagnostics, all of them means over valid elements:

    * ``kl_approx``: mean of ``log_prob_old - log_prob``;
    * ``clip_fraction``: share of ratios outside the clip range;
    * ``ratio``, ``clipped_ratio``: means of the ratio before and after clipping;
    * ``entropy``: per token, in nats;
    * ``value_loss`` (without ``critic_coeff``) and ``value_clip_fraction``, the share of values that moved by
      more than ``clip_value``;
    * ``num_elements``, ``num_decisions``: how many ratios and decisions were valid, the weights for
      averaging over minibatches.
    """

    def __init__(
        self,
        policy: TensorDictModuleBase,
        *,
        log_prob_level: LogProbLevel = "token",
        clip_epsilon: float | tuple[float, float] = 0.2,
        entropy_coeff: float = 0.0,
        critic_coeff: float | None = 1.0,
        clip_value: float | None = 0.2,
        huber_delta: float = 10.0,
    ):
        if log_prob_level not in ("token", "action", "chunk"):
            raise ValueError(f"log_prob_level is {log_prob_level!r}, must be 'token', 'action' or 'chunk'")
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
        )
        self.log_prob_level = log_prob_level
        self.huber_delta = huber_delta
        self.set_keys(
            sample_log_prob=ACTION_LOG_PROB,
            advantage=ADVANTAGE,
            value_target=VALUE_TARGET,
            value=STATE_VALUE,
        )

    def _set_in_keys(self) -> None:
        keys = [*self.actor_network.loss_keys, self.tensor_keys.sample_log_prob, self.tensor_keys.advantage]
        if self.critic_network is not None:
            keys += [self.tensor_keys.value, self.tensor_keys.value_target]
        self._in_keys = [*keys, (NEXT, STEP_MASK)]

    @property
    def out_keys(self) -> list[str]:
        keys = ["loss_objective", "loss_entropy", "kl_approx", "clip_fraction", "ratio", "clipped_ratio"]
        keys += ["entropy", "num_elements", "num_decisions"]
        if self._has_critic:
            keys += ["loss_critic", "value_loss"]
            keys += ["value_clip_fraction"] if self.clip_value is not None else []
        return keys

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Compute the loss terms of a minibatch.

        Args:
            tensordict: batch ``[B]`` with :attr:`in_keys`; ``advantage`` and ``value_target`` ``[B, 1]``.

        Returns:
            A TensorDict of scalars, see the class.
        """
        log_prob, entropy, value = self.actor_network.evaluate_actions(tensordict)
        mask = tensordict[NEXT, STEP_MASK]  # [B, C]
        token_mask = mask.unsqueeze(-1).expand_as(log_prob)

        # Masked before anything else: garbage at positions that were never executed, even a NaN, reaches
        # neither the loss nor its gradient.
        log_weight = log_prob - tensordict[self.tensor_keys.sample_log_prob]
        log_weight = torch.where(token_mask, log_weight, 0.0)
        log_weight, ratio_mask = self._to_level(log_weight, mask)
        clipped = log_weight.clamp(*self._clip_bounds)

        advantage = tensordict[self.tensor_keys.advantage]  # [B, 1]
        advantage = advantage.reshape(-1, *(1,) * (log_weight.ndim - 1))
        gain = torch.minimum(log_weight.exp() * advantage, clipped.exp() * advantage)
        entropy_mean = self._reduce_loss(entropy, mask=token_mask)

        out = TensorDict(
            {
                "loss_objective": self._reduce_loss(-gain, mask=ratio_mask),
                "loss_entropy": -self.entropy_coeff * entropy_mean,
                "entropy": entropy_mean.detach(),
                "num_elements": ratio_mask.sum(),
                "num_decisions": mask.any(-1).sum(),
            }
        )
        with torch.no_grad():
            out["kl_approx"] = self._reduce_loss(-log_weight, mask=ratio_mask)
            out["clip_fraction"] = self._reduce_loss((clipped != log_weight).float(), mask=ratio_mask)
            out["ratio"] = self._reduce_loss(log_weight.exp(), mask=ratio_mask)
            out["clipped_ratio"] = self._reduce_loss(clipped.exp(), mask=ratio_mask)
        if self._has_critic:
            out.update(self._value_terms(tensordict, value, mask.any(-1, keepdim=True)))
        return out

    def _to_level(self, log_weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Sum masked ``[B, C, A]`` to the level of the ratio; its validity has the same shape."""
        if self.log_prob_level == "token":
            return log_weight, mask.unsqueeze(-1).expand_as(log_weight)
        if self.log_prob_level == "action":
            return log_weight.sum(-1), mask
        return log_weight.sum((-2, -1)), mask.any(-1)

    def _value_terms(
        self, tensordict: TensorDictBase, value: Tensor | None, valid: Tensor
    ) -> dict[str, Tensor]:
        """Clipped Huber loss of the value (Schulman et al.'s PPO2 form: the worse of the two errors)."""
        if value is None:
            raise ValueError(
                f"critic_coeff is {float(self.critic_coeff):g}, but the policy has no value head: "
                "build the policy with one, or pass critic_coeff=None"
            )
        target = tensordict[self.tensor_keys.value_target]
        loss = F.huber_loss(value, target, reduction="none", delta=self.huber_delta)
        terms = {}
        if self.clip_value is not None:
            old = tensordict[self.tensor_keys.value]
            change = value - old
            near = old + change.clamp(-self.clip_value, self.clip_value)
            loss = torch.maximum(loss, F.huber_loss(near, target, reduction="none", delta=self.huber_delta))
            moved = (change.detach().abs() > self.clip_value).float()
            terms["value_clip_fraction"] = self._reduce_loss(moved, mask=valid)
        value_loss = self._reduce_loss(loss, mask=valid)
        return {"loss_critic": self.critic_coeff * value_loss, "value_loss": value_loss.detach(), **terms}
