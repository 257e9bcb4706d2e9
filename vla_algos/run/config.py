"""Groups of a configuration as keyword arguments, where a key that nobody reads is an error."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from omegaconf import DictConfig, OmegaConf

from vla_common.errors import unknown_name


def group(
    config: DictConfig, name: str, *readers: Callable, also: Iterable[str] = (), without: Iterable[str] = ()
) -> dict:
    """A group of the configuration as keyword arguments, every one of which somebody reads.

    Args:
        config: the whole configuration.
        name: of the group.
        readers: the functions whose keyword arguments the settings are.
        also: settings that the recipe reads itself.
        without: arguments of the readers that are set elsewhere.

    Raises:
        ValueError: a setting that nobody reads; the message offers the nearest ones.
    """
    known = {parameter for reader in readers for parameter in parameters_of(reader)} - set(without) | set(also)
    settings = OmegaConf.to_container(config[name], resolve=True)
    for key in settings:
        if key not in known:
            raise unknown_name("setting", f"{name}.{key}", [f"{name}.{other}" for other in sorted(known)])
    return settings


def take(settings: dict, reader: Callable) -> dict:
    """Remove from ``settings`` what ``reader`` takes as keyword arguments, and return it."""
    return {name: settings.pop(name) for name in list(settings) if name in parameters_of(reader)}


def parameters_of(function: Callable) -> Iterable[str]:
    """Names of what a function can be called with."""
    return inspect.signature(function).parameters
