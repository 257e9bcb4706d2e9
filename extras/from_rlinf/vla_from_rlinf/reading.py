"""An embodied configuration of RLinf as plain values: its groups merged as Hydra merges them, references followed.

Nothing of the file is executed: YAML as plain data, and of interpolations only references to other keys are
followed. Resolvers (``${oc.env:HOME}``) stay as they are written.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_common.plain import read_yaml

_DEEPEST = 30  # references to references
_LONGEST = 1000  # characters of a message
_LONGEST_PART = 300  # characters that a reference within a text may stand for
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
_ENTRY = re.compile(r"(?P<group>[\w./-]+)(@(?P<package>[\w.]+))?")
_REFERENCE = re.compile(r"\$\{\s*(?P<dots>\.*)(?P<path>[A-Za-z_]\w*(?:\.\w+)*)\s*\}")


@dataclass(frozen=True)
class Configuration:
    """What a file says, with the groups that it names.

    Attributes:
        path: the file.
        values: each key, by its whole name, with its value: a number, a text, a truth value, a list or ``None``.
        refers: by key, the keys that its value is taken from, as ``${algorithm.reward_coef}`` says.
    """

    path: Path
    values: dict[str, Any]
    refers: dict[str, set[str]] = field(default_factory=dict)


def read_configuration(path: Path) -> Configuration:
    """Read a file and the groups of its ``defaults``, which are looked for in its own folder.

    FileNotFoundError: there is no such file. ValueError: it is no YAML, nothing that Hydra could read, or a group is
    missing.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: there is no such file; type the path of a configuration of RLinf, such as "
            "RLinf/examples/embodiment/config/libero_10_grpo_openvlaoft.yaml"
        )
    content = _load(path)
    defaults = content.pop("defaults", [])
    merged: dict[str, Any] = {}
    entries = list(_entries(path, defaults))
    if None not in entries:  # Hydra puts what stands in the file itself last
        entries.append(None)
    for entry in entries:
        if entry is None:
            _merge(merged, content)
            continue
        group, package = entry
        file = path.parent / f"{group}.yaml"
        if not file.is_file():
            raise ValueError(
                f"{path}: {group}.yaml, which its defaults name, is not beside it; copy the file into RLinf's "
                "examples/embodiment/config"
            )
        inner = _load(file)
        if inner.pop("defaults", None):
            raise ValueError(
                f"{file}: has defaults of its own, which RLinf's groups have not; write their values into it"
            )
        for part in reversed(package.split(".")):
            inner = {part: inner}
        _merge(merged, inner)
    leaves = dict(_leaves(merged))
    refers: dict[str, set[str]] = {}
    values = {name: _followed(name, value, leaves, refers.setdefault(name, set())) for name, value in leaves.items()}
    return Configuration(path, values, {name: others for name, others in refers.items() if others})


def one_line(text: str) -> str:
    """Join the lines of a text, and cut off what is too long to be read."""
    return " ".join(text.split())[:_LONGEST]


def unresolved(value: Any) -> bool:
    """Tell whether a value still has an interpolation in it, which is not followed."""
    return "${" in str(value)


def _load(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; type one of its files: {path}/NAME.yaml")
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: has no keys; type a configuration of RLinf, with runner:, algorithm:, env:, actor:")
    return content


def _entries(path: Path, defaults: Any) -> Iterator[tuple[str, str] | None]:
    """Yield group and package of each default that has values of its own, and ``None`` for the file itself."""
    for entry in defaults if isinstance(defaults, list) else [defaults]:
        name = entry
        if isinstance(entry, dict) and len(entry) == 1:  # env@env.train: libero_10, override hydra/job_logging: stdout
            (group, chosen), *_ = entry.items()
            words = str(group).split()
            if words and words[-1].startswith("hydra/"):
                continue
            section, _, package = words[-1].partition("@") if words else ("", "", "")
            name = f"{section}/{chosen}@{package or section.replace('/', '.')}"
        if name == "_self_":
            yield None
            continue
        found = _ENTRY.fullmatch(name) if isinstance(name, str) else None
        if found is None or ".." in name or name.startswith("/"):
            raise ValueError(f"{path}: defaults has {one_line(str(entry))!r}; RLinf's are like env/libero_10@env.train")
        yield found["group"], found["package"] or found["group"].rpartition("/")[0].replace("/", ".")


def _merge(into: dict[str, Any], other: Mapping[Any, Any]) -> None:
    """Merge as OmegaConf does: sections key by key, anything else is replaced."""
    for key, value in other.items():
        name = str(key)
        if isinstance(value, dict):
            section = into.get(name)
            into[name] = dict(section) if isinstance(section, dict) else {}
            _merge(into[name], value)
        else:
            into[name] = value


def _leaves(section: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", _number(value)


def _number(value: Any) -> Any:
    """Read ``2e-5`` as Hydra does; YAML 1.1, which ``safe_load`` reads, has it as a text."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _followed(name: str, value: Any, leaves: Mapping[str, Any], refers: set[str], depth: int = 0) -> Any:
    """Replace references by what they refer to; those to nothing or to themselves, and resolvers, stay."""
    if not isinstance(value, str) or depth > _DEEPEST:
        return value

    def target(found: re.Match[str]) -> str:
        if not found["dots"]:
            return found["path"]
        section = name.split(".")[: -len(found["dots"])]  # one dot is the section that the key is in
        return ".".join([*section, found["path"]])

    def follow(other: str) -> Any:
        refers.add(other)
        return _followed(other, leaves[other], leaves, refers, depth + 1)

    def in_text(found: re.Match[str]) -> str:
        other = target(found)
        if other not in leaves or "${" in str(leaves[other]) or len(str(leaves[other])) > _LONGEST_PART:
            return found[0]
        return str(follow(other))

    whole = _REFERENCE.fullmatch(value.strip())
    if whole and target(whole) in leaves:
        return follow(target(whole))
    return _REFERENCE.sub(in_text, value)
