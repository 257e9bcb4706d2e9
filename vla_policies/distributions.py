"""Distributions of what policies sample, which refuse anything else.

What was drawn and the action that the simulator got of it are two entries, often of one shape. The probability of the
wrong one is a number like any other, so a loss that reads it trains on noise; these raise instead. They are
:mod:`torch.distributions` in all else.
"""

from __future__ import annotations

from typing import Self

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributions import Categorical, Normal, constraints

from vla_common import keys
from vla_policies.flow import steps as flow

_SAY = (
    'say which entry was sampled: loss.set_keys(action=policy.sample_key, sample_log_prob="action_log_prob", '
    'value="state_value")'
)


class TokenDistribution(Categorical):
    """Of action tokens ``[N, C, A]``."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log-probabilities of tokens.

        Raises:
            ValueError: actions, or tokens of another shape.
        """
        if value.is_floating_point():
            raise ValueError(
                f"the policy sampled {keys.ACTION_TOKENS!r}, and was asked for the probability of actions in the "
                f"simulator's units; {_SAY}"
            )
        _check_shape(value, self.batch_shape)
        return super().log_prob(value)


class StepDistribution(Normal):
    """Of what stochastic steps of a flow led to, ``denoised``; a step without noise (``scale`` 0) counts nothing."""

    arg_constraints = {"loc": constraints.real, "scale": constraints.nonnegative}  # noqa: RUF012  torch's own form
    sampled: Tensor | None = None
    action: Tensor | None = None

    def of(self, tensordict: TensorDictBase) -> Self:
        """Remember which entries of a rollout are what was sampled and the action that came of it."""
        self.sampled, self.action = tensordict.get(keys.DENOISED, None), tensordict.get(keys.ACTION, None)
        return self

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the logarithm of the density, rounded as in the rollout.

        Raises:
            ValueError: the action that came of it, or another shape.
        """
        if value is not self.sampled:
            _check_shape(value, self.batch_shape)
            if self._is_action(value):
                raise ValueError(
                    f"the policy sampled {keys.DENOISED!r}, and was asked for the probability of {keys.ACTION!r}, "
                    f"which is in the simulator's units; {_SAY}"
                )
        return flow.log_prob(value, self.loc, self.scale)

    def entropy(self) -> Tensor:
        """Return the entropy in nats."""
        return flow.entropy(self.scale)

    def _is_action(self, value: Tensor) -> bool:
        if self.action is None or value is self.action:
            return self.action is not None
        if torch.compiler.is_compiling() or value.shape != self.action.shape:
            return False
        # Stacked and reshaped batches give a new tensor each time they are asked.
        same_as_sample = self.sampled is not None and torch.equal(value, self.sampled)
        return torch.equal(value, self.action) and not same_as_sample


def _check_shape(value: Tensor, shape: torch.Size) -> None:
    if value.shape[value.ndim - len(shape) :] != shape:
        raise ValueError(
            f"the policy sampled {list(shape)}, and was asked for the probability of {list(value.shape)}; {_SAY}"
        )
