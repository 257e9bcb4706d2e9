"""``vla-from-rlinf FILE.yaml``: the command that means the same, and what was not translated."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from shlex import quote

from vla_common.experiments import as_typed
from vla_common.program import printable
from vla_from_rlinf.algorithm import algorithm, is_asynchronous, read_algorithm
from vla_from_rlinf.env import benchmark, read_env
from vla_from_rlinf.keys import DIFFERS, NONE, NOTHING, SAME, UNKNOWN, Keys
from vla_from_rlinf.policy import FAMILIES, MODEL, read_policy
from vla_from_rlinf.reading import Configuration, one_line, read_configuration
from vla_from_rlinf.run import read_loggers, read_optim, read_processes, read_run
from vla_from_rlinf.settings import shortest

_TITLES = {
    DIFFERS: "Different here",
    NONE: "No counterpart here",
    NOTHING: "Does nothing in RLinf",
    SAME: "The same here, with nothing to set",
    UNKNOWN: "Not known",
}


def run() -> int:
    """Translate the file that the command line names, from the configuration of the installed recipes."""
    return main(sys.argv[1:], Path(str(files("vla_recipes") / "conf")))


def main(arguments: Sequence[str], conf: Path) -> int:
    """Print what a file comes to; returns the exit status. ``conf`` is the folder of the recipes' configuration."""
    text = "The command of vla-torchrl that means the same as a configuration of RLinf. Nothing is run."
    parser = argparse.ArgumentParser(prog="vla-from-rlinf", description=text)
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="with the groups of its defaults beside it")
    try:
        print("\n".join(translate(parser.parse_args(arguments).file, conf).lines()))
    except (ValueError, OSError) as error:
        print(f"error: {printable(one_line(str(error)))}", file=sys.stderr)
        return 2
    return 0


@dataclass(frozen=True)
class Translation:
    """What a file of RLinf comes to.

    Attributes:
        configuration: the file.
        recipe: ``"ppo"`` or ``"grpo"``.
        overrides: what is typed after the recipe.
        keys: what became of each key.
    """

    configuration: Configuration
    recipe: str
    overrides: tuple[str, ...]
    keys: Keys

    def lines(self) -> Iterator[str]:
        """Yield the command as a shell reads it, and all else as its comments."""
        first, *others = map(quote, self.overrides)
        yield " \\\n    ".join([f"python recipes/{self.recipe}.py {first}", *others])
        yield ""
        for line in self._remarks():  # of a stranger's file: nothing may end a comment, or hide some of it
            yield f"# {''.join(each if each.isprintable() else '?' for each in line)}".rstrip()

    def _remarks(self) -> Iterator[str]:
        values, used = self.configuration.values, self.keys.used
        counted = f"{sum(key in used for key in values)} of {len(values)} keys are translated"
        yield f"{self.configuration.path.name}: {counted}. Nothing was run."
        yield from self._on_gpus()
        for kind, title in _TITLES.items():
            rows: dict[str, list[str]] = {}
            for remark in self.keys.remarks:
                if remark.kind == kind:
                    rows.setdefault(remark.text, []).append(remark.shown or ", ".join(remark.keys))
            if rows:
                yield from ("", f"{title}:")
                yield from (f"  {', '.join(shown)}: {text}" for text, shown in rows.items())
        yield from ("", "Translated:")
        for key in (key for key in used if key in values):
            text = " ".join(str(values[key]).split())
            shown = text if len(text) <= 80 else f"{text[:80]}..."
            yield f"  {key}={shown} -> {', '.join(self._typed(each) for each in used[key])}"

    def _on_gpus(self) -> Iterator[str]:
        """Yield the command for all GPUs of the file, of nodes of eight."""
        found = self.configuration.values.get("cluster.num_nodes", 1)
        nodes = found if isinstance(found, int) and found > 1 else 1
        recipe, typed = f"recipes/{self.recipe}.py", " ".join(map(quote, self.overrides))
        several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400 " if nodes > 1 else ""
        job = "launcher=slurm_8gpus launcher.partition=NAME" + (f" launcher.nodes={nodes}" if nodes > 1 else "")
        where = "by torchrun on each node" if nodes > 1 else "by torchrun"
        yield f"This is one process on one GPU. On {nodes} x 8, {where}, or by SLURM:"
        yield f"  torchrun {several}--nproc-per-node 8 {recipe} {typed}"
        yield f"  python {recipe} {typed} {job}"
        yield (
            f"Outside a checkout: --no-python vla-recipe run {self.recipe} in place of {recipe}, vla-recipe run "
            f"{self.recipe} in place of python {recipe}"
        )

    def _typed(self, setting: str) -> str:
        settings = self.keys.settings
        return f"{setting}={as_typed(settings[setting])}" if setting in settings else setting


def translate(path: Path, conf: Path) -> Translation:
    """Translate a file of RLinf, whose groups are looked for in its folder; ``conf`` is that of the recipes.

    FileNotFoundError: there is no such file. ValueError: it is no embodied training of RLinf, or of a benchmark, a
    model or an algorithm that there is not.
    """
    keys = Keys(read_configuration(path))
    try:
        return _translated(keys, conf)
    except ArithmeticError as error:
        raise ValueError(f"{path}: has a number that is far too large or small: {error}") from error


def _translated(keys: Keys, conf: Path) -> Translation:
    _check_kind(keys)
    kind, family, name = benchmark(keys), keys.choice(f"{MODEL}model_type", FAMILIES), algorithm(keys)
    read_env(keys, groups=name == "grpo")
    read_policy(keys, critic=name == "ppo")
    read_run(keys)
    read_algorithm(keys, name)
    read_optim(keys)
    read_processes(keys)
    loggers = read_loggers(keys)
    keys.account_for_the_rest()
    recipe = "ppo_async" if is_asynchronous(keys) and (conf / "ppo_async.yaml").is_file() else name
    keys.settings["recipe"] = recipe
    return Translation(keys.configuration, recipe, (*shortest(keys, recipe, kind, family, conf), *loggers), keys)


def _check_kind(keys: Keys) -> None:
    values, path = keys.values, keys.configuration.path
    task = values.get("runner.task_type")
    if task == "embodied_eval" or values.get("runner.only_eval") is True:
        raise ValueError(
            f"{path}: is an evaluation, and vla-from-rlinf translates trainings; type python recipes/evaluate.py "
            "with an experiment that vla-recipe list has and policy.checkpoint=FOLDER"
        )
    if task != "embodied":
        said = f"runner.task_type is {task!r}" if task is not None else "it has no runner.task_type"
        raise ValueError(f"{path}: is no training of RLinf that is translated: {said}; write task_type: embodied")
    for section in ("env", "actor", "algorithm"):
        if not any(key.startswith(f"{section}.") for key in values):
            raise ValueError(f"{path}: is no embodied training of RLinf: it has no section {section}")
