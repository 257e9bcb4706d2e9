"""What is typed after ``python recipes/ppo.py``: earlier names of settings, mistakes that Hydra does not explain."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from vla_algos.run.renamed import RENAMED
from vla_common.errors import unknown_name
from vla_common.registry import config_packages

_OVERRIDE = re.compile(r"(?P<prefix>\+{0,2}|~)(?P<name>[\w./@$][\w./@$:-]*)(?P<rest>=.*)?", re.DOTALL)
_FLAGS = {"-h", "-r", "-m", "-sc", "--help", "--hydra-help", "--version", "--resolve", "--run", "--multirun"}
_FLAGS |= {"--shell-completion"}
_FLAGS_WITH_VALUE = {"-c", "-p", "-cp", "-cn", "-cd", "-i", "--cfg", "--package", "--config-path", "--config-name"}
_FLAGS_WITH_VALUE |= {"--config-dir", "--experimental-rerun", "--info"}


class PluginSearchPath(SearchPathPlugin):
    """Puts configuration groups of installed packages on Hydra's search path (``vla_torchrl.configs``)."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them after the recipe's own."""
        for package in config_packages():
            search_path.append("vla-torchrl", f"pkg://{package}")


Plugins.instance().register(PluginSearchPath)


def translate_arguments(recipe: str) -> None:
    """Replace earlier names of settings in ``sys.argv``, with a line that says so.

    Ends the program, with one line, at what is no setting at all and at an experiment of another recipe.

    Args:
        recipe: name of the recipe that is about to run; its ``conf`` is beside the program.
    """
    try:
        arguments = translated(sys.argv[1:])
        conf = Path(sys.argv[0]).resolve().parent / "conf"
        check_experiment(recipe, arguments, conf / "experiment")
        check_composition(recipe, arguments, conf)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.argv[1:] = arguments


def translated(arguments: Sequence[str]) -> list[str]:
    """Replace earlier names of settings by today's.

    Raises:
        ValueError: an argument that is neither a setting nor a flag.
    """
    found = []
    for index, argument in enumerate(arguments):
        flag = argument.partition("=")[0]
        if flag in _FLAGS or flag in _FLAGS_WITH_VALUE or (index and arguments[index - 1] in _FLAGS_WITH_VALUE):
            found.append(argument)
            continue
        match = _OVERRIDE.fullmatch(argument)
        if match is None or (match["rest"] is None and match["prefix"] != "~"):
            name = argument.lstrip("-").partition("=")[0]
            raise ValueError(f"{argument!r} is no setting; type name=value, such as {name or 'seed'}=1")
        old = f"{match['name']}{match['rest']}" if f"{match['name']}{match['rest']}" in RENAMED else match["name"]
        if old in RENAMED:
            print(
                f"warning: {old} is called {RENAMED[old]} now; the old name goes with the next version", file=sys.stderr
            )
            new = RENAMED[old] if "=" in old else f"{RENAMED[old]}{match['rest'] or ''}"
            argument = f"{match['prefix']}{new}"
        found.append(argument)
    return found


def check_experiment(recipe: str, arguments: Sequence[str], folder: Path) -> None:
    """Refuse an experiment of ours that was written for another recipe.

    Raises:
        ValueError: says which recipe it is for.
    """
    chosen = [argument.partition("=")[2] for argument in arguments if re.match(r"\+?experiment=", argument)]
    known = {file.stem: file for file in folder.glob("*.yaml")}
    for name in chosen:
        if name in ("", "null") or "," in name:
            continue
        if name not in known:
            continue  # in another folder, perhaps: whoever composes the configuration says
        written_for = (yaml.safe_load(known[name].read_text()) or {}).get("recipe", recipe)
        if written_for != recipe:
            raise ValueError(
                f"experiment={name} is for {written_for}.py; type: python recipes/{written_for}.py experiment={name}"
            )


def check_composition(recipe: str, arguments: Sequence[str], conf: Path) -> None:
    """Compose the configuration as Hydra is about to, and explain in one line what it would not.

    Sweeps and other folders than ``conf`` are left to Hydra.

    Raises:
        ValueError: a setting or a file that does not exist; offers the nearest names.
    """
    if not arguments or not conf.is_dir() or any(argument.startswith("-") for argument in arguments):
        return
    try:
        _compose(recipe, arguments, conf)
    except (ConfigCompositionException, MissingConfigException, OverrideParseException) as error:
        text = str(error)
        if missing := re.search(r"Could not find '(?:(.+)/)?(.+?)'", text):
            group, name = missing[1] or "configuration", missing[2]
            raise unknown_name(group, name, re.findall(r"^\t(\w+)$", text, re.MULTILINE)) from error
        if unknown := re.search(r"Could not override '(.+?)'", text):
            chosen = [argument for argument in arguments if _chooses_a_file(argument, conf)]
            known = list(_names(OmegaConf.to_container(_compose(recipe, chosen, conf))))
            raise unknown_name("setting", unknown[1], known) from error
        if twice := re.search(r"An item is already at '(.+?)'", text):
            raise ValueError(f"{twice[1]} is a setting already; type it without the +: {twice[1]}=VALUE") from error
        raise ValueError(f"{' '.join(arguments)}: {text.partition(chr(10))[0]}") from error


def _compose(recipe: str, arguments: Sequence[str], conf: Path) -> DictConfig:
    try:
        with initialize_config_dir(str(conf), version_base=None):
            return compose(recipe, overrides=list(arguments))
    finally:
        GlobalHydra.instance().clear()


def _chooses_a_file(argument: str, conf: Path) -> bool:
    name = argument.lstrip("+").partition("=")[0]
    return (conf / name).is_dir()


def _names(settings: Any, section: str = "") -> Iterator[str]:
    """Yield the names of all settings as they are typed."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield f"{section}{name}"
            yield from _names(value, f"{section}{name}.")
