"""Vision-Language-Action policies: observations in, actions, log-probabilities and values out.

Importing this package imports neither torch nor a model library; what is used is loaded when it is first named.
"""

import importlib
from typing import Any

_HOMES = {
    "VLAPolicy": "vla_policies.policy",
    "SmallVLA": "vla_policies.small",
    "SmallVLAConfig": "vla_policies.small",
    "OpenVLA": "vla_policies.openvla",
    "OpenVLAOFT": "vla_policies.openvla_oft",
    "Pi0": "vla_policies.pi0",
    "SmallFlow": "vla_policies.small_flow",
    "SmallFlowConfig": "vla_policies.small_flow",
    "load_policy": "vla_policies.checkpoints",
    "ADAPTERS": "vla_policies.adapters",
    "Adapter": "vla_policies.adapters",
    "make_calvin_example": "vla_policies.adapters",
    "make_libero_example": "vla_policies.adapters",
    "make_maniskill_example": "vla_policies.adapters",
    "make_metaworld_example": "vla_policies.adapters",
    "make_robotwin_example": "vla_policies.adapters",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
