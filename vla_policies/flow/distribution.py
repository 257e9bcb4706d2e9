"""The distribution of what stochastic steps of a flow led to, which refuses anything else."""

from typing import Self

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributions import Normal, constraints

from vla_common import keys
from vla_policies.flow import steps as flow
from vla_policies.processing.sampling import SET_KEYS, check_shape


class StepDistribution(Normal):
    """A Gaussian over ``denoised``; a step without noise (``scale`` 0) counts nothing."""

    arg_constraints = {"loc": constraints.real, "scale": constraints.nonnegative}  # noqa: RUF012  torch's own form
    sampled: Tensor | None = None
    action: Tensor | None = None

    def of(self, tensordict: TensorDictBase) -> Self:
        """Remember which entries of a rollout are what was sampled and the action that came of it."""
        self.sampled, self.action = tensordict.get(keys.DENOISED, None), tensordict.get(keys.ACTION, None)
        return self

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density, as in the rollout; ValueError for the action that came of it, or another shape."""
        if value is not self.sampled:
            check_shape(value, self.batch_shape)
            if self._is_action(value):
                raise ValueError(
                    f"the policy sampled {keys.DENOISED!r}, and was asked for the probability of {keys.ACTION!r}, "
                    f"which is in the simulator's units; {SET_KEYS}"
                )
        return flow.log_prob(value, self.loc, self.scale)

    def entropy(self) -> Tensor:
        return flow.entropy(self.scale)

    def _is_action(self, value: Tensor) -> bool:
        if self.action is None or value is self.action:
            return self.action is not None
        if torch.compiler.is_compiling() or value.shape != self.action.shape:
            return False
        # Stacked and reshaped batches give a new tensor each time they are asked.
        same_as_sample = self.sampled is not None and torch.equal(value, self.sampled)
        return torch.equal(value, self.action) and not same_as_sample
