"""Vision-Language-Action policies: observations in, actions, log-probabilities and values out."""

from vla_policies.checkpoints import load_policy
from vla_policies.policy import VLAPolicy
from vla_policies.small import SmallVLA, SmallVLAConfig

__all__ = ["SmallVLA", "SmallVLAConfig", "VLAPolicy", "load_policy"]
