"""Settings of pi0 and pi0.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from vla_common.settings import Length, NonNegative
from vla_policies.checkpoint.settings import SettingError
from vla_policies.flow.config import FlowConfig

SLOTS = 3  # of the model, for images: base, left wrist, right wrist


@dataclass(frozen=True, kw_only=True)
class Pi0Config(FlowConfig):
    """Settings of a :class:`~vla_policies.pi0.policy.Pi0`, in addition to those of a :class:`FlowConfig`.

    Attributes:
        benchmark: whose cameras, states and actions are used.
        config_name: the published variant, see :func:`vla_policies.pi0.presets.list_presets`.
        adapt_to_pi: the checkpoint counts joints and grippers as pi's own robots do, not as the benchmark (openpi's
            setting of that name); ``None`` for what the published variant does. No file says it.
        norm_stats_id: data set whose statistics are used; may be left out if the checkpoint has one.
        action_horizon: actions that are denoised together; ``None`` for the checkpoint's or the preset's.
        num_action_chunks: ``C``, how many of them are executed.
        num_images_in_input: cameras, the third-person one first, then wrist cameras; 3 at most.
        max_prompt_length: tokens; ``None`` for 48, and 200 for pi0.5. A longer prompt is refused before simulators
            start (openpi cuts it off).
        train_expert_only: freeze PaliGemma. What it makes of a decision is then computed once per update.
        prefix_cache_gb: memory for that, in GB; if it does not suffice it is computed again for each minibatch.
        value_after_vlm: the value head reads PaliGemma (``"mean"``, ``"last"`` or ``"first"`` of its tokens, without
            padding, which RLinf's mean and last include); ``None``: the mean of the action expert's tokens.
        chunk_critic_input: only of the first ``C`` of those.
        gradient_checkpointing: recompute activations in the update instead of keeping them.
    """

    benchmark: str
    config_name: str
    adapt_to_pi: bool | None = None
    norm_stats_id: str | None = None
    action_horizon: Length | None = None
    num_action_chunks: Length = 5
    num_images_in_input: Annotated[int, Ge(1), Le(SLOTS)] = 1
    max_prompt_length: Annotated[int, Ge(1), Le(8192)] | None = None
    train_expert_only: bool = True
    prefix_cache_gb: NonNegative = 4.0
    value_after_vlm: Literal["mean", "last", "first"] | None = None
    chunk_critic_input: bool = False
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_critic_input and self.value_after_vlm is not None:
            raise SettingError("chunk_critic_input=True: is for a value head on the action expert; leave it out")
