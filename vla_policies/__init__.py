"""Vision-Language-Action policies: observations in, actions, log-probabilities and values out.

Importing this package imports neither torch nor a model library; what is used is loaded when it is first named.
:mod:`vla_policies.policy` says what a policy offers.
"""

import lazy_loader

from vla_common import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
