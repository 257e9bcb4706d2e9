"""Initial conditions, the 34 tasks as changes of them, and chains of five tasks that are possible one after the other.

The published evaluation (LH-MTLC) has 1000 chains: ``chains.json``. They come from the procedure below (calvin_agent,
``multistep_sequences.py``, seed i for the i-th condition, shuffled with seed 0), which draws further ones for training.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vla_common.plain import read_json
from vla_envs.calvin.scenes import BLOCKS

LENGTH = 5  # tasks of a chain
PUBLISHED = 1000  # chains of the published evaluation
# {"led": 0, "lightbulb": 1, "slider": "left", "drawer": "open", "red_block": "table", ...}
Condition = Mapping[str, Any]
_Rule = tuple[Mapping[str, Collection[Any]], Condition]  # values that entries have to have, and what is changed
_CHOICES: dict[str, list[Any]] = {
    "led": [0, 1],
    "lightbulb": [0, 1],
    "slider": ["right", "left"],
    "drawer": ["closed", "open"],
    **{f"{color}_block": ["table", "slider_right", "slider_left"] for color in BLOCKS},
    "grasped": [0],
}
_IN_CABINET = ("slider_right", "slider_left")


@cache
def tasks() -> dict[str, int]:
    """List the 34 tasks with the category of each, of which a chain has no two, in the order of the publication."""
    found: dict[str, int] = {}
    for verb, color, side in itertools.product(("rotate", "push"), BLOCKS, ("right", "left")):
        found[f"{verb}_{color}_block_{side}"] = 1
    found |= {"move_slider_left": 2, "move_slider_right": 2, "open_drawer": 3, "close_drawer": 3}
    for color in BLOCKS:
        found |= {
            f"lift_{color}_block_{place}": 4 + number for number, place in enumerate(("table", "slider", "drawer"))
        }
    found |= {"place_in_slider": 7, "place_in_drawer": 7}
    found |= {"stack_block": 10, "unstack_block": 11}
    found |= {f"turn_{switch}_{light}": 8 for light in ("lightbulb", "led") for switch in ("on", "off")}
    found["push_into_drawer"] = 9
    return found


@cache
def conditions() -> tuple[Condition, ...]:
    """List the 192 initial conditions: one or two blocks on the table, and no place in the cabinet taken twice."""
    found = []
    for values in itertools.product(*_CHOICES.values()):
        if values.count("table") in (1, 2) and all(values.count(place) < 2 for place in _IN_CABINET):
            found.append(dict(zip(_CHOICES, values, strict=True)))
    return tuple(found)


def outcomes(condition: Condition, task: str) -> list[Condition]:
    """Return what a task may make of a condition; nothing if it is not possible."""
    return [
        {**condition, **change}
        for needed, change in _rules()[task]
        if all(condition[entry] in values for entry, values in needed.items())
    ]


@cache
def _rules() -> Mapping[str, list[_Rule]]:
    """List of each task the values that entries of a condition have to have, and what it changes then."""
    rules: defaultdict[str, list[_Rule]] = defaultdict(list)
    for side, other in (("left", "right"), ("right", "left")):
        rules[f"move_slider_{side}"].append(({"slider": [other]}, {"slider": side}))
    for verb, before, after in (("open", "closed", "open"), ("close", "open", "closed")):
        rules[f"{verb}_drawer"].append(({"drawer": [before]}, {"drawer": after}))
    for (on, switch), light in itertools.product(enumerate(("off", "on")), ("lightbulb", "led")):
        rules[f"turn_{switch}_{light}"].append(({light: [1 - on]}, {light: on}))
    for color in BLOCKS:
        block, others = f"{color}_block", [f"{other}_block" for other in BLOCKS if other != color]
        for verb, side in itertools.product(("rotate", "push"), ("right", "left")):
            rules[f"{verb}_{block}_{side}"].append(({block: ["table"]}, {}))
        in_cabinet: dict[str, Collection[str]] = {other: _IN_CABINET for other in others}
        rules["push_into_drawer"].append(({block: ["table"], "drawer": ["open"], **in_cabinet}, {block: "drawer"}))
        for other in others:
            stacked, apart = {block: "stacked_top", other: "stacked_bottom"}, {block: "table", other: "table"}
            rules["unstack_block"].append(({entry: [value] for entry, value in stacked.items()}, apart))
            rules["stack_block"].append(({block: ["grasped"], other: ["table"]}, {**stacked, "grasped": 0}))
        lifted = {block: "grasped", "grasped": 1}
        rules[f"lift_{block}_table"].append(({block: ["table"]}, lifted))
        rules[f"lift_{block}_drawer"].append(({block: ["drawer"], "drawer": ["open"]}, lifted))
        rules["place_in_drawer"].append(({block: ["grasped"], "drawer": ["open"]}, {block: "drawer", "grasped": 0}))
        for side, other in (("left", "right"), ("right", "left")):  # a block is reached where the door is not
            rules[f"lift_{block}_slider"].append(({block: [f"slider_{other}"], "slider": [side]}, lifted))
            placed = {block: f"slider_{side}", "grasped": 0}
            rules["place_in_slider"].append(({block: ["grasped"], "slider": [side]}, placed))
    for task in rules.keys() - {"place_in_slider", "place_in_drawer", "stack_block"}:
        rules[task] = [({**needed, "grasped": [0]}, change) for needed, change in rules[task]]
    return rules


def draw_chain(*seed: int) -> tuple[Condition, tuple[str, ...]]:
    """Draw a condition, and one of all chains that begin there, each as likely as any other, as published."""
    random = np.random.default_rng(seed)
    start = conditions()[random.integers(len(conditions()))]
    condition, chain = start, []
    left: frozenset[int] = frozenset(tasks().values())
    for length in range(LENGTH, 0, -1):
        nexts = _continuations(tuple(condition.items()), left, length)
        upto = np.cumsum([number for _, _, number in nexts])
        name, after, _ = nexts[int(np.searchsorted(upto, random.integers(upto[-1]), side="right"))]
        chain.append(name)
        condition, left = dict(after), left - {tasks()[name]}
    return start, tuple(chain)


@cache
def _continuations(
    condition: tuple[tuple[str, Any], ...], categories: frozenset[int], length: int
) -> list[tuple[str, tuple[tuple[str, Any], ...], int]]:
    """List the tasks that may come next, the condition after each, and how many chains continue from there."""
    found = []
    for name, category in tasks().items():
        after = outcomes(dict(condition), name) if category in categories else []
        if len(after) == 1:
            state = tuple(after[0].items())
            further = _continuations(state, categories - {category}, length - 1) if length > 1 else []
            number = sum(number for _, _, number in further) if length > 1 else 1
            if number:
                found.append((name, state, number))
    return found


@cache
def published_chains() -> tuple[tuple[Condition, tuple[str, ...]], ...]:
    """Read the 1000 chains of the published evaluation, with entries of conditions in the order of ours."""
    chains = read_json(Path(__file__).with_name("chains.json"), list)
    return tuple((condition, tuple(names)) for condition, names in chains)
