"""Settings as keyword arguments of one callable, whose annotations say what each may be.

A range stands where the parameter stands::

    def gae(batch, gamma: Fraction = 0.99, lmbda: Fraction = 0.95, ...)

and :func:`check_settings` refuses ``gae.gamma=1.5`` by that name before any work begins.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Annotated, Any, get_args

from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from vla_common.errors import nearest_names, unknown_name

Count = Annotated[int, Ge(1)]  # 1, 2, ...
Whole = Annotated[int, Ge(0)]  # 0, 1, 2, ...
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]  # 0 to 1, both included


def setting_types(
    function: Callable[..., Any], without: Iterable[str] = (), only: Iterable[str] | None = None
) -> dict[str, Any]:
    """List names and annotations of the parameters of a function, or of the constructor of a class.

    Args:
        function: its parameters with a name are the settings; ``**options`` are not.
        without: parameters that are no settings.
        only: the parameters that are settings, where these are fewer.

    Returns:
        The annotation of each; ``Any`` where there is none.
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    settings = [each for each in parameters if each.kind in named and each.name not in set(without)]
    scope = getattr(inspect.unwrap(function.__init__ if inspect.isclass(function) else function), "__globals__", {})
    chosen = {each.name for each in settings} if only is None else set(only)
    return {each.name: _evaluated(each.annotation, scope) for each in settings if each.name in chosen}


def _evaluated(annotation: Any, scope: Mapping[str, Any]) -> Any:
    """Evaluate an annotation of installed code as ``typing`` does; ``Any`` where only a type checker can."""
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(scope))
    except NameError:
        return Any


def check_settings(section: str, settings: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Refuse settings that nobody reads, of a wrong type or out of range.

    Args:
        section: what stands before the dot on the command line; empty for the outermost.
        settings: plain values, lists and mappings, as a configuration has them.
        types: annotation of each setting, from :func:`setting_types`.

    Raises:
        ValueError: names the setting as it is typed, what is wrong and what would be right.
    """
    typed = f"{section}." if section else ""
    for name in settings:
        if name not in types:
            raise unknown_name("setting", f"{typed}{name}", [f"{typed}{other}" for other in sorted(types)])
    for name, value in settings.items():
        if problem := _problem(types[name], value):
            raise ValueError(f"{typed}{name}={_shown(value)}: {problem}")


def _problem(annotation: Any, value: Any) -> str | None:
    adapter = _adapter(_Hashed(annotation))
    if adapter is None:
        return None
    try:
        text = json.dumps(value, default=lambda number: number.item())  # of numpy and torch
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return None  # not from a configuration
    try:
        adapter.validate_json(text, strict=True)  # JSON's lists are lists and tuples, and 1 is a number with a fraction
    except ValidationError as error:
        messages = dict.fromkeys(_message(entry) for entry in error.errors(include_url=False))
        return " or ".join(messages) + _nearest(annotation, value)
    return None


def _nearest(annotation: Any, value: Any) -> str:
    """Find the nearest of the names that a ``Literal`` has."""
    choices = [annotation, *get_args(annotation)]  # of Literal["a", "b"], also within a union with None
    names = [name for choice in choices for name in get_args(choice) if isinstance(name, str)]
    if not isinstance(value, str):
        return ""
    near = nearest_names(value, names)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _message(entry: Mapping[str, Any]) -> str:
    where = "".join(f"entry {place}: " for place in entry["loc"] if isinstance(place, int))
    if entry["type"] == "missing":
        return where.removesuffix(": ") + " is missing"
    message = str(entry["msg"]).replace("Input should be", "must be").replace("None", "null")
    return where + message[:1].lower() + message[1:]


def _shown(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value, default=repr)
    try:
        json.loads(value)
    except ValueError:
        return value
    return json.dumps(value)  # the text "4" is not the number 4


class _Hashed:
    """An annotation by identity: lists in ``Annotated`` have no hash."""

    def __init__(self, annotation: Any):
        self.annotation = annotation

    def __hash__(self) -> int:
        return hash(repr(self.annotation))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and repr(other.annotation) == repr(self.annotation)


@cache
def _adapter(hashed: _Hashed) -> TypeAdapter[Any] | None:
    """Make what checks values of an annotation; ``None`` for one that no configuration can hold, such as a tensor."""
    try:
        return TypeAdapter(hashed.annotation, config=ConfigDict(allow_inf_nan=False))
    except PydanticSchemaGenerationError:
        return None
    except Exception:  # a class of ours has a configuration of its own
        try:
            return TypeAdapter(hashed.annotation)
        except PydanticSchemaGenerationError:
            return None
