"""What is typed after ``python recipes/ppo.py``, and what Hydra is given of it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from vla_common.errors import unknown_name
from vla_common.experiments import all_experiments
from vla_common.search_path import search_packages

_SETTING = re.compile(r"([A-Za-z_]\w*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
_FILE = re.compile(r"[\w,-]+")  # a name, or several of a sweep

search_packages()


def for_hydra(argument: str, conf: Path) -> str:
    """Return what Hydra is given for an argument that was typed.

    ``eval.env=NAME`` takes a file of the group ``env``. Other settings are forced (``++``), so that Hydra adds one
    that there is not and :func:`~vla_algos.run.config.read_config` refuses it, with the nearest name.

    Args:
        argument: such as ``seed=1``, ``env=libero``, ``-m``.
        conf: folder of the recipe's configuration.
    """
    found = _SETTING.fullmatch(argument)
    if found is None or found[1].startswith("hydra.") or (conf / found[1]).is_dir():
        return argument
    if found[1] == "eval.env" and _FILE.fullmatch(found[2]) and found[2] != "null":
        return f"+env@{argument}"
    return f"++{argument}"


def check_arguments(arguments: Sequence[str], conf: Path) -> None:
    """Refuse an experiment that there is not, and warn of a setting that is typed twice: the last one counts.

    Of experiments one that is named alone and without ``--config-dir`` is looked up.

    Raises:
        ValueError: offers the nearest names.
    """
    settings = [(match[1], match[2]) for each in arguments if (match := _SETTING.fullmatch(each.lstrip("+")))]
    names = [name for name, _ in settings]
    for name, value in dict(settings).items():
        if names.count(name) > 1:
            print(f"warning: {name} is typed {names.count(name)} times; {name}={value} counts")
    elsewhere = any(re.match(r"(--config-(dir|path)|-cd|-cp)\b", each) for each in arguments)
    named = [value for name, value in settings if name == "experiment" and re.fullmatch(r"\w+", value)]
    for name in () if elsewhere else named:
        if name != "null" and name not in (known := all_experiments(conf)):
            raise unknown_name("experiment", name, known)


def read_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Read Hydra's own flags; the settings are ``overrides``."""
    return get_args_parser().parse_args(list(arguments))


def compose_settings(recipe: str, arguments: Sequence[str], conf: Path) -> DictConfig:
    """Compose the configuration of a recipe."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), version_base=None):
            return compose(recipe, overrides=[for_hydra(each, conf) for each in arguments])
    finally:
        GlobalHydra.instance().clear()
