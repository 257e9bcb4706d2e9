"""The longest sentences that an episode may have: which one it is, objects and seed decide when it is set up."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from vla_envs.robotwin.package import objects_of

_PLACE = re.compile(r"\{([A-Za-z])\}")
_GIVEN = re.compile(r"""["']\{([A-Z])\}["']: *(?:f?["']([^"'{}/]+)[/"'])?""")  # what a task's code puts in a place
_ARM = "the right arm"


@cache
def longest_sentences(checkout: Path, task: str, split: str, number: int = 3) -> tuple[str, ...]:
    """Return the longest sentences of a task, in characters: what a prompt has to have room for.

    They are RoboTwin's patterns with the longest name of any object that may be in a place; where the task's code does
    not say which, of any that it mentions. In an episode, fewer words may come together.

    Args:
        checkout: of RoboTwin.
        task: its name.
        split: ``"seen"`` or ``"unseen"``, of patterns and of names.
        number: of sentences.
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

    sentences = {_PLACE.sub(fill, pattern) for pattern in json.loads(file.read_text())[split]}
    return tuple(sorted(sentences, key=lambda text: (-len(text), text))[:number])


@cache
def _longest_name(checkout: Path, what: str, split: str) -> str:
    """Return the longest name of an object, or a text that is none."""
    names = [what]
    for file in sorted((checkout / "description" / "objects_description" / what).glob("*.json")):
        described = json.loads(file.read_text())
        names += (f"the {name}" for name in described.get(split) or described.get("seen", []))
    return max(names[1:] or names, key=len)
