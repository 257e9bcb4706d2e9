"""What policies that denoise their actions share: sampling, the probability of what was sampled, supervised loss."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributions import Distribution, Independent
from torchrl.envs.utils import ExplorationType, exploration_type

from vla_common import keys
from vla_policies.flow import steps as flow
from vla_policies.flow.config import FlowConfig
from vla_policies.flow.steps import StepDistribution
from vla_policies.policy import VLAPolicy


class FlowPolicy(VLAPolicy):
    """Denoises a chunk of actions in ``K`` steps; RL sees one step of them, or all.

    A subclass says what the observation is (:meth:`observe`) and how fast noisy actions flow (:meth:`velocity`), in
    normalised actions ``[N, H, A_model]``, of which the first ``C`` and ``A`` reach the environment and have a
    probability. Rollout and update evaluate the same step at the same noise, so that ratios are 1 before the first
    update and values are those of the same step: to the last bit in train mode and batches of the rollout's size, up to
    rounding in others, such as all ``K`` steps in one pass.
    """

    sampling_settings = ("num_steps", "noise_level", "joint_log_prob")
    sample_key = keys.DENOISED
    summed_times: ClassVar[bool] = True  # see flow.steps.times
    drawn_keys = (keys.DENOISE_CHAIN, keys.DENOISE_STEP, keys.DENOISED)

    def __init__(
        self,
        config: FlowConfig,
        *,
        chunk_size: int,  # C
        horizon: int,  # H, actions that are denoised together
        model_action_dim: int,  # numbers of an action in the network
        trained_dims: int,  # how many of them mean something
        hidden_size: int,  # width of the hidden states that velocity() returns
        noise_widths: tuple[int, ...] = flow.NOISE_WIDTHS,  # of the layers of flow_noise's network
    ):
        super().__init__()
        if not 1 <= chunk_size <= horizon <= 1000:
            raise ValueError(f"num_action_chunks is {chunk_size}, must be 1 to {min(horizon, 1000)}, the horizon")
        self.flow = config
        self.num_values = 1 if config.value_head else 0
        self.chunk_size, self.horizon = chunk_size, horizon
        self.model_action_dim, self.trained_dims = model_action_dim, trained_dims
        self.noise_network: nn.Module | None = None
        if config.method == "flow_noise":
            self.noise_network = flow.NoiseNetwork(hidden_size, model_action_dim, config.noise_std_range, noise_widths)
        self.out_keys = [keys.PROMPT_TOKENS, *self.drawn_keys, keys.ACTION]
        self.out_keys += [keys.ACTION_LOG_PROB] if config.method != "flow_ode" else []
        self.out_keys += [keys.STATE_VALUE] if config.value_head else []

    # ---- what a subclass is

    @abstractmethod
    def observe(self, tensordict: TensorDictBase) -> Any:
        """Compute what :meth:`velocity` needs of the observations and ``prompt_tokens`` of a batch."""

    @abstractmethod
    def repeat(self, observed: Any, count: int) -> Any:
        """Return what :meth:`observe` did, with each row ``count`` times in a row."""

    @abstractmethod
    def velocity(self, observed: Any, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return the velocity ``[N, H, A_model]`` of noisy actions at ``time`` ``[N]``, and ``[N, H, hidden]``."""

    @abstractmethod
    def value(self, observed: Any, hidden: Tensor) -> Tensor | None:
        """Return values ``[N, num_values]`` from :meth:`observe` or from the hidden states of :meth:`velocity`."""

    @abstractmethod
    def to_simulator(self, actions: Tensor, states: Tensor) -> Tensor:
        """Convert normalised actions ``[N, C, trained_dims]`` to the simulator's units; ``states`` are ``[N, S]``."""

    @abstractmethod
    def to_model(self, actions: Tensor, states: Tensor) -> Tensor:
        """Invert :meth:`to_simulator`."""

    @abstractmethod
    def write_prompt(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``prompt_tokens``; returns the observations, on the policy's device."""

    # ---- acting

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        seen = self.write_prompt(tensordict)
        observed = self.observe(seen)
        greedy = exploration_type() not in (None, ExplorationType.RANDOM)
        batch, device = len(seen), seen.get(keys.STATES).device
        shape = (batch, self.horizon, self.model_action_dim)
        noise = torch.zeros(shape, device=device) if greedy else torch.randn(shape, device=device)
        chain, step, log_prob, value = self._denoise(observed, noise, stochastic=not greedy)
        actions = self._trained(chain[:, -1])
        if self.flow.joint:
            stored = chain
        else:
            rows = torch.arange(batch, device=device)
            stored = torch.stack([chain[rows, step], chain[rows, step + 1]], dim=1)
        tensordict.set(keys.DENOISE_CHAIN, stored)
        tensordict.set(keys.DENOISE_STEP, step)
        reached = self._trained_steps(stored[:, 1:])
        tensordict.set(keys.DENOISED, reached if self.flow.joint else reached.squeeze(-1))
        tensordict.set(keys.ACTION, self.to_simulator(actions, seen.get(keys.STATES)))
        if keys.ACTION_LOG_PROB in self.out_keys:
            tensordict.set(keys.ACTION_LOG_PROB, log_prob)
        return tensordict if value is None else tensordict.set(keys.STATE_VALUE, value)

    def denoise(self, observed: Any, noise: Tensor) -> Tensor:
        """Return normalised actions ``[N, C, trained_dims]``: noise ``[N, H, A_model]`` after deterministic steps."""
        chain, *_ = self._denoise(observed, noise, stochastic=False)
        return self._trained(chain[:, -1])

    def plan(self, observed: Any, batch: int) -> Tensor:
        """Return the greedy actions ``[N, C, trained_dims]``, normalised."""
        return self.denoise(observed, torch.zeros(batch, self.horizon, self.model_action_dim, device=self.device))

    def _denoise(self, observed: Any, noise: Tensor, stochastic: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the chain ``[N, K + 1, H, A_model]``, stochastic step ``[N]``, its log-probability and the value."""
        settings, batch = self.flow, len(noise)
        schedule = flow.times(settings.num_steps, noise.device, summed=self.summed_times)
        stochastic = stochastic and settings.method != "flow_ode"
        step = torch.zeros(batch, dtype=torch.int64, device=noise.device)
        if stochastic and not settings.joint:
            step = torch.randint(settings.stochastic_steps, (batch,), device=noise.device)
        fresh = torch.randn_like(noise) if stochastic and not settings.joint else torch.zeros_like(noise)
        # Without a stochastic step the value is the mean over all, that of a step drawn at random.
        everywhere = settings.joint or not stochastic
        drawn = range(settings.num_steps) if everywhere else set(step.tolist())
        x, chain = noise, [noise]
        log_prob = noise.new_zeros(batch, self.chunk_size, self.trained_dims)
        values = []
        for number in range(settings.num_steps):
            now = torch.full_like(step, number)
            speed, hidden = self.velocity(observed, x, schedule[now])
            following = flow.euler(x, speed, schedule[now], schedule[now + 1])
            chosen = torch.ones_like(step, dtype=torch.bool) if everywhere else step == number
            if number in drawn:
                values.append((chosen, self.value(observed, hidden)))
            if stochastic and number in drawn:
                mean, std = self._gaussian(x, speed, hidden, schedule, now)
                noisy = mean + std * (torch.randn_like(x) if settings.joint else fresh)
                found = self._trained(flow.log_prob(noisy, mean, std))
                log_prob = log_prob + torch.where(chosen.view(-1, 1, 1), found, 0.0)
                following = torch.where(chosen.view(-1, 1, 1), noisy, following)
            x = following
            chain.append(x)
        value = None
        if seen := [each for _, each in values if each is not None]:
            masks = torch.stack([mask for mask, _ in values]).unsqueeze(-1)
            value = (torch.stack(seen) * masks).sum(0) / masks.sum(0)
        return torch.stack(chain, dim=1), step, log_prob, value

    def _gaussian(
        self, x: Tensor, speed: Tensor, hidden: Tensor, schedule: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation of the stochastic step ``[N]`` at ``x``."""
        if self.noise_network is not None:
            return flow.euler(x, speed, schedule[step], schedule[step + 1]), self.noise_network(hidden)
        mean, std = flow.stochastic_step(self.flow.method, x, speed, schedule, step, self.flow.noise_level)
        return mean, std.expand_as(mean)

    def _trained(self, values: Tensor) -> Tensor:
        return values[:, : self.chunk_size, : self.trained_dims]

    def _trained_steps(self, values: Tensor) -> Tensor:
        """Return of steps ``[N, k, H, A_model]`` what has a probability, ``[N, C, A, k]``."""
        return values[:, :, : self.chunk_size, : self.trained_dims].movedim(1, -1)

    # ---- learning

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """Return the Gaussian ``[N, C, A]`` of what the stored stochastic step led to, ``denoised``.

        If all ``K`` steps are stochastic it is that of all, each given where the one before led to: events ``[K]``.
        """
        mean, std, _ = self._stored_steps(tensordict)
        mean, std = self._trained_steps(mean), self._trained_steps(std)
        if self.flow.joint:
            return Independent(StepDistribution(mean, std).of(tensordict), 1)
        return StepDistribution(mean.squeeze(-1), std.squeeze(-1)).of(tensordict)

    def evaluate_actions(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor | None]:
        mean, std, value = self._stored_steps(tensordict)
        log_prob = self._trained(flow.log_prob(tensordict.get(keys.DENOISE_CHAIN)[:, 1:], mean, std).sum(1))
        return log_prob, self._trained(flow.entropy(std).sum(1)), None if value is None else value.mean(1)

    def _stored_steps(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return mean and deviation ``[N, k, H, A_model]`` and values ``[N, k, num_values]`` of ``k`` stored steps.

        ``k`` is ``K`` if all steps are stochastic, otherwise 1; they go through the network in one pass.
        """
        if self.flow.method == "flow_ode":
            raise ValueError(
                "flow_ode has no log-probability; set method='flow_sde', 'flow_noise' or 'flow_cps' to train"
            )
        chain, step = tensordict.get(keys.DENOISE_CHAIN), tensordict.get(keys.DENOISE_STEP)
        observed, count = self.observe(tensordict), chain.shape[1] - 1
        schedule = flow.times(self.flow.num_steps, chain.device, summed=self.summed_times)
        x = chain[:, :-1].flatten(0, 1)
        if self.flow.joint:
            step = torch.arange(count, device=chain.device).repeat(len(chain))
            observed = self.repeat(observed, count)
        speed, hidden = self.velocity(observed, x, schedule[step])
        mean, std = self._gaussian(x, speed, hidden, schedule, step)
        value = self.value(observed, hidden)
        steps = (-1, count)
        return mean.unflatten(0, steps), std.unflatten(0, steps), None if value is None else value.unflatten(0, steps)

    def imitation_loss(self, tensordict: TensorDictBase, sigma: float) -> Tensor:
        """Return the flow-matching error ``[N, C]``, mean over dimensions; noise and time are drawn.

        Time is ``0.001 + 0.999 Beta(1.5, 1)`` as in pi0. There are no labels to soften.
        """
        target = self.to_model(tensordict.get(keys.ACTION), tensordict.get(keys.STATES))
        actions = target.new_zeros(len(target), self.horizon, self.model_action_dim)
        actions[:, : self.chunk_size, : self.trained_dims] = target
        actions[:, self.chunk_size :, : self.trained_dims] = target[:, -1:]  # not executed
        noise = torch.randn_like(actions)
        beta = torch.distributions.Beta(torch.tensor(1.5), torch.tensor(1.0))
        time = (0.001 + 0.999 * beta.sample((len(actions),))).to(actions.device)
        moment = time.view(-1, 1, 1)
        speed, _ = self.velocity(self.observe(tensordict), moment * noise + (1 - moment) * actions, time)
        return self._trained((noise - actions - speed).square()).mean(-1)
