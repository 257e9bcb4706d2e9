"""Robot-manipulation benchmarks as TorchRL environments and Gymnasium ids; ``__init__.pyi`` says where names live.

Importing this package imports neither torch nor a simulator, which workers and listings do not need.
"""

import os

import lazy_loader

from vla_common import __version__ as __version__
from vla_envs.registry import register_installed
from vla_envs.rendering.egl import WORKER

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

if WORKER not in os.environ:  # a worker gets the description of its simulator, and asks for no other
    register_installed()
