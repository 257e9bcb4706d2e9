"""pi0 and pi0.5 as native modules that read and write openpi's PyTorch checkpoints."""

from vla_policies.pi0.config import Pi0Config
from vla_policies.pi0.policy import Pi0

__all__ = ["Pi0", "Pi0Config"]
