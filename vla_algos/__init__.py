"""Algorithms on TorchRL parts: advantages, losses, collectors, the update, evaluation.

Importing this package imports no torch; what is used is loaded when it is first named.
"""

import lazy_loader

from vla_common import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
