"""Behaviour cloning: the warm start before reinforcement learning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Gt, Le
from tensordict import TensorDict

from vla_algos import parallel
from vla_algos.learner import clip_gradient, empty_state
from vla_common import keys
from vla_common.settings import BelowOne, Count, Factor, Fraction, Rate, checked
from vla_common.validation import are_numbers
from vla_envs.demonstrations import check_expert
from vla_envs.env import VLAEnv
from vla_envs.simulator import Episode
from vla_envs.workers.pool import reason
from vla_policies import VLAPolicy
from vla_policies.sharding import compute_device


@checked
def record_demonstrations(
    env: VLAEnv,
    policy: VLAPolicy,
    episodes: Sequence[Episode],
    *,
    stride: Count = 4,
    noise: Fraction = 0.25,
    noise_correlation: BelowOne = 0.8,
    max_steps: Count = 150,
    on_episode: Callable[[bool], object] | None = None,
) -> TensorDict:
    """Let the benchmark's scripted expert solve ``episodes`` in the workers of ``env``.

    Args:
        env: its workers record, beside the episodes that run in its slots.
        policy: tokenises the instructions and sets the length of the chunks.
        episodes: what to solve; those that the expert fails are left out, and those whose simulator fails again and
            again, with a warning that counts them.
        stride: record every so many primitive actions, or decisions where a chunk is one motion.
        noise: standard deviation of the disturbance, as a fraction of half the action's range.
        noise_correlation: of the disturbance between successive actions, 0 to below 1.
        max_steps: give up after that many actions.
        on_episode: called after each with whether it was solved.

    Returns:
        ``[K]`` with ``images``, or ``model_images`` of a policy that resizes, ``states``, ``prompt_tokens``, ``action``
        ``[K, C, A]`` and ``step_mask`` ``[K, C]``.

    Raises:
        ValueError: the benchmark has no scripted expert.
        RuntimeError: the expert solved none.
        SimulatorCrash: the simulator fails whatever it is to do.
    """
    if not episodes:
        raise ValueError("behaviour cloning needs at least 1 demonstration; raise demonstrations.episodes")

    check_expert(env.simulator_spec.simulator_class(), env.simulator_spec)
    crashed: list[tuple[Episode, str]] = []

    def skip(episode: Episode, error: str) -> None:
        crashed.append((episode, reason(error)))
        if on_episode is not None:
            on_episode(False)

    def note(recording: dict[str, Any] | None) -> None:
        if recording is not None:  # frames as the policy keeps them, before the next are recorded
            images = TensorDict({keys.IMAGES: torch.from_numpy(recording.pop(keys.IMAGES))})
            images.batch_size = images[keys.IMAGES].shape[:1]
            recording["frames"] = policy.shrink_images(images.to(policy.device)).cpu()
        if on_episode is not None:
            on_episode(recording is not None)

    recordings = env.pool.map(
        "vla_envs.demonstrations:demonstrate",
        episodes,
        on_result=note,
        on_error=skip,
        chunk_size=policy.chunk_size,
        stride=stride,
        noise=noise,
        noise_correlation=noise_correlation,
        max_steps=max_steps,
    )
    if crashed:
        (episode, error), tasks = crashed[0], env.simulator_spec.tasks
        warnings.warn(
            f"{len(crashed)} of {len(episodes)} demonstrations crashed and are left out: the first is task "
            f"{tasks[episode.task_id].name} trial {episode.trial_id} seed {episode.seed}: {error}",
            stacklevel=2,
        )
    solved = [recording for recording in recordings if recording is not None]
    if not solved:
        raise RuntimeError(
            f"the scripted expert solved none of {len(episodes)} episodes of {env.simulator_spec.id} within "
            f"{max_steps} steps; raise max_steps, lower the noise, or take other tasks"
        )
    names = (keys.STATES, keys.ACTION, keys.STEP_MASK)
    data: TensorDict = torch.cat([recording["frames"] for recording in solved])
    for name in names:
        data[name] = torch.from_numpy(np.concatenate([r[name] for r in solved]))
    texts = [r[keys.TASK_DESCRIPTIONS] for r in solved for _ in r[keys.STATES]]
    data[keys.PROMPT_TOKENS] = policy.prompt_tokens(texts, data[keys.STATES]).cpu()
    return data


def check_state_noise(state_noise: Any, state_dim: int) -> None:
    """Refuse what is neither a number nor one for each state.

    Raises:
        ValueError: says how many there are.
    """
    if not are_numbers([state_noise], 1) and not are_numbers(state_noise, state_dim):
        raise ValueError(f"state_noise is one number or one for each of the {state_dim} states, got {state_noise}")


class BehaviourCloning:
    """Trains ``policy`` to imitate, and sets its normalisation statistics from the demonstrations.

    Several processes that share a sharded policy work off a part of each batch each; all have all demonstrations. What
    a policy draws by itself, such as the noise of a flow, each draws for its part: seed them differently.

    Args:
        policy: trained in place.
        demonstrations: of :func:`record_demonstrations`.
        steps: number of AdamW steps there will be, with linear warm-up and cosine decay to 2 % of ``lr``.
        batch_size: samples per step.
        lr, weight_decay: of AdamW.
        label_sigma: width of the soft labels, see ``imitation_loss`` of the policy.
        state_noise: standard deviation of noise on ``states`` in their own units, one number or one for each of the
            ``S``. It keeps the policy from reading the phase of the expert's motion off the state instead of looking
            at the image.
        warmup_steps: of the learning rate.

    Raises:
        ValueError: ``state_noise`` is neither.
    """

    @checked
    def __init__(
        self,
        policy: VLAPolicy,
        demonstrations: TensorDict,
        *,
        steps: Count,
        batch_size: Count = 32,
        lr: Rate = 1e-3,
        weight_decay: Fraction = 1e-4,
        label_sigma: Annotated[float, Gt(0), Le(1)] = 0.1,
        state_noise: Factor | Sequence[Factor] = 0.01,
        warmup_steps: Count = 30,
    ):
        states = demonstrations[keys.STATES]
        check_state_noise(state_noise, states.shape[-1])
        spread = states.std(0) if len(states) > 1 else torch.zeros_like(states[0])
        policy.set_statistics(states.mean(0), spread + 1e-2)  # a constant entry must not be blown up
        self.policy, self.demonstrations = policy, demonstrations
        self.batch_size, self.label_sigma, self.state_noise = batch_size, label_sigma, torch.tensor(state_noise)
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=weight_decay)

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / warmup_steps) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self._order: list[torch.Tensor] = []  # batches that are left of this epoch, the next one last

    def step(self) -> float:
        """Take one step of the optimizer on one batch; returns its loss.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        self.policy.train()
        if not self._order:
            order = parallel.broadcast_object(torch.randperm(len(self.demonstrations)))
            self._order = list(order.split(self.batch_size))
        batch = self.demonstrations[self._order.pop()]
        noise = parallel.broadcast_object(torch.randn_like(batch[keys.STATES]))
        batch[keys.STATES] = batch[keys.STATES] + self.state_noise * noise
        loss = self._share_of_loss(batch)
        whole = sum(parallel.all_gather_object(loss.item()))
        if not math.isfinite(whole):
            raise FloatingPointError(
                f"the loss of cloning is {whole}: the policy has diverged; lower cloning.lr, or look at the "
                "demonstrations"
            )
        self.optimizer.zero_grad()
        loss.backward()
        clip_gradient(list(self.policy.parameters()), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return whole

    def _share_of_loss(self, batch: TensorDict) -> torch.Tensor:
        """Return what this process's rows add to the mean over what is valid of a batch; 0 where it has none."""
        valid = batch[keys.STEP_MASK]
        own = batch[parallel.rank() :: parallel.world_size()]
        counted = bool(own[keys.STEP_MASK].any())  # no process may leave out a pass of a sharded policy
        rows = (own if counted else batch[:1]).to(compute_device(next(self.policy.parameters())))
        loss = self.policy.imitation_loss(rows, sigma=self.label_sigma)
        if not counted:
            return 0.0 * loss.sum()
        loss = loss[rows[keys.STEP_MASK]]
        return loss.mean() * (len(loss) / int(valid.sum()))

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to resume exactly here, with the same demonstrations."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "order": list(self._order),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; the policy's own weights are not in it."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self._order = list(state["order"])

    def empty_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a state to load into: like ``saved``, whose tensors have shapes alone, with memory as its own have."""
        return empty_state(saved, self.optimizer)
