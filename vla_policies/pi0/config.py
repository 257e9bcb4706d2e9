"""Settings of pi0 and pi0.5."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from vla_common.settings import Length
from vla_policies.flow.config import VLMFlowConfig

SLOTS = 3  # of the model, for images: base, left wrist, right wrist


@dataclass(frozen=True, kw_only=True)
class Pi0Config(VLMFlowConfig):
    """Settings of a :class:`~vla_policies.pi0.policy.Pi0`, in addition to those of a :class:`VLMFlowConfig`.

    Prompts have at most 48 tokens, and 200 for pi0.5, unless ``max_prompt_length`` says otherwise.

    Attributes:
        config_name: the published variant, see :func:`vla_policies.pi0.presets.list_presets`.
        adapt_to_pi: the checkpoint counts joints and grippers as pi's own robots do, not as the benchmark (openpi's
            setting of that name); ``None`` for what the published variant does. No file says it.
        norm_stats_id: data set whose statistics are used; may be left out if the checkpoint has one.
        action_horizon: actions that are denoised together; ``None`` for the checkpoint's or the preset's.
        num_images_in_input: cameras, the third-person one first, then wrist cameras; 3 at most.
    """

    config_name: str
    adapt_to_pi: bool | None = None
    norm_stats_id: str | None = None
    action_horizon: Length | None = None
    num_images_in_input: Annotated[int, Ge(1), Le(SLOTS)] = 1
