"""The keys of a file of RLinf's: who reads one is noted, so that in the end each is accounted for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vla_algos.run.rlinf.reading import Configuration, unresolved

T = TypeVar("T")


@dataclass(frozen=True)
class Remark:
    """Why keys are not translated, or not to the letter.

    Attributes:
        kind: ``"differs"``, ``"no counterpart"``, ``"does nothing"`` (in RLinf), or ``"not known"``.
        keys: of the file.
        text: the reason.
        shown: what is printed instead of the keys where they are many, such as ``weight_syncer.*``.
    """

    kind: str
    keys: tuple[str, ...]
    text: str
    shown: str = ""


class NotGiven(Exception):
    """A key that a group has whose file is not there."""

    def __init__(self, key: str):
        super().__init__(key)
        self.key = key


class Keys:
    """What a file says, by key, and what has become of it.

    Attributes:
        settings: ours, by the name that is typed.
        used: by key of the file, the settings of ours that come of it.
        remarks: on what was not translated, or not to the letter.
        not_given: by key that would be needed, of a group whose file is not there, the settings that need it.
    """

    def __init__(self, configuration: Configuration):
        self.configuration = configuration
        self.settings: dict[str, Any] = {}
        self.used: dict[str, list[str]] = {}
        self.remarks: list[Remark] = []
        self.not_given: dict[str, list[str]] = {}
        self._reading: list[str] = []

    # ---- reading

    def has(self, key: str) -> bool:
        """Tell whether the file has a value for a key that is not ``null``."""
        return self.configuration.values.get(key) is not None

    def get(self, key: str, default: Any = ...) -> Any:
        """Return the value of a key, or what RLinf takes where it is left out.

        Raises:
            NotGiven: a group would say it, and its file is not there.
            ValueError: it is left out and RLinf has no default, or it is an interpolation that is not followed.
        """
        values = self.configuration.values
        if key in values:
            self._reading.append(key)
            if unresolved(values[key]):
                if referred := self._in_missing_group(str(values[key]).strip("${ }")):
                    raise NotGiven(referred)
                raise self.error(key, "only references to other keys of the file are followed; write the value there")
            return values[key]
        if self._in_missing_group(key):
            raise NotGiven(key)
        if default is ...:
            raise ValueError(f"{self.configuration.path}: has no {key}, which RLinf needs; write it there")
        return default

    def _in_missing_group(self, key: str) -> str:
        """Return the key if it is one that a group may have whose file is not there, else nothing."""
        missing = any(f"{key}.".startswith(f"{package}.") for package in self.configuration.missing)
        return key if missing else ""

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

    def choice(self, key: str, choices: Mapping[Any, T], default: Any = ...) -> T:
        """Return what one of several values stands for."""
        value = self.get(key, default)
        if not isinstance(value, (str, int, float, type(None))) or value not in choices:
            raise self.error(key, f"is not known here; known are {', '.join(map(str, choices))}")
        return choices[value]

    def error(self, key: str, problem: str) -> ValueError:
        """Make an error about the value of a key."""
        value = str(self.configuration.values.get(key))
        shown = value if len(value) <= 80 else f"{value[:80]}..."
        return ValueError(f"{self.configuration.path}: {key}={shown}: {problem}")

    # ---- accounting

    def put(self, setting: str, value: Callable[[], Any]) -> None:
        """Set one of ours to what is made of keys; those that ``value`` reads have become it.

        Where a key is needed that is not given, ours stays as it is.
        """
        self._reading = []
        try:
            self.settings[setting] = value()
        except NotGiven as error:
            self.not_given.setdefault(error.key, []).append(setting)
            self.remark("differs", self._reading, f"{setting} stays as it is here, as {error.key} is not given")
            return
        for key in self._reading:
            self.account(key, setting)

    def account(self, key: str, setting: str) -> None:
        """Note that a key, and whatever its value refers to, has become a setting of ours."""
        for each in (key, *sorted(self.configuration.refers.get(key, ()))):
            if setting not in self.used.setdefault(each, []):
                self.used[each].append(setting)

    def remark(self, kind: str, keys: Sequence[str], text: str, shown: str = "") -> None:
        """Note why keys are not translated, or not to the letter; those that the file does not have are left out."""
        found = tuple(dict.fromkeys(key for key in keys if key in self.configuration.values))
        if found:
            self.remarks.append(Remark(kind, found, text, shown))

    def where(self, condition: Callable[[], bool]) -> bool:
        """Tell whether a condition on keys holds; not where they are not given."""
        try:
            return condition()
        except NotGiven:
            return False
