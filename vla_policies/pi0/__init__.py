"""pi0 and pi0.5 as native modules that read and write openpi's PyTorch checkpoints, pi0 LeRobot's too."""

from vla_policies.pi0.lerobot import LeRobotPi0
from vla_policies.pi0.policy import Pi0, Pi0Config

__all__ = ["LeRobotPi0", "Pi0", "Pi0Config"]
