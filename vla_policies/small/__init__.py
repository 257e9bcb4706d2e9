"""Policies of about one million parameters that are made new for an environment and train on a CPU in minutes."""

from vla_policies.small.flow_policy import SmallFlow, SmallFlowConfig
from vla_policies.small.token_policy import SmallVLA, SmallVLAConfig

__all__ = ["SmallFlow", "SmallFlowConfig", "SmallVLA", "SmallVLAConfig"]
