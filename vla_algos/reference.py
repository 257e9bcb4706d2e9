"""The frozen policy that a loss with ``reference_kl_coeff`` keeps close to."""

from typing import Any

import torch
from tensordict import TensorDictBase

from vla_algos.losses import add_log_prob
from vla_common.keys import REFERENCE_LOG_PROB
from vla_policies import VLAPolicy
from vla_policies.sharding import gathered


class FrozenPolicy:
    """The policy as it was at the first update: a copy of its trained weights, made by :meth:`add_log_prob`."""

    replicated = True  # the same in all processes, but for what is sharded
    optional = True  # a run may begin to need it when it is resumed

    def __init__(self, policy: VLAPolicy):
        self.policy = policy
        self._weights: dict[str, torch.Tensor] | None = None

    def add_log_prob(self, samples: TensorDictBase | None, size: int, device: torch.device) -> None:
        """Add what the frozen policy says of each decision; all processes that share the policy call it.

        ``samples`` ``[D]`` gets ``reference_log_prob``; ``None`` of a process without rows. It is computed on
        ``device``, in forward passes of ``size`` decisions.
        """
        if self._weights is None:
            self._weights = self.policy.trained_weights()
        with self.policy.reference_weights(self._weights), gathered(self.policy):
            if samples is not None and len(samples):
                add_log_prob(samples, self.policy, REFERENCE_LOG_PROB, size, device)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by their names; nothing before the first update."""
        return dict(self._weights or {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, of the same policy."""
        weights = self.policy.trained_weights() if state else {}
        for name, tensor in weights.items():
            tensor.copy_(state[name])
        self._weights = weights or None

    def places(self) -> dict[str, Any]:
        """Return what lies as tensors of its state are to lie, by their keys."""
        return dict(self.policy.named_parameters())
