"""Robot-manipulation benchmarks as TorchRL environments and Gymnasium ids.

Importing this package imports neither torch nor a simulator: worker processes need the former as little
as a listing needs the latter. ``__init__.pyi`` says where each name lives.
"""

import os

import lazy_loader

from vla_common import __version__ as __version__
from vla_common.moved import find_moved_modules
from vla_envs.registry import register_installed
from vla_envs.rendering.egl import WORKER

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__.remove("evaluation_grid")  # deprecated

if WORKER not in os.environ:  # a worker gets the description of its simulator, and asks for no other
    register_installed()
find_moved_modules()
