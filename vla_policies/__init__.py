"""Vision-Language-Action policies: observations in, actions, log-probabilities and values out.

Importing this package imports neither torch nor a model library; what is used is loaded when it is first named.
"""

import importlib
from typing import Any

_HOMES = {
    "VLAPolicy": "vla_policies.policy",
    "SmallVLA": "vla_policies.small.token_policy",
    "SmallVLAConfig": "vla_policies.small.token_policy",
    "OpenVLA": "vla_policies.openvla.openvla",
    "OpenVLAOFT": "vla_policies.openvla.oft",
    "Pi0": "vla_policies.pi0.policy",
    "SmallFlow": "vla_policies.small.flow_policy",
    "SmallFlowConfig": "vla_policies.small.flow_policy",
    "load_policy": "vla_policies.registry",
    "ADAPTERS": "vla_policies.processing.adapters",
    "Adapter": "vla_policies.processing.adapters",
    "make_calvin_example": "vla_policies.processing.adapters",
    "make_libero_example": "vla_policies.processing.adapters",
    "make_maniskill_example": "vla_policies.processing.adapters",
    "make_metaworld_example": "vla_policies.processing.adapters",
    "make_robotwin_example": "vla_policies.processing.adapters",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
