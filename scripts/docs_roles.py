"""Extension of Griffe (mkdocs.yml): the roles in docstrings become links of the API reference.

Docstrings say ``:class:`~vla_envs.env.VLAEnv```, which editors and ``help()`` show as it is and Markdown does not know.
Here each role becomes a link to the object's place in the reference, shown as its last name after a ``~``; where the
reference has no such place, the name alone is shown. ``text::`` before a block of code becomes ``text:``, and
``low, high: bounds.`` among arguments becomes an entry for each. The heading ``Example:`` becomes the
``Examples:`` that Griffe knows.
"""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):`(~?)([\w.]+)`")
_SEVERAL = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+)(:.*(?:\n\1 +\S.*)*)", re.MULTILINE)
_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
_BLOCK = re.compile(r"::$", re.MULTILINE)


class Roles(griffe.Extension):
    """Rewrite the docstring of every object as it is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Replace the roles in an object's docstring."""
        if obj.docstring:
            text = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
            text = _ROLE.sub(lambda role: _link(obj, role[2], short=bool(role[1])), text)
            obj.docstring.value = _SEVERAL.sub(_one_each, _BLOCK.sub(":", text))


def _one_each(entry: re.Match[str]) -> str:
    return "\n".join(f"{entry[1]}{name}{entry[3]}" for name in entry[2].split(", "))


def _link(obj: griffe.Object, name: str, *, short: bool) -> str:
    shown = name.rpartition(".")[2] if short else name
    return f'<autoref optional identifier="{_full_name(obj, name)}"><code>{shown}</code></autoref>'


def _full_name(obj: griffe.Object, name: str) -> str:
    """Return the path of what ``name`` means where it is written: in a class, its module, or from the top."""
    scope: griffe.Object | None = obj
    first = name.partition(".")[0]
    while scope is not None:
        if first in scope.members:
            return f"{scope.path}.{name}"
        scope = scope.parent if isinstance(scope.parent, griffe.Object) else None
    try:
        return obj.resolve(name)
    except griffe.NameResolutionError:
        return name
