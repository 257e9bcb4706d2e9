"""The keys of a file of RLinf: what reads one is noted, so that in the end each is accounted for."""

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vla_common.plain import read_yaml
from vla_from_rlinf.reading import Configuration, unresolved

T = TypeVar("T")
DIFFERS, NONE, NOTHING, SAME, UNKNOWN = "differs", "no counterpart", "does nothing", "the same", "not known"
_FEW = 3  # keys that a pattern stands for and that are printed one by one
_UNKNOWN = "in none of RLinf's files for these benchmarks and models at commit a3816b596; look whether you need it"


class Remark(NamedTuple):
    """Why ``keys`` are not translated, or not to the letter.

    ``kind`` is one of the constants of this module; ``shown`` is printed instead of the keys where they are many, such
    as ``weight_syncer.*``.
    """

    kind: str
    keys: tuple[str, ...]
    text: str
    shown: str = ""


class Keys:
    """What a file says, by key, and what has become of it.

    Attributes:
        values: each key of the file, by its whole name, with its value.
        settings: ours, by the name that is typed.
        used: by key of the file, the settings of ours that come of it.
        remarks: on what was not translated, or not to the letter.
    """

    def __init__(self, configuration: Configuration):
        self.configuration, self.values = configuration, configuration.values
        self.settings: dict[str, Any] = {}
        self.used: dict[str, list[str]] = {}
        self.remarks: list[Remark] = []
        self._reading: list[str] = []

    # ---- reading

    def has(self, key: str) -> bool:
        """Tell whether the file has a value for a key that is not ``null``."""
        return self.values.get(key) is not None

    def get(self, key: str, default: Any = ...) -> Any:
        """Return the value of a key, or what RLinf takes where it is left out.

        ValueError: it is left out and RLinf has no default, or it is an interpolation that is not followed.
        """
        if key in self.values:
            self._reading.append(key)
            value = self.values[key]
            if unresolved(value):
                raise self.error(key, "only references to other keys of the file are followed; write the value there")
            return value
        if default is ...:
            raise ValueError(f"{self.configuration.path}: has no {key}, which RLinf needs; write it there")
        return default

    def number(self, key: str, default: Any = ...) -> float:
        """Return a number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(key, "should be a number")
        return value

    def real(self, key: str, default: Any = ...) -> float:
        """Return a number as one with a point."""
        return float(self.number(key, default))

    def whole(self, key: str, default: Any = ..., least: int = 1) -> int:
        """Return a whole number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"should be a whole number from {least} on")
        return value

    def flag(self, key: str, default: Any = ...) -> bool:
        """Return a truth value; ``null`` is false, as in RLinf."""
        value = self.get(key, default)
        if not isinstance(value, (bool, type(None))):
            raise self.error(key, "should be True or False")
        return bool(value)

    def text(self, key: str, default: Any = ...) -> str:
        """Return a text."""
        value = self.get(key, default)
        if not isinstance(value, str) or not value.isprintable():
            raise self.error(key, "should be a text of one line")
        return value

    def choice(self, key: str, choices: Mapping[Any, T] | Sequence[T], default: Any = ...) -> T:
        """Return what one of several values stands for; in a sequence, each for itself."""
        value = self.get(key, default)
        known = choices if isinstance(choices, Mapping) else {each: each for each in choices}
        if not isinstance(value, (str, int, float, type(None))) or value not in known:
            raise self.error(key, f"is not known here; known are {', '.join(map(str, known))}")
        return known[value]

    def error(self, key: str, problem: str) -> ValueError:
        """Make an error about the value of a key."""
        value = str(self.values.get(key))
        shown = value if len(value) <= 80 else f"{value[:80]}..."
        return ValueError(f"{self.configuration.path}: {key}={shown}: {problem}")

    # ---- accounting

    def put(self, setting: str, read: Callable[..., Any], *arguments: Any) -> None:
        """Set one of ours to what ``read(*arguments)`` makes of keys; those that it reads have become it."""
        self._reading = []
        self.settings[setting] = read(*arguments)
        for key in self._reading:
            self.account(key, setting)

    def account(self, key: str, setting: str) -> None:
        """Note that a key, and the keys that its value refers to, have become a setting of ours."""
        for each in (key, *sorted(self.configuration.refers.get(key, ()))):
            if setting not in self.used.setdefault(each, []):
                self.used[each].append(setting)

    def remark(self, kind: str, keys: Sequence[str], text: str, shown: str = "") -> None:
        """Note why keys are not translated, or not to the letter; those that the file does not have are left out."""
        if found := tuple(dict.fromkeys(key for key in keys if key in self.values)):
            self.remarks.append(Remark(kind, found, text, shown))

    def account_for_the_rest(self) -> None:
        """Say why nothing was made of the other keys: the first pattern of ``untranslated.yaml`` that fits counts."""
        reasons = {"": (UNKNOWN, _UNKNOWN), **read_yaml(Path(__file__).with_name("untranslated.yaml"))}
        remarked = {key for remark in self.remarks for key in remark.keys}
        found: dict[str, list[str]] = {}
        for key in self.values:
            if key not in self.used and key not in remarked:
                pattern = next((pattern for pattern in reasons if fnmatchcase(key, pattern)), "")
                found.setdefault(pattern, []).append(key)
        for pattern, of_pattern in found.items():
            kind, text = reasons[pattern]
            many = pattern.endswith("*") and len(of_pattern) > _FEW
            self.remark(kind, of_pattern, text, f"{pattern} ({len(of_pattern)} keys)" if many else "")
