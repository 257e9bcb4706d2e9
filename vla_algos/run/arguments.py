"""What is typed after ``python recipes/ppo.py``, and what Hydra is given of it."""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from vla_common.errors import also_called, unknown_name
from vla_common.experiments import all_experiments, find_experiments, search_packages

_SETTING = re.compile(r"([A-Za-z_]\w*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
_FILE = re.compile(r"[\w,-]+")  # a name, or several of a sweep

search_packages()


def for_hydra(argument: str, conf: Path) -> str:
    """Return what Hydra is given for an argument that was typed; ``conf`` is the folder of the configuration.

    ``eval.env=NAME`` takes a file of the group ``env``. Other settings are forced (``++``), so that Hydra adds one that
    there is not and :func:`~vla_algos.run.config.read_config` refuses it, with the nearest name.
    """
    found = _SETTING.fullmatch(argument)
    if found is None or found[1].startswith("hydra.") or (conf / found[1]).is_dir():
        return argument
    if found[1] == "eval.env" and _FILE.fullmatch(found[2]) and found[2] != "null":
        return f"+env@{argument}"
    return f"++{argument}"


def check_arguments(arguments: Sequence[str], conf: Path) -> None:
    """Refuse an experiment that there is not (ValueError, with the nearest names); warn of a setting typed twice.

    Of these the last one counts. Of experiments one that is named alone and without ``--config-dir`` is looked up.
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


def check_names(recipe: str, arguments: Sequence[str], conf: Path) -> None:
    """Refuse settings that our files of the configuration do not have, which have all that there are.

    What is typed with ``+``, sweeps, and what packages and users add is left to
    :func:`~vla_algos.run.config.read_config`. ValueError: with the nearest names. HydraException: a file that there is
    not, or what Hydra cannot read.
    """
    flags = read_flags(arguments)
    others = (flags.help, flags.hydra_help, flags.shell_completion, flags.multirun, flags.config_dir, flags.config_path)
    if any(others):
        return
    OverridesParser.create().parse_overrides(flags.overrides)
    found = {each: match[1] for each in flags.overrides if (match := _SETTING.fullmatch(each))}
    settings = {each: name for each, name in found.items() if for_hydra(each, conf).startswith("++")}
    elsewhere = {"logger"}
    if recipe == "evaluate":  # which takes these from experiments that train, and from folders of policies
        elsewhere |= {"env", "policy", "eval", "experiment"}
    files = [each for each in flags.overrides if each not in settings and each.partition("=")[0] not in elsewhere]
    known = _all_of_ours(flags.config_name or recipe, files, conf)
    for name in settings.values() if known else ():
        section, _, setting = name.partition(".")
        its = known.get(section)
        known_setting = not setting or section in elsewhere or not isinstance(its, dict) or setting.split(".")[0] in its
        if section not in known or not known_setting:
            raise unknown_setting(name, known)


def _all_of_ours(recipe: str, arguments: Sequence[str], conf: Path) -> dict[str, Any]:
    """Compose the settings of files that are all ours; none if another is among them."""
    composed = compose_settings(recipe, arguments, conf, return_hydra_config=True)
    for group, choice in composed.hydra.runtime.choices.items():
        folder = conf / group.partition("@")[0]
        known = {*find_experiments(conf), *(file.stem for file in folder.glob("*.yaml"))}
        if choice and folder.is_dir() and choice not in known:
            return {}
    settings: Any = OmegaConf.to_container(composed, resolve=False)
    del settings["hydra"]
    return {"experiment": None, **settings}


def unknown_setting(name: str, known: Mapping[str, Any]) -> ValueError:
    """Name an unknown setting, and the one of the same name elsewhere, or those that are spelt like it."""
    last, section = name.rpartition(".")[2], name.partition(".")[0]
    its = known.get(section) if section != name else None
    longer = [f"{section}.{each}" for each in its if each.startswith(last)] if isinstance(its, Mapping) else []
    if places := [*longer, *also_called(last, known), *find_setting(last, known)]:
        return ValueError(f"unknown setting {name!r}; did you mean {' or '.join(places[:3])}?")
    if section != name and section in known:
        return unknown_name("setting", name, [f"{section}.{each}" for each in known[section]])
    return unknown_name("setting", section, known)


def find_setting(name: str, known: Mapping[str, Any]) -> list[str]:
    """List where there are settings of a name: ``known`` has settings, and mappings of those of sections."""
    found = [name] if name in known else []
    return found + [f"{section}.{name}" for section, its in known.items() if isinstance(its, Mapping) and name in its]


def read_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Read Hydra's own flags; the settings are ``overrides``."""
    return get_args_parser().parse_args(list(arguments))


def compose_settings(
    recipe: str, arguments: Sequence[str], conf: Path, return_hydra_config: bool = False
) -> DictConfig:
    """Compose the configuration of a recipe."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf), version_base=None):  # which leaves it clear
        typed = [for_hydra(each, conf) for each in arguments]
        return compose(recipe, overrides=typed, return_hydra_config=return_hydra_config)
