"""The longest sentences that an episode may have: which one it is, objects and seed decide when it is set up."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from vla_common.plain import read_json
from vla_envs.robotwin.package import objects_of

_PLACE = re.compile(r"\{([A-Za-z])\}")
_GIVEN = re.compile(r"""["']\{([A-Z])\}["']: *(?:f?["']([^"'{}/]+)[/"'])?""")  # what a task's code puts in a place
_ARM = "the right arm"


@cache
def longest_sentences(checkout: Path, task: str, split: str, number: int = 3) -> tuple[str, ...]:
    """Return the longest sentences of a task, in characters: what a prompt has to have room for.

    They are RoboTwin's patterns (``"seen"`` or ``"unseen"``) with the longest name of any object that may be in a
    place.
    """
    file = checkout / "description" / "task_instruction" / f"{task}.json"
    if not file.is_file():
        return ()
    given: dict[str, set[str]] = {}
    for letter, what in _GIVEN.findall((checkout / "envs" / f"{task}.py").read_text()):
        given.setdefault(letter, set()).add(what)
    mentioned = objects_of(checkout, task)
    longest = {
        letter: max((_longest_name(checkout, text, split) for text in (given[letter] - {""}) or mentioned), key=len)
        for letter in given
    }

    def fill(place: re.Match[str]) -> str:
        return longest.get(place[1], _ARM)

    sentences = {_PLACE.sub(fill, pattern) for pattern in read_json(file)[split]}
    return tuple(sorted(sentences, key=lambda text: (-len(text), text))[:number])


@cache
def _longest_name(checkout: Path, what: str, split: str) -> str:
    names = [what]
    for file in sorted((checkout / "description" / "objects_description" / what).glob("*.json")):
        described = read_json(file)
        names += (f"the {name}" for name in described.get(split) or described.get("seen", []))
    return max(names[1:] or names, key=len)
