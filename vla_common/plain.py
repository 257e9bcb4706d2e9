"""JSON and YAML from elsewhere, as plain data: nothing in it is executed, imported or resolved.

What comes back is numbers, texts, truth values, ``None``, and lists and dicts of them; ``${...}`` is a text like any
other. Size and depth are bounded, and an alias in YAML, of which a few lines stand for millions, is refused.
"""

import json
from pathlib import Path
from typing import Any, ClassVar

import yaml

_LARGEST_JSON, _LARGEST_YAML = 100_000_000, 50_000  # bytes, which are read in seconds
_DEEPEST = 100  # lists within lists: code that walks them calls itself for each, and Python allows a thousand calls
_TOO_DEEP = f"more than {_DEEPEST} lists or objects within each other"
_TAGS = [f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")]


def read_json(file: Path, kind: type = dict) -> Any:
    """Read a file of JSON, which has an object in it, or another ``kind`` of value.

    OSError: it is not there, or cannot be read. ValueError: no JSON of that kind, or too large or deep; names the file.
    """
    try:
        content = parse_json(read_small(file, _LARGEST_JSON))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); copy it again") from error
    if not isinstance(content, kind):
        raise ValueError(f"{file} must be a JSON {'object' if kind is dict else kind.__name__}; copy it again")
    return content


def parse_json(text: str | bytes) -> Any:
    """Read JSON; ``ValueError`` if it is none, or too deep."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    level = [content]
    for _ in range(_DEEPEST):
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        if not (level := [each for some in inside for each in some if isinstance(each, (dict, list))]):
            return content
    raise ValueError(_TOO_DEEP)


def read_yaml(file: Path) -> Any:
    """Read a file of YAML; ``ValueError`` if it is none, has aliases or tags, or is too large or deep."""
    try:
        return yaml.load(read_small(file, _LARGEST_YAML), Loader=_Loader)
    except (ValueError, yaml.YAMLError, KeyError, IndexError) as error:  # !!bool maybe, !!int ''
        raise ValueError(f"{file} is no YAML that can be read safely ({' '.join(str(error).split())})") from error


class _Loader(yaml.SafeLoader):
    yaml_constructors: ClassVar = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (*_TAGS, None)}
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has aliases (*name); write out what they stand for")
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ValueError(_TOO_DEEP)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {  # 2025-01-01 is a text
    letter: [(tag, pattern) for tag, pattern in resolvers if tag in _TAGS or tag.endswith(":merge")]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_small(file: Path, largest: int = 10_000_000) -> bytes:
    """Read a file; ``ValueError`` if it has more than ``largest`` bytes, or is no file."""
    size = file.stat().st_size
    if not file.is_file():  # a pipe would never end
        raise ValueError("it is no file")
    if size > largest:
        raise ValueError(f"it has {size:,} bytes, more than {largest:,}")
    return file.read_bytes()
