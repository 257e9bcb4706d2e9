"""Wrong settings of the recipes: each must be refused, in one line that names it, before simulators start.

Those of ``mistakes.txt`` are what a user might type, each known to be wrong. The others are values that no setting
takes, given to every setting in turn.
"""

import functools
import importlib
import random
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from tests.storm import lives
from tests.storm.tally import Tally

CONF = lives.RECIPES / "conf"
MISTAKES = [
    shlex.split(line)
    for line in (Path(__file__).parent / "mistakes.txt").read_text().splitlines()
    if not line.startswith("#")
]
BASES = (("ppo", ()), ("grpo", ()), ("sft", ()), ("ppo", ("policy=small_flow",)), ("ppo", ("launcher=slurm",)))
NONSENSE = ("???", "{nonsense: {a: 1}}", "[[1,2],[[3]]]", "nan", "'" + "x" * 10_000 + "'", "-7.25")
STARTED = 99  # status of a recipe that has refused nothing


def run(count: int, seed: int) -> Tally:
    """Type ``count`` wrong commands: known mistakes, spread over all of them, and nonsense, half each."""
    draw, tally = random.Random(seed), Tally()
    some = MISTAKES[:: max(1, 2 * len(MISTAKES) // count)][: count // 2]
    settings = [(recipe, base, name) for recipe, base in BASES for name in names(recipe, base)]
    others = [(draw.choice(settings), draw.choice(NONSENSE)) for _ in range(count - len(some))]
    commands = [("mistake", each) for each in some]
    commands += [("nonsense", [recipe, *base, f"{name}={value}"]) for (recipe, base, name), value in others]
    with tempfile.TemporaryDirectory() as folder:
        for number, (kind, command) in enumerate(commands):
            outcome, said = judged(command, Path(folder) / str(number))
            tally.note(outcome, kind, f"{shlex.join(command)[:200]}: {said[:300]}")
    return tally


def judged(command: list[str], folder: Path) -> tuple[str, str]:
    """Tell how a recipe takes wrong settings, and what it says; some part of a setting or its value is named."""
    recipe, *typed = command
    where = [] if any("hydra." in each for each in typed) else [f"hydra.run.dir={folder}"]
    status = lives.wait(lives.typed(recipe, [*typed, *where], folder.with_suffix(".log"), stop))
    said = lives.last_words(folder)
    if status is None:
        return "hung", said
    if status in (0, STARTED):
        return "wrong", "accepted"
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    words = [word for setting in typed for word in re.findall(r"[A-Za-z_]{3,}", setting)]
    named = any(word in line for word in words for line in lines)
    hydras = any(text in said for text in ("Could not", "mismatched input", "token recognition", "LexerNoViable"))
    told = (len(lines) == 1 and named) or hydras
    return ("survived" if told and "Traceback" not in said else "lost"), said


@functools.cache
def names(recipe: str, base: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a recipe's settings as they are typed."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base=None):
        config: Any = OmegaConf.to_container(compose(recipe, overrides=list(base)), resolve=False)

    def inside(section: Any, before: str = "") -> Iterator[str]:
        for name, value in section.items():
            if isinstance(value, dict) and before in ("", "logger."):
                yield from inside(value, f"{before}{name}.")
            else:
                yield f"{before}{name}"

    return tuple(inside(config))


def stop() -> None:
    """Let a life end where it would start simulators."""
    environments = importlib.import_module("vla_envs.env").VLAEnv

    def started(*_: Any, **__: Any) -> None:
        raise SystemExit(STARTED)

    environments.__init__ = started
