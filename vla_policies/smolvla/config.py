"""Settings of SmolVLA."""

from __future__ import annotations

from dataclasses import dataclass

from vla_policies.flow.config import VLMFlowConfig


@dataclass(frozen=True, kw_only=True)
class SmolVLAConfig(VLMFlowConfig):
    """Settings of a :class:`~vla_policies.smolvla.policy.SmolVLA`, in addition to those of a :class:`VLMFlowConfig`.

    ``num_action_chunks`` and ``num_steps`` are the checkpoint's ``n_action_steps`` and ``num_steps`` unless they are
    set. A value head that reads the VLM does not see the state.

    Attributes:
        cameras: LeRobot's names of the cameras that the policy looks at, the third-person one first, then wrist
            cameras; ``None`` for those that LeRobot's data sets of the benchmark have.
    """

    cameras: tuple[str, ...] | None = None
