from .openvla import OpenVLA as OpenVLA
from .openvla import OpenVLAOFT as OpenVLAOFT
from .pi0 import LeRobotPi0 as LeRobotPi0
from .pi0 import Pi0 as Pi0
from .policy import VLAPolicy as VLAPolicy
from .pretrained import PretrainedPolicy as PretrainedPolicy
from .processing.adapters import Adapter as Adapter
from .processing.adapters import get_adapter as get_adapter
from .processing.adapters import make_example as make_example
from .registry import inspect_policy as inspect_policy
from .registry import load_policy as load_policy
from .registry import make_policy as make_policy
from .registry import policy_types as policy_types
from .registry import register_policy as register_policy
from .remote import RemotePolicy as RemotePolicy
from .small import SmallFlow as SmallFlow
from .small import SmallFlowConfig as SmallFlowConfig
from .small import SmallVLA as SmallVLA
from .small import SmallVLAConfig as SmallVLAConfig
from .smolvla import SmolVLA as SmolVLA

__version__: str
__all__ = [
    "Adapter",
    "LeRobotPi0",
    "OpenVLA",
    "OpenVLAOFT",
    "Pi0",
    "PretrainedPolicy",
    "RemotePolicy",
    "SmallFlow",
    "SmallFlowConfig",
    "SmallVLA",
    "SmallVLAConfig",
    "SmolVLA",
    "VLAPolicy",
    "get_adapter",
    "inspect_policy",
    "load_policy",
    "make_example",
    "make_policy",
    "policy_types",
    "register_policy",
]
