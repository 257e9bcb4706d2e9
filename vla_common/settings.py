"""Settings as keyword arguments of one callable, whose annotations say what each may be.

A range stands where the parameter stands::

    def gae(batch, gamma: Fraction = 0.99, lmbda: Fraction = 0.95, ...)

and :func:`check_settings` refuses ``gae.gamma=1.5`` by that name before any work begins.
"""

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema

from vla_common.errors import nearest_names, unknown_name

# A million is more than anything here is counted in or multiplied by: what is larger is a slip.
Count = Annotated[int, Ge(1), Le(1_000_000)]  # 1, 2, ...
Whole = Annotated[int, Ge(0), Le(1_000_000)]  # 0, 1, 2, ...
Seed = Annotated[int, Ge(0), Lt(2**32)]  # what numpy takes
Pixels = Annotated[int, Ge(16), Le(4096)]  # of a side of an image
Length = Annotated[int, Ge(1), Le(1000)]  # of a chunk of actions, steps of a flow: what is computed at once
Width = Annotated[int, Ge(1), Le(4096)]  # of a layer
Positive = Annotated[float, Gt(0), Le(1e6)]
NonNegative = Annotated[float, Ge(0), Le(1e6)]
Factor = Annotated[float, Ge(0), Le(1000)]  # of a loss, a reward or a noise; 0 is off
Fraction = Annotated[float, Ge(0), Le(1)]  # 0 to 1, both included
BelowOne = Annotated[float, Ge(0), Lt(1)]  # 0 included, 1 not
Rate = Annotated[float, Gt(0), Lt(1)]  # of learning: 0 would learn nothing and say nothing

_LONGEST_TEXT = 4096  # characters, as of a path
_SHOWN = 120  # characters of a value in a message
_adapters: dict[str, TypeAdapter[Any] | None] = {}  # by the text of an annotation: not every one has a hash
_BOOLEANS = {"true": "yes on y t always 1", "false": "no off n f none never 0"}
P = ParamSpec("P")
R = TypeVar("R")


def setting_types(
    function: Callable[..., Any], without: Iterable[str] = (), only: Iterable[str] | None = None
) -> dict[str, Any]:
    """List names and annotations of the parameters of a function, or of the constructor of a class.

    Args:
        function: its parameters with a name are the settings. A constructor with ``**options`` passes them on to that
            of the next class in line, whose parameters are settings too then; the ``**options`` of a function are none.
        without: parameters that are no settings.
        only: the parameters that are settings, where these are fewer.
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found: dict[str, Any] = {}
    for each in _passed_on(function):
        scope = getattr(inspect.unwrap(each), "__globals__", {})
        parameters = list(inspect.signature(each).parameters.values())
        for parameter in parameters[1:] if inspect.isclass(function) else parameters:  # without self
            if parameter.kind in named:
                found.setdefault(parameter.name, _evaluated(parameter.annotation, scope))
    chosen = (found.keys() if only is None else set(only)) - set(without)
    return {name: hint for name, hint in found.items() if name in chosen}


def _passed_on(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield a function; of a class its constructor, and the next one in line as long as ``**options`` are passed on."""
    if not inspect.isclass(function):
        yield function
        return
    constructors = (vars(each)["__init__"] for each in function.__mro__ if "__init__" in vars(each))
    for constructor in constructors:
        yield constructor
        kinds = {each.kind for each in inspect.signature(constructor).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return


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
    """Refuse settings that are not read, of a wrong type or out of range; the ``ValueError`` says what would be right.

    ``section`` stands before the dot on the command line, empty for the outermost; ``settings`` are plain values,
    lists and mappings, as a configuration has them; ``types`` are their annotations, from :func:`setting_types`.
    """
    typed = f"{section}." if section else ""
    for name in settings:
        if name not in types:
            raise unknown_name("setting", f"{typed}{name}", [f"{typed}{other}" for other in sorted(types)])
    for name, value in settings.items():
        if problem := _problem(types[name], value):
            raise ValueError(f"{typed}{name}={_shown(value)}: {problem}")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function, or a constructor, refuse arguments that its annotations do not allow (``ValueError``).

    Only numbers, texts and lists of them are looked at. It costs about ten microseconds an argument: not for what is
    called for every decision. An unknown argument is a ``TypeError`` with the nearest names.
    """
    signature = inspect.signature(function)
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in signature.parameters and not takes_any:
                known = [each for each in signature.parameters if each != "self"]
                raise TypeError(str(unknown_name(f"argument of {function.__qualname__}", name, known)))
        types = _types_of(function)
        given = signature.bind_partial(*args, **kwargs).arguments  # what is missing, Python says
        check_settings("", {name: value for name, value in given.items() if name in types}, types)
        return function(*args, **kwargs)

    return call


@cache
def _types_of(function: Callable[..., Any]) -> dict[str, Any]:
    types = setting_types(function, without=["self"])
    return {name: hint for name, hint in types.items() if hint is not Any and _is_plain(_adapter(hint))}


def _is_plain(adapter: TypeAdapter[Any] | None) -> bool:
    """Tell whether an annotation is of numbers, texts and lists of them, with no class of ours in it."""
    try:
        return adapter is not None and "$defs" not in adapter.json_schema()
    except PydanticInvalidForJsonSchema:  # a function
        return False


def check_fields(config: Any) -> None:
    """Refuse values that the annotations of a dataclass do not allow: its ``__post_init__`` calls it."""
    check_settings("", vars(config), get_type_hints(type(config), include_extras=True))


def _problem(annotation: Any, value: Any) -> str | None:
    adapter = _adapter(annotation)
    if adapter is None:
        return None
    try:
        text = json.dumps(value, default=lambda number: number.item())  # of numpy and torch
    except (TypeError, ValueError, AttributeError, RuntimeError, RecursionError):
        return None  # not from a configuration
    try:
        # JSON's lists are tuples too, and 1 is a number with a fraction.
        read = adapter.validate_json(text, strict=True)
    except ValidationError as error:
        messages = dict.fromkeys(_message(entry) for entry in _telling(error, value))
        joined = ("; " if isinstance(value, (list, tuple)) else " or ").join(messages)
        return joined.replace(" or must be ", " or ") + _nearest(annotation, value)
    return next(_slips(json.loads(text), read), None)


def _telling(error: ValidationError, value: Any) -> list[Mapping[str, Any]]:
    """List what is wrong; of a list that could also be a number, only what is wrong with the list."""
    entries: list[Mapping[str, Any]] = list(error.errors(include_url=False))
    if isinstance(value, (list, tuple)):
        return [each for each in entries if each["input"] != list(value) or "type" not in each["type"]] or entries
    return entries


def _slips(typed: Any, read: Any) -> Iterator[str]:
    """Find texts that were not meant: empty ones, ``???``, very long ones."""
    if isinstance(typed, str):
        if typed == "???":
            yield "is missing; write a value"
        elif not typed.strip():
            yield "must not be empty"
        elif len(typed) > _LONGEST_TEXT:
            yield f"must have at most {_LONGEST_TEXT} characters, not {len(typed)}"
        elif any(ord(character) < 32 and character not in "\t\n" for character in typed):
            yield "must not have control characters"
    elif isinstance(typed, list) and isinstance(read, (list, tuple)):
        for place, (each, found) in enumerate(zip(typed, read, strict=True)):
            yield from (f"entry {place}: {problem}" for problem in _slips(each, found))
    elif isinstance(typed, dict) and isinstance(read, Mapping):
        for name, each in typed.items():
            yield from (f"{name}: {problem}" for problem in _slips(each, read.get(name)))


def _nearest(annotation: Any, value: Any) -> str:
    choices = [annotation, *get_args(annotation)]  # of Literal["a", "b"], also within a union with None
    names = [name for choice in choices for name in get_args(choice) if isinstance(name, str)]
    near = nearest_names(value, names) if isinstance(value, str) else []
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _message(entry: Mapping[str, Any]) -> str:
    where = "".join(f"entry {place}: " for place in entry["loc"] if isinstance(place, int))
    kind, value, limits = entry["type"], entry["input"], entry.get("ctx", {})
    if kind == "missing":
        return where.removesuffix(": ") + " is missing"
    if kind == "too_long":
        return f"{where}must have {limits['max_length']} entries, not {len(value)}"
    message = str(entry["msg"]).replace("Input should be", "must be").replace("None", "null")
    message = message.replace("a valid array", "a list")
    message = where + message[:1].lower() + message[1:]
    if kind == "bool_type":
        word = "" if value is None else str(value).lower()
        meant = next((name for name, words in _BOOLEANS.items() if word in [name, *words.split()]), None)
        return message + (f"; write {meant}" if meant else ": true or false")
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():  # 4e0
        return f"{message}; write {int(value)}"
    if limits.get("le") == 1 and 10 <= value <= 100:  # percent
        return f"{message}; did you mean {value / 100:g}?"
    return message


def _shown(value: Any) -> str:
    shown = json.dumps(value, default=repr)
    if isinstance(value, str) and value.strip() and value.isprintable():
        try:
            json.loads(value)  # the text "4" is not the number 4
        except ValueError:
            shown = value
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    """Make what checks values of an annotation; ``None`` for one that no configuration can hold, such as a tensor."""
    if (text := repr(annotation)) not in _adapters:
        made: TypeAdapter[Any] | None = None
        with contextlib.suppress(PydanticSchemaGenerationError):
            try:
                made = TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))
            except Exception:  # a class of ours has a configuration of its own
                made = TypeAdapter(annotation)
        _adapters[text] = made
    return _adapters[text]
