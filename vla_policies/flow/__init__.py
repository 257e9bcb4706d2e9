"""Flow-matching policies: the steps from noise to actions, and what all of them share."""

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    """Find what this module had before it became a package: the steps."""
    steps = importlib.import_module(f"{__name__}.steps")
    if name.startswith("_") or not hasattr(steps, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is in {steps.__name__} now", DeprecationWarning, stacklevel=2)
    return getattr(steps, name)
