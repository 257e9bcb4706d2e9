"""The contract that every policy fulfils, whatever its architecture."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch.distributions import Distribution


class VLAPolicy(TensorDictModuleBase):
    """A policy that turns camera images, proprioception and an instruction into a chunk of actions.

    It owns everything that belongs to its checkpoint: prompt, image preprocessing, normalisation
    statistics and action layout. ``N`` is the batch, ``C`` the chunk length, ``A`` the action dimension.

    Attributes:
        chunk_size: ``C``.
        action_dim: ``A``.
        state_dim: length of ``states``.
        num_values: values per decision in ``state_value``: 1, ``C`` for one per primitive action, or 0 without a head.
        loss_keys: the entries of a rollout that :meth:`evaluate_actions` reads, which a collector must keep.
    """

    chunk_size: int
    action_dim: int
    state_dim: int
    num_values: int
    loss_keys: tuple[str, ...]

    @abstractmethod
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act. Samples under ``ExplorationType.RANDOM``, is greedy under ``DETERMINISTIC``.

        Writes ``action`` float32 ``[N, C, A]`` in the simulator's units, ``action_log_prob`` ``[N, C, A]``,
        ``state_value`` ``[N, 1]`` or ``[N, C]`` if there is a value head, and the entries of :attr:`loss_keys` that are
        not observations.
        """

    @abstractmethod
    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """Distribution of what was sampled (action tokens), with ``log_prob`` of shape ``[N, C, A]``."""

    @abstractmethod
    def evaluate_actions(self, tensordict: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Log-probability ``[N, C, A]``, entropy ``[N, C, A]`` and value of stored actions in one backbone pass."""

    @abstractmethod
    def prompt_tokens(self, task_descriptions: Sequence[str], states: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens int64 ``[N, L]`` of ``N`` instructions; some policies' prompts list the ``states`` ``[N, S]`` too.

        Raises:
            ValueError: an instruction that the policy cannot take.
        """

    def prepare(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Called by the learner with all decisions ``[D]`` of an update, before its first epoch.

        A policy may add what does not change during the update, such as the output of a frozen part.
        """
        return tensordict

    def start_iteration(self, iteration: int) -> None:
        """Called by the recipes before each collection, counted from 1, for whatever a policy schedules."""

    def follow(self, policy: VLAPolicy) -> None:
        """Called on a frozen copy before it is compared with ``policy``: take over what that one schedules."""

    @abstractmethod
    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights, normalisation statistics and configuration to ``folder``."""
