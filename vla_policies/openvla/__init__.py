"""OpenVLA and OpenVLA-OFT as native modules that read and write the published checkpoints."""

from vla_policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
from vla_policies.openvla.oft import OpenVLAOFT
from vla_policies.openvla.openvla import OpenVLA

__all__ = ["OpenVLA", "OpenVLAConfig", "OpenVLAOFT", "OpenVLAOFTConfig"]
