"""What is typed after ``python recipes/ppo.py``: earlier names of settings, mistakes that Hydra does not explain."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig

from vla_algos.run.renamed import RENAMED
from vla_common.program import one_line
from vla_common.registry import benchmarks
from vla_common.search_path import search_packages

_OVERRIDE = re.compile(r"(?P<prefix>\+{0,2}|~)(?P<name>[\w./@$][\w./@$:-]*)(?P<rest>=.*)?", re.DOTALL)
_FLAGS = {"-h", "-r", "-m", "-sc", "--help", "--hydra-help", "--version", "--resolve", "--run", "--multirun"}
_FLAGS |= {"--shell-completion"}
_FLAGS_WITH_VALUE = {"-c", "-p", "-cp", "-cn", "-cd", "-i", "--cfg", "--package", "--config-path", "--config-name"}
_FLAGS_WITH_VALUE |= {"--config-dir", "--experimental-rerun", "--info"}
_EVALUATED = re.compile(r"eval\.env(\.[\w.]+)?=.*", re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*|[0-9]+-[0-9]+")  # a text that Hydra reads as one without quotes
_WORDS = ("true", "false", "null", "inf", "nan")
_SUITE = re.compile(r"env=([a-z]\w*)/[\w./+-]+")
_MOST_COMBINATIONS = 200  # of a sweep that are looked at before the first begins

search_packages()


def read_arguments(recipe: str, arguments: Sequence[str], conf: Path) -> list[str]:
    """Check what was typed as far as it can be without composing it, and translate earlier names of settings.

    Args:
        recipe: name of the recipe that is about to run.
        arguments: what was typed.
        conf: folder of its configuration.

    Raises:
        ValueError: what is no setting at all, and an experiment of another recipe that trains.
    """
    found = translated(arguments)
    flags = read_flags(found)
    if flags.experimental_rerun is not None:
        raise ValueError(
            "--experimental-rerun reads a pickle, which may run any code; type the settings of that run again, they "
            "are in its folder: config.yaml, and run.json has what was typed"
        )
    if flags.config_dir is not None and not Path(flags.config_dir).is_dir():
        raise ValueError(f"--config-dir {flags.config_dir}: there is no such folder; type one with groups such as env/")
    check_experiment(recipe, flags.overrides, conf / "experiment")
    for argument in flags.overrides:
        name, equals, value = argument.lstrip("+").partition("=")
        if equals and not value:
            raise ValueError(
                f"{name}= is empty; type a value, {name}=null for none, or leave it out (was it a variable of the "
                "shell that is not set?)"
            )
        if name in ("hydra.run.dir", "hydra.sweep.dir"):
            _check_folder(name, value.strip("'\""), flags.multirun)
    return found


def translated(arguments: Sequence[str]) -> list[str]:
    """Replace earlier names of settings by today's, with a line that says so.

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
            example = f"{name}=1" if re.fullmatch(r"[A-Za-z][\w.]*", name) else "seed=1"
            raise ValueError(f"{argument!r} is no setting; type name=value, such as {example}")
        old = f"{match['name']}{match['rest']}" if f"{match['name']}{match['rest']}" in RENAMED else match["name"]
        if old in RENAMED:
            print(
                f"warning: {old} is called {RENAMED[old]} now; the old name goes with the next version", file=sys.stderr
            )
            new = RENAMED[old] if "=" in old else f"{RENAMED[old]}{match['rest'] or ''}"
            argument = f"{match['prefix']}{new}"
        found.append(placed(argument))
    return found


def placed(argument: str) -> str:
    """Return what Hydra is told of ``eval.env=NAME``, a file of the group ``env``, and ``eval.env.SETTING=VALUE``.

    Raises:
        ValueError: the name of a suite in place of a file's.
    """
    if (match := _SUITE.fullmatch(argument)) and match[1] in benchmarks:
        raise ValueError(
            f"{argument}: is the name of a suite, not of a file; type env={match[1]} env.id={match[0][4:]}"
        )
    if not (match := _EVALUATED.fullmatch(argument)):
        return argument
    if match[1]:  # no file has what only evaluations have otherwise
        return f"++{argument}"
    name = argument.partition("=")[2]
    if re.fullmatch(r"[\w.+-]+/[\w./+-]+", name):
        raise ValueError(f"{argument}: is the name of a suite, not of a file; type eval.env.id={name}")
    return f"+env@{argument}" if re.fullmatch(r"[\w,-]+", name) and name != "null" else argument


def check_experiment(recipe: str, arguments: Sequence[str], folder: Path) -> None:
    """Refuse an experiment, or an ``algo``, of ours that was written for another recipe.

    Raises:
        ValueError: says which recipe it is for.
    """
    chosen = [argument.partition("=")[2] for argument in arguments if re.match(r"\+?experiment=", argument)]
    known = {file.stem: file for file in folder.glob("*.yaml")}
    for algorithm in (argument.removeprefix("algo=") for argument in arguments if argument.startswith("algo=")):
        other = algorithm.partition("_")[0]
        if other != recipe and (folder.parent / f"{other}.yaml").is_file():
            raise ValueError(f"algo={algorithm} is for {other}.py; type: python recipes/{other}.py algo={algorithm}")
    for name in chosen:
        if name not in known:
            continue  # none, several, or in another folder: whoever composes the configuration says
        written_for = (yaml.safe_load(known[name].read_text()) or {}).get("recipe", recipe)
        if written_for != recipe and recipe != "evaluate":  # which takes its environment: as_trained
            raise ValueError(
                f"experiment={name} is for {written_for}.py; type: python recipes/{written_for}.py experiment={name}"
            )


def combinations(recipe: str, arguments: Sequence[str], conf: Path) -> Iterator[tuple[list[str], DictConfig]]:
    """Yield what is typed for each run of a sweep of Hydra's own sweeper, and its configuration.

    Nothing where there is no sweep, or one that is not known before it runs.
    """
    flags = read_flags(arguments)
    elsewhere = flags.config_dir or flags.config_path or flags.config_name
    if not flags.multirun or elsewhere or any(re.match(r"\+*hydra[/.](sweeper|launcher)", a) for a in flags.overrides):
        return
    choices = []
    for override in OverridesParser.create().parse_overrides(flags.overrides):
        if override.is_sweep_override() and ("glob(" in str(override.input_line) or not override.is_discrete_sweep()):
            return
        each = override.sweep_string_iterator() if override.is_sweep_override() else None
        prefix = override.get_key_element()
        choices.append([f"{prefix}={value}" for value in each] if each else [str(override.input_line)])
    for typed in itertools.islice(itertools.product(*choices), _MOST_COMBINATIONS):
        yield list(typed), compose_settings(recipe, typed, conf)


def read_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Read Hydra's own flags; the settings are ``overrides``.

    Raises:
        ValueError: a flag that there is not, or without its value.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{one_line(message)}; python recipes/NAME.py --hydra-help lists the flags")

    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args(list(arguments))


def as_typed(value: Any) -> str:
    """Return how a value is typed on Hydra's command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{as_typed(each)}' for name, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _WORDS):
        return QuotedString(text=value, quote=Quote.single).with_quotes()
    return str(value)


def _check_folder(name: str, value: str, sweep: bool) -> None:
    if sweep != (name == "hydra.sweep.dir"):
        other = {"hydra.run.dir": "hydra.sweep.dir", "hydra.sweep.dir": "hydra.run.dir"}[name]
        raise ValueError(f"{name} is for runs {'without' if sweep else 'with'} -m; type {other}={value}")
    if value == "null":
        raise ValueError(f"{name}={value}: is no folder; type {name}=runs/mine, or leave it out")
    folder = Path(value)
    if "${" not in value and next((each for each in (folder, *folder.parents) if each.exists()), folder).is_file():
        raise ValueError(f"{name}={value}: is a file, or in one; type another folder: {name}=runs/mine")


def compose_settings(recipe: str, arguments: Sequence[str], conf: Path) -> DictConfig:
    """Compose the configuration of a recipe."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), version_base=None):
            return compose(recipe, overrides=[placed(each) for each in arguments])
    finally:
        GlobalHydra.instance().clear()
