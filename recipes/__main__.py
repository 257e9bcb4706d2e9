"""Run and copy recipes from any folder, compare and publish what came of them, translate configurations of RLinf's.

``vla-recipe list``, ``vla-recipe run ppo seed=1``, ``vla-recipe copy ppo``, ``vla-recipe compare runs/a runs/b``,
``vla-recipe merge FOLDER --to NEW``, ``vla-recipe card FOLDER EVALUATION``, ``vla-recipe from-rlinf FILE.yaml``.
"""

from __future__ import annotations

import argparse
import ast
import filecmp
import importlib
import itertools
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vla_common.completion import script
from vla_common.errors import unknown_name
from vla_common.program import OneLineParser, report, run_main
from vla_common.registry import config_packages
from vla_common.started import handed_on, started

if TYPE_CHECKING:
    from omegaconf import DictConfig

HOME = Path(__file__).resolve().parent
CONF = HOME / "conf"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit status."""
    parser = OneLineParser(
        prog="vla-recipe",
        description="Run recipes from any folder, copy one out to change it, compare two evaluations, prepare a policy "
        "for publication, or translate a configuration of RLinf's.",
        epilog="Settings of a recipe: vla-recipe run ppo --help",
    )
    every = "list | run | copy | compare | merge | card | from-rlinf | completion"
    commands = parser.add_subparsers(dest="command", required=True, metavar=every)
    commands.add_parser("list", help="what there is: recipes, and experiments with what each of them trains")
    run = commands.add_parser("run", help="the same as python recipes/NAME.py SETTINGS in a checkout")
    run.add_argument("recipe", help=", ".join(recipes()))
    run.add_argument("settings", nargs=argparse.REMAINDER, help="such as seed=1, -m seed=1,2,3 or --help")
    copy = commands.add_parser("copy", help="copy a recipe and its configuration into a folder")
    copy.add_argument("recipe", help=", ".join(recipes()))
    copy.add_argument("--to", type=Path, default=Path(), metavar="FOLDER", help="this one unless given")
    copy.add_argument("--force", action="store_true", help="overwrite files that are there")
    comparing = commands.add_parser("compare", help="two evaluations of the same episodes, with paired differences")
    results = "a run's folder (its last evaluation), that of an evaluation, or a .jsonl file of one"
    comparing.add_argument("first", type=Path, metavar="A", help=results)
    comparing.add_argument("second", type=Path, metavar="B", nargs="?", help="likewise; else A's before and after")
    comparing.add_argument("--mean-of", metavar="GROUPS", help="such as easy,medium,hard,very_hard; else eval.mean_of")
    _add_publishing(commands)
    translating = commands.add_parser(
        "from-rlinf", help="the command that means the same as a configuration of RLinf's"
    )
    translating.add_argument("file", type=Path, metavar="FILE.yaml", help="with the groups of its defaults beside it")
    commands.add_parser("completion", help='for bash: eval "$(vla-recipe completion)"')
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "list":
            print("\n".join(describe()))
        elif chosen.command == "run":
            run_recipe(chosen.recipe, chosen.settings)
        elif chosen.command == "compare":
            from vla_algos.run.comparing import compare_folders  # it imports torch

            groups = None if chosen.mean_of is None else [name for name in chosen.mean_of.split(",") if name]
            for text in compare_folders(chosen.first, chosen.second, groups):
                print(text)
        elif chosen.command == "merge":
            from vla_algos.run.merging import merge_folder

            print("\n".join(merge_folder(chosen.folder, chosen.to)))
        elif chosen.command == "card":
            from vla_algos.run.card import write_card

            names = {"repository": chosen.repository, "base_model": chosen.base_model, "license_name": chosen.license}
            print("\n".join(write_card(chosen.folder, chosen.evaluations, **names, force=chosen.force)))
        elif chosen.command == "from-rlinf":
            print("\n".join(translate_from_rlinf(chosen.file)))
        elif chosen.command == "completion":
            print(script(commands.choices, recipes()), end="")
        else:
            print("\n".join(copy_recipe(chosen.recipe, chosen.to, force=chosen.force)))
        sys.stdout.flush()
    except BrokenPipeError:  # vla-recipe list | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        return report(error)
    return 0


def _add_publishing(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    merging = commands.add_parser("merge", help="a policy with its adapter added to its weights")
    merging.add_argument("folder", type=Path, metavar="FOLDER", help="of the policy, such as runs/ppo/latest/policy")
    merging.add_argument("--to", type=Path, required=True, metavar="NEW", help="a folder that is not there yet")
    card = commands.add_parser("card", help="write README.md, the model card, beside a policy; uploads nothing")
    card.add_argument("folder", type=Path, metavar="FOLDER", help="of the policy, such as runs/ppo/latest/policy")
    card.add_argument("evaluations", type=Path, nargs="*", metavar="EVALUATION", help="folders of recipes/evaluate.py")
    card.add_argument("--repository", default="NAME/REPOSITORY", metavar="NAME/REPOSITORY", help="its hub id to be")
    card.add_argument("--base-model", metavar="NAME/REPOSITORY", help="hub id of what training began with")
    card.add_argument("--license", metavar="NAME", help="by the hub's names, such as mit")
    card.add_argument("--force", action="store_true", help="replace a README.md that is somebody else's")


def recipes() -> dict[str, Path]:
    """List names and files of the recipes: those that have a configuration of their name."""
    files = {path.stem: path for path in sorted(HOME.glob("*.py"))}
    return {name: path for name, path in files.items() if (CONF / f"{name}.yaml").is_file()}


def run_recipe(name: str, settings: Sequence[str]) -> NoReturn:
    """Become ``python .../NAME.py SETTINGS``: the same process, as a cluster, torchrun and signals see it.

    Raises:
        ValueError: there is no such recipe; offers the nearest names.
    """
    sys.stdout.flush()
    command = [sys.executable, str(_file_of(name)), *settings]
    os.execve(sys.executable, command, handed_on(started(settings)))


def copy_recipe(name: str, folder: Path, *, force: bool = False) -> list[str]:
    """Copy a recipe and ``conf/`` into a folder, where ``python NAME.py`` then runs it.

    Args:
        name: of the recipe.
        folder: made if it is not there.
        force: overwrite files that are there and differ.

    Returns:
        Lines that say what was copied and what to type now.

    Raises:
        ValueError: there is no such recipe.
        FileExistsError: a file is there and differs; nothing is copied then.
    """
    files = [_file_of(name), *sorted(CONF.rglob("*.yaml"))]
    targets = {path: folder / path.relative_to(HOME) for path in files}
    differing = [target for path, target in targets.items() if target.exists() and not _same(path, target)]
    if differing and not force:
        others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise FileExistsError(
            f"{differing[0]}{others} would be overwritten; type vla-recipe copy {name} --to FOLDER for another folder, "
            "or add --force"
        )
    for path, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    where = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    return [
        f"copied {folder / files[0].name} and {folder / 'conf'} ({len(files) - 1} configuration files)",
        f"now type: {where}python {files[0].name}",
    ]


def translate_from_rlinf(file: Path) -> list[str]:
    """Return the command that means the same as a configuration of RLinf's, and as its comments what differs.

    The whole is a shell script; nothing is run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no embodied training of RLinf's, of nothing that there is here, or comes to what is refused.
    """
    from vla_algos.run import read_config
    from vla_algos.run.rlinf import translate

    def check(recipe: str, config: DictConfig) -> None:
        read_config(config, importlib.import_module(f"{__package__}.{recipe}").SETTINGS)

    return list(translate(file, CONF, check).lines())


def describe() -> list[str]:
    """Return a line for each recipe and each experiment."""
    lines = ["Recipes: vla-recipe run NAME"]
    lines += _table({name: _first_line_of_docstring(path) for name, path in recipes().items()})
    lines += ["", "Experiments: vla-recipe run NAME experiment=EXPERIMENT"]
    lines += _table({path.stem: _first_sentence(path) for path in sorted((CONF / "experiment").glob("*.yaml"))})
    for package in config_packages():
        if found := _experiments_of(package):
            lines += ["", f"Experiments of the package {package}", *_table(found)]
    return lines


def _experiments_of(package: str) -> dict[str, str]:
    try:
        folders = map(Path, importlib.import_module(package).__path__)
    except Exception as error:  # whatever the module of a stranger raises
        print(f"warning: {package} is left out: {type(error).__name__}: {error}", file=sys.stderr)
        return {}
    files = sorted(path for folder in folders for path in (folder / "experiment").glob("*.yaml"))
    return {path.stem: _first_sentence(path) for path in files}


def _file_of(name: str) -> Path:
    known = recipes()
    if name not in known:
        raise unknown_name("recipe", name, known, example="ppo")
    return known[name]


def _same(first: Path, second: Path) -> bool:
    return second.is_file() and filecmp.cmp(first, second, shallow=False)


def _table(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"  {name:<{width}}  {text}".rstrip() for name, text in rows.items()]


def _first_line_of_docstring(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].partition(": ``")[0]


def _first_sentence(path: Path) -> str:
    """Return that of the comment at the head of a configuration file."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    text = " ".join(line.lstrip("# ") for line in lines if not line.startswith("# @package"))
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0].rstrip(".")


if __name__ == "__main__":
    run_main(main)
