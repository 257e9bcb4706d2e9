"""Vision-Language-Action policies: observations in, actions, log-probabilities and values out.

Importing this package imports neither torch nor a model library; what is used is loaded when it is first named.
:mod:`vla_policies.policy` says what a policy offers.
"""

import lazy_loader

from vla_common import __version__ as __version__
from vla_common.moved import find_moved_modules

_DEPRECATED = (
    "ADAPTERS",
    *(f"make_{name}_example" for name in ("calvin", "libero", "maniskill", "metaworld", "robotwin")),
)
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ = [name for name in __all__ if name not in _DEPRECATED]

find_moved_modules()
