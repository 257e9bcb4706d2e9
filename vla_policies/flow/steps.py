"""From noise to actions in K steps of a flow, and the probability of a step.

Time runs from 1 (noise) to 0 (action) and the velocity is noise minus action. Deterministic steps are Euler's. For
reinforcement learning a step is drawn from a Gaussian instead:

* ``flow_sde``: the stochastic differential equation with the same marginals (Flow-GRPO, Liu et al. 2025,
  arXiv 2505.05470); noise ``s(t) = a sqrt(t / (1 - t))``, where the first step takes ``1 - t`` from the second.
* ``flow_cps``: coefficients-preserving sampling (Wang et al. 2025, arXiv 2509.05952): the step goes to a point of the
  flow whose noise is partly new.
* ``flow_noise``: Euler's mean and a learned deviation (ReinFlow, Zhang et al. 2025, arXiv 2505.22094).

Formulas and defaults are those of RLinf (Zang et al. 2025, arXiv 2510.25889), checked against its numbers.
"""

import math
from typing import Self

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributions import Normal, constraints
from torchrl.modules import MLP

from vla_common import keys
from vla_policies.processing.action_tokens import SET_KEYS, check_shape

_SHORTEST_PERIOD, _LONGEST_PERIOD = 4e-3, 4.0  # of the embedding of time
NOISE_WIDTHS = (128, 64)  # of the layers of the noise network: RLinf's


def times(num_steps: int, device: torch.device | str | None = None, *, summed: bool = True) -> Tensor:
    """Return times float32 ``[K + 1]`` from 1 to 0.

    They are ``summed`` up in float32 as openpi does it, or exact as LeRobot's: the network's finest period is 0.004, so
    that rounding shows.
    """
    if not summed:
        return torch.tensor([1 - step / num_steps for step in range(num_steps + 1)], device=device)
    moments = [torch.tensor(1.0)]
    for _ in range(num_steps - 1):
        moments.append(moments[-1] - torch.tensor(1.0 / num_steps))
    return torch.stack([*moments, torch.tensor(0.0)]).to(device)


def embed_time(time: Tensor, width: int) -> Tensor:
    """Return sines and cosines float32 ``[N, width]`` of ``time`` ``[N]``, with periods from 0.004 to 4."""
    fraction = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=time.device)
    periods = _SHORTEST_PERIOD * (_LONGEST_PERIOD / _SHORTEST_PERIOD) ** fraction
    angles = 2 * math.pi * time.double().unsqueeze(1) / periods
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def euler(x: Tensor, velocity: Tensor, now: Tensor, then: Tensor) -> Tensor:
    """Take the deterministic step from time ``now`` to ``then``; these are ``[N]`` and ``x`` ``[N, H, A]``."""
    return x - velocity * _column(now - then)


def stochastic_step(
    method: str, x: Tensor, velocity: Tensor, schedule: Tensor, step: Tensor, noise_level: float
) -> tuple[Tensor, Tensor]:
    """Return the mean ``[N, H, A]`` and standard deviation ``[N, 1, 1]`` of a step of ``flow_sde`` or ``flow_cps``.

    ``velocity`` is that at ``x`` ``[N, H, A]``; the step int64 ``[N]`` goes from ``schedule[step]`` to
    ``schedule[step + 1]`` of :func:`times`; ``noise_level`` is ``a``, the deviation of ``flow_sde``'s first step.
    """
    now, then = _column(schedule[step]), _column(schedule[step + 1])
    action, noise = x - velocity * now, x + velocity * (1 - now)
    if method == "flow_cps":
        angle = math.pi * noise_level / 2
        return action * (1 - then) + noise * then * math.cos(angle), then * math.sin(angle)
    width = now - then
    distance = 1 - torch.where(step == 0, schedule[1], schedule[step])  # 1 - t, and no zero at t = 1
    sigma = noise_level * (now / _column(distance)).sqrt()
    mean = action * (1 - then) + noise * (then - sigma.square() * width / (2 * now))
    return mean, width.sqrt() * sigma


def log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the logarithm of the Gaussian density, element by element; 0 where ``std`` is 0."""
    certain = std == 0
    std = torch.where(certain, 1.0, std)
    density = -0.5 * ((value - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(certain, 0.0, density)


def entropy(std: Tensor) -> Tensor:
    """Return the entropy of the Gaussian in nats, element by element; 0 where ``std`` is 0."""
    certain = std == 0
    return torch.where(certain, 0.0, torch.where(certain, 1.0, std).log() + 0.5 * math.log(2 * math.pi * math.e))


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
        return log_prob(value, self.loc, self.scale)

    def entropy(self) -> Tensor:
        return entropy(self.scale)

    def _is_action(self, value: Tensor) -> bool:
        if self.action is None or value is self.action:
            return self.action is not None
        if torch.compiler.is_compiling() or value.shape != self.action.shape:
            return False
        # Stacked and reshaped batches give a new tensor each time they are asked.
        same_as_sample = self.sampled is not None and torch.equal(value, self.sampled)
        return torch.equal(value, self.action) and not same_as_sample


class NoiseNetwork(nn.Module):
    """The learned deviation of ``flow_noise``: ``[..., A]`` from the expert's hidden states ``[..., width]``.

    ``bounds`` are the smallest and largest standard deviation, ``hidden`` the widths of the layers between.
    """

    def __init__(
        self,
        width: int,
        action_dim: int,
        bounds: tuple[float, float] = (0.08, 0.16),
        hidden: tuple[int, ...] = NOISE_WIDTHS,
    ):
        super().__init__()
        self.mlp = MLP(width, action_dim, num_cells=hidden, activation_class=nn.Tanh, activate_last_layer=True)
        self.bounds = bounds

    def forward(self, hidden: Tensor) -> Tensor:
        low, high = (2 * math.log(bound) for bound in self.bounds)
        share = (self.mlp(hidden.float()) + 1) / 2
        return torch.exp((low + (high - low) * share) / 2)


def _column(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)
