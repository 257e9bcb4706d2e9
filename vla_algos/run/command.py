"""The whole command that goes on with a run, or comes after it, as it was typed and ready to be pasted."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from vla_algos import parallel
from vla_algos.run.arguments import read_flags
from vla_algos.run.phase import has_begun
from vla_common.started import started

_OF_A_SWEEP = ("-m", "--multirun", "-r", "--run")
_LEFT_OUT = re.compile(r"\+*(hydra\.sweep\.|resume=never$)")
_PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)  # a value that Hydra reads as it stands


@dataclass(frozen=True)
class Command:
    """What was typed.

    Attributes:
        start: such as ``python recipes/ppo.py``.
        arguments: what follows, in today's names of settings.
    """

    start: tuple[str, ...]
    arguments: tuple[str, ...]

    def having(self, *settings: str) -> Command:
        """Return the command with settings, in place of those of the same name."""
        names = set(map(_name, settings))
        kept = [each for each in self.arguments if _name(each) not in names]
        last = read_flags(kept).overrides[-1:]  # Hydra wants settings side by side
        place = 1 + max(index for index, each in enumerate(kept) if each == last[0]) if last else len(kept)
        return replace(self, arguments=(*kept[:place], *settings, *kept[place:]))

    def in_folder(self, folder: Path) -> str:
        """Return the command that goes on in the folder of a run, for a shell."""
        kept = tuple(each for each in self.arguments if not _LEFT_OUT.match(each))
        command = replace(self, arguments=kept).having(f"hydra.run.dir={_quoted(str(folder))}")
        return shlex.join([*command.start, *command.arguments])

    def of_recipe(self, name: str) -> list[str] | None:
        """Return how another recipe is started in the same way, in one process; ``None`` where nothing tells."""
        *before, last = self.start
        if before[-1:] == ["run"]:  # vla-recipe run ppo
            return [*before, name]
        if last.endswith(".py") and (script := Path(last).with_name(f"{name}.py")).is_file():
            return [before[0] if len(before) == 1 else "python", str(script)]
        return None


_typed: Command | None = None


def remember(typed: Sequence[str], arguments: Sequence[str]) -> None:
    """Remember what was typed after the name of the recipe, and what of it is in today's names of settings."""
    start = started(typed)
    if start is not None and parallel.processes_started() > 1 and Path(start[0]).name.startswith("python"):
        start = start if "torch.distributed.run" in start else None  # srun, mpirun: nothing tells how
    adopt(None if start is None else Command(tuple(start), tuple(arguments)))


def adopt(command: Command | None) -> None:
    """Let a command be what was typed, as in a job that somebody else has submitted."""
    global _typed
    _typed = command


def typed() -> Command | None:
    """Return what would be typed for this run alone: of a sweep with its own values."""
    if _typed is None or not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return _typed
    own = {_name(each): each for each in HydraConfig.get().overrides.task}
    arguments = [own.get(_name(each), each) for each in _typed.arguments if each not in _OF_A_SWEEP]
    return replace(_typed, arguments=tuple(arguments))


def to_go_on(folder: Path) -> str:
    """Return what is typed to go on with the run of a folder."""
    command = typed()
    return f"the same command with hydra.run.dir={folder}" if command is None else command.in_folder(folder)


def to_evaluate(policy: Path, settings: Sequence[str] = ()) -> str:
    """Return what is typed to evaluate the policy of a folder, with ``settings`` such as ``eval.trials=10``."""
    command = typed()
    start = None if command is None else command.of_recipe("evaluate")
    return shlex.join(
        [*(start or ["vla-recipe", "run", "evaluate"]), f"policy.checkpoint={_quoted(str(policy))}", *settings]
    )


@contextlib.contextmanager
def say_how_to_go_on(folder: Path) -> Iterator[None]:
    """If the body ends early, say where the run is and what is typed to go on; nothing if no work had begun."""
    try:
        yield
    except BaseException:
        if has_begun() and parallel.is_main():
            print(f"\nrun          {folder}\nto go on     {to_go_on(folder)}", flush=True)
        raise


def _name(argument: str) -> str:
    return argument.lstrip("+").partition("=")[0]


def _quoted(value: str) -> str:
    """Quote a value for Hydra where it would read more into it than a text."""
    escaped = re.sub(r'(\\+)(?="|$)', r"\1\1", value).replace('"', '\\"')  # a backslash elsewhere is itself
    return value if _PLAIN.fullmatch(value) else f'"{escaped}"'
