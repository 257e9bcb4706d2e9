"""SmolVLA as a native module that reads and writes LeRobot's checkpoints."""

from vla_policies.smolvla.policy import SmolVLA

__all__ = ["SmolVLA"]
