"""In one line, what Hydra and OmegaConf say in several, with the nearest of the settings and files that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vla_algos.run.arguments import compose_settings, read_flags
from vla_common.errors import nearest_names, unknown_name
from vla_common.program import one_line

_OF_EVALUATE = {  # settings of evaluations within a training run, and what is typed after evaluate.py instead
    "eval.temperature": "greedy=false policy.temperature={value}",
    "eval.sampled": "greedy=false for sampled actions",
    "eval.env": "env={value}",
}
_NO_NAME = "Config group override must be"  # Hydra says so with a plain ValueError


def explain(error: BaseException, recipe: str, arguments: Sequence[str], conf: Path) -> BaseException:
    """Say in one line what Hydra says in several; other errors are returned as they are.

    Args:
        error: what was raised.
        recipe: name of the recipe.
        arguments: what was typed.
        conf: folder of its configuration.
    """
    if isinstance(error, (HydraException, OmegaConfBaseException)) or _NO_NAME in str(error):
        said = _explained(error, recipe, arguments, conf)
    elif isinstance(error, ValueError) and (other := _elsewhere(str(error), recipe, arguments, conf)):
        said = other
    elif isinstance(error, TypeError) and (left_out := _left_out(str(error), arguments)):
        said = left_out
    else:
        return error
    explained = ValueError(said)
    explained.__cause__ = error
    return explained


def _explained(error: BaseException, recipe: str, arguments: Sequence[str], conf: Path) -> str:
    text = str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if not group and "primary config" in text:
            return str(unknown_name("configuration", name, [path.stem for path in conf.glob("*.yaml")]))
        options = error.options or [path.stem for path in sorted((conf / group).glob("*.yaml"))]  # none of a list
        return str(unknown_name(group or "configuration", name, [str(option) for option in options]))
    if isinstance(error, OverrideParseException):
        name, _, value = error.override.partition("=")
        quoted = f"""'{name}="{value}"'"""
        problem = next((line for line in text.splitlines() if not line.startswith("Error parsing")), text)
        return f"{error.override}: Hydra cannot read it ({problem}); a text is quoted twice: {quoted}"
    if several := re.search(r"Ambiguous value for argument '(.+?)'", text):
        name, _, value = several[1].partition("=")
        return f"{several[1]}: one run takes one value; type -m for a run with each, or {name}=[{value}] for a list"
    if unknown := re.search(r"Could not override '(.+?)'|Could not delete from config\. '(.+?)' does not exist", text):
        return _no_such_setting(unknown[1] or unknown[2], recipe, arguments, conf)
    if twice := re.search(r"An item is already at '(.+?)'", text):
        return f"{twice[1]} is a setting already; type it without the +: {twice[1]}=VALUE"
    if again := re.search(r"Multiple values for (\S+?)\.? |force-add of config groups .*: '\+\+(.+?)=", text):
        name = again[1] or again[2]
        return f"{name} is chosen already; type it without the +: {name}=NAME"
    if _NO_NAME in text:
        return next(
            filter(None, (_no_file(argument, conf) for argument in read_flags(arguments).overrides)), one_line(text)
        )
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text += f"\n{error.__cause__}"
    lines = text.splitlines() or [type(error).__name__]
    where = getattr(error, "full_key", None) or next(iter(re.findall(r"full_key: (\S+)", text)), None)
    said = one_line(
        "\n".join(line for line in lines if not re.match(r"\s*(full_key:|object_type=|reference_type=)", line))
    )
    return said if not where or where in said else f"{where}: {said}"


def _left_out(text: str, arguments: Sequence[str]) -> str | None:
    """Explain a setting without a default that was left out by ``~``."""
    missing = re.search(r"missing 1 required .*argument: '(\w+)'", text)
    typed = [argument[1:] for argument in arguments if argument.startswith("~")]
    name = next((each for each in typed if missing and each.rpartition(".")[2] == missing[1]), None)
    return f"{name} is missing; type {name}=VALUE" if name else None


def _no_file(argument: str, conf: Path) -> str | None:
    """Say that a group has no file of the name that was typed, if that is so."""
    group, _, name = argument.partition("=")
    files = sorted(file.stem for file in (conf / group).glob("*.yaml"))
    return str(unknown_name(group, name, files)) if files and name not in files else None


def _elsewhere(text: str, recipe: str, arguments: Sequence[str], conf: Path) -> str | None:
    """Explain settings that are nobody's here, and why."""
    if recipe == "evaluate" and "unknown setting 'eval.env'" in text:
        return _of_evaluate("eval.env", arguments)
    return _of_another_file(text, arguments, conf)


def _of_another_file(text: str, arguments: Sequence[str], conf: Path) -> str | None:
    """Explain settings of a file that the user did not type: ``env.id`` of another benchmark, another family."""
    unknown = re.search(r"unknown setting '((env|policy)\.\w+)'", text)
    typed = dict(argument.lstrip("+").split("=", 1) for argument in arguments if "=" in argument)
    if unknown is None or unknown[1] in typed:
        return None
    section = unknown[2]
    setting = {"env": "env.id", "policy": "policy.family"}[section]
    file = typed.get(setting, "").partition("/")[0]
    if not (conf / section / f"{file}.yaml").is_file() or typed.get(section) == file:
        return None
    return (
        f"{setting}={typed[setting]}: the file {section}={typed.get(section, 'of the recipe')} has settings of another "
        f"{'benchmark' if section == 'env' else 'family'}, such as {unknown[1]}; type {section}={file} "
        f"{setting}={typed[setting]}"
    )


def _no_such_setting(name: str, recipe: str, arguments: Sequence[str], conf: Path) -> str:
    if whole := next((argument for argument in arguments if argument.startswith((f"{name}={{", f"{name}=["))), None):
        return f"{whole}: is a section; type its settings one by one: {name}.NAME=VALUE"
    if other := next((each for each in _choosing(name, conf) if each != recipe), None):
        return _of_recipe(other, name, recipe)
    if recipe == "evaluate" and (said := _of_evaluate(name, arguments)):
        return said
    known = sorted(_known(recipe, arguments, conf), key=lambda each: each.count("."))
    groups = [group.name for group in sorted(conf.iterdir()) if recipe in _choosing(group.name, conf)]
    section = name.partition(".")[0]
    elsewhere = {  # settings that come with another file of the group
        f"{place}.{setting}": file.stem
        for file in sorted((conf / section).glob("*.yaml"), reverse=True)  # of several, the first is named
        if section in known  # otherwise the recipe takes no file of it
        for place in [_place(file, section)]
        for setting in yaml.safe_load(file.read_text()) or {}
        if f"{place}.{setting}" not in known and setting != "defaults"
    }
    nearest = next(iter(nearest_names(name, [*known, *elsewhere])), None)
    if nearest in elsewhere:
        choice = f"{section}={elsewhere[nearest]}"
        return f"unknown setting {name!r}; {choice} has {nearest}: type {choice} {nearest}=VALUE"
    for other in sorted(path.stem for path in conf.glob("*.yaml") if path.stem != recipe):
        if name not in elsewhere and name in _names(OmegaConf.to_container(compose_settings(other, [], conf))):
            return _of_recipe(other, name, recipe)
    return str(unknown_name("setting", name, known if "." in name else dict.fromkeys([*known, *groups])))


def _of_recipe(other: str, name: str, recipe: str) -> str:
    """Say that a setting is another recipe's."""
    advice = (
        f"; leave it out, or run {other}.py with it" if recipe != "evaluate" else ", which learns nothing; leave it out"
    )
    return f"{name} is a setting of {other}.py, not of {recipe}.py{advice}"


def _of_evaluate(name: str, arguments: Sequence[str]) -> str | None:
    """Say what is typed after ``evaluate.py`` in place of a setting that only evaluations of a training run have."""
    for argument in arguments:
        typed, _, value = argument.lstrip("+").removeprefix("env@").partition("=")
        if typed == name and name in _OF_EVALUATE:
            instead = _OF_EVALUATE[name].format(value=value)
        elif name == "eval.env" and typed.startswith("eval.env."):
            instead = f"{typed.removeprefix('eval.')}={value}"
        else:
            continue
        return f"{typed} is of evaluations in a training run; type {instead}"
    return None


def _choosing(group: str, conf: Path) -> Iterator[str]:
    """Yield the recipes that choose a file of a group."""
    for file in sorted(conf.glob("*.yaml")) if group and (conf / group).is_dir() else ():
        defaults = (yaml.safe_load(file.read_text()) or {}).get("defaults", [])
        if any(isinstance(each, dict) and group in each for each in defaults):
            yield file.stem


def _place(file: Path, section: str) -> str:
    """Return where the settings of a file of a group come: several loggers have a section each."""
    package = re.match(rf"# @package ({section}\.\w+)", file.read_text())
    return package[1] if package else section


def _known(recipe: str, arguments: Sequence[str], conf: Path) -> list[str]:
    """List the settings that there are with the files that were chosen."""
    flags = read_flags(arguments)
    chosen = [
        f"{group}={name}"
        for group, _, name in (argument.lstrip("+").partition("=") for argument in flags.overrides)
        if (conf / group).is_dir() and not name.startswith("{" if group == "logger" else ("{", "["))
    ]
    if flags.config_dir is not None:
        chosen.append(f"hydra.searchpath=[file://{Path(flags.config_dir).resolve()}]")
    return list(_names(OmegaConf.to_container(compose_settings(recipe, chosen, conf))))


def _names(settings: Any, section: str = "") -> Iterator[str]:
    """Yield the names of all settings as they are typed."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield f"{section}{name}"
            yield from _names(value, f"{section}{name}.")
