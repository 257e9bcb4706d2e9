"""Settings that policies which denoise their actions share."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from vla_common.settings import Length, NonNegative, check_fields
from vla_policies.checkpoint.settings import SettingError

_Noise = Annotated[float, Ge(0), Le(10)]
_Deviation = Annotated[float, Gt(0), Le(10)]


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """How a flow policy samples, and what reinforcement learning trains.

    Attributes:
        method: ``"flow_sde"``, ``"flow_noise"`` or ``"flow_cps"``, see :mod:`vla_policies.flow.steps`; ``"flow_ode"``
            has no log-probability and is for evaluation. A greedy policy takes the deterministic steps, from zeros.
        num_steps: ``K``, steps from noise to action.
        noise_level: ``a`` of ``flow_sde`` and ``flow_cps``.
        noise_std_range: smallest and largest standard deviation that ``flow_noise`` may learn.
        joint_log_prob: all ``K`` steps are stochastic and their log-probabilities are summed; otherwise one step, drawn
            for each decision, is. ``None``: for ``flow_noise`` only.
        value_head: build a value head.
        detach_critic: the value loss does not reach what the value head reads.
    """

    method: Literal["flow_sde", "flow_noise", "flow_cps", "flow_ode"] = "flow_sde"
    num_steps: Length = 5
    noise_level: _Noise = 0.5
    noise_std_range: tuple[_Deviation, _Deviation] = (0.08, 0.16)
    joint_log_prob: bool | None = None
    value_head: bool = True
    detach_critic: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stochastic_steps < 1:
            raise SettingError(f"num_steps={self.num_steps}: no step is left to be stochastic; set it to at least 2")
        if self.noise_std_range[0] > self.noise_std_range[1]:
            smallest, largest = self.noise_std_range
            raise SettingError(f"noise_std_range={[smallest, largest]}: smallest first; write {[largest, smallest]}")
        if self.method == "flow_cps" and self.noise_level > 1:
            raise SettingError(f"noise_level={self.noise_level}: flow_cps renews a share of the noise, at most 1")
        if self.method in ("flow_sde", "flow_cps") and self.noise_level <= 0:
            raise SettingError(
                f"noise_level={self.noise_level}: {self.method} then has no log-probability; set it above 0 (0.5 is "
                "usual), or method='flow_ode' for evaluation alone"
            )

    @property
    def stochastic_steps(self) -> int:
        """How many steps, from the first, may be the stochastic one; ``flow_cps`` adds no noise in the last."""
        return self.num_steps - (self.method == "flow_cps")

    @property
    def joint(self) -> bool:
        """Whether all steps are stochastic."""
        return self.method == "flow_noise" if self.joint_log_prob is None else self.joint_log_prob


@dataclass(frozen=True, kw_only=True)
class VLMFlowConfig(FlowConfig):
    """Settings of a :class:`~vla_policies.flow.vlm.VLMFlowPolicy`, in addition to those of a :class:`FlowConfig`.

    Attributes:
        benchmark: whose cameras, states and actions are used.
        num_action_chunks: ``C``, how many of the actions that are denoised together are executed.
        max_prompt_length: tokens; ``None`` for the checkpoint's. A longer prompt is refused before simulators start
            (the reference code cuts it off).
        train_expert_only: freeze the VLM. What it makes of images and prompt is then computed once per update.
        prefix_cache_gb: memory for that, in GB; if it does not suffice it is computed again for each minibatch.
        value_after_vlm: the value head reads the VLM (``"mean"`` of its tokens of images and prompt, without padding,
            which RLinf's mean includes); ``None``: the mean of the action expert's.
        gradient_checkpointing: recompute activations in the update instead of keeping them.
    """

    benchmark: str
    num_action_chunks: Length = 5
    max_prompt_length: Annotated[int, Ge(1), Le(8192)] | None = None
    train_expert_only: bool = True
    prefix_cache_gb: NonNegative = 4.0
    value_after_vlm: Literal["mean"] | None = None
    gradient_checkpointing: bool = False
