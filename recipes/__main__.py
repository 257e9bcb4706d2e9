"""Run and copy recipes from any folder, show, compare and publish what came of them.

``vla-recipe list``, ``vla-recipe run ppo seed=1``, ``vla-recipe copy ppo``, ``vla-recipe report runs/a runs/b``,
``vla-recipe compare runs/a runs/b``, ``vla-recipe merge FOLDER --to NEW``, ``vla-recipe card FOLDER EVALUATION``,
``vla-recipe export FOLDER --layout lerobot``, ``vla-recipe serve FOLDER``.
"""

import argparse
import ast
import filecmp
import importlib
import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path

from vla_common.errors import unknown_name
from vla_common.experiments import find_experiments
from vla_common.program import OneLineParser, printable, report, run_main
from vla_common.registry import config_packages

HOME = Path(__file__).resolve().parent
CONF = HOME / "conf"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit status."""
    typed = sys.argv[1:] if arguments is None else arguments
    chosen = _parser().parse_args(typed or ["--help"])
    try:
        for text in chosen.do(chosen):
            print(printable(text))
        sys.stdout.flush()
    except BrokenPipeError:  # vla-recipe list | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        return report(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="vla-recipe",
        description="Run recipes from any folder, copy one out to change it, show what came of runs, compare "
        "two evaluations, or prepare a policy for publication.",
        epilog="Settings of a recipe: vla-recipe run ppo --help",
    )
    every = "list | run | copy | report | compare | rollouts | merge | export | card | serve"
    commands = parser.add_subparsers(dest="command", required=True, metavar=every)
    listing = commands.add_parser("list", help="what there is: recipes, and experiments with what each of them trains")
    listing.set_defaults(do=lambda _: describe())
    run = commands.add_parser("run", help="the same as python recipes/NAME.py SETTINGS in a checkout")
    run.add_argument("recipe", help=", ".join(recipes()))
    run.add_argument("settings", nargs=argparse.REMAINDER, help="such as seed=1, -m seed=1,2,3 or --help")
    run.set_defaults(do=_run)
    copy = commands.add_parser("copy", help="copy a recipe and its configuration into a folder")
    copy.add_argument("recipe", help=", ".join(recipes()))
    copy.add_argument("--to", type=Path, metavar="FOLDER", help="my_NAME unless given")
    copy.add_argument("--force", action="store_true", help="overwrite files that are there")
    copy.set_defaults(do=_copy)
    reporting = commands.add_parser(
        "report", help="a page of a run, or of several: seeds as bands, settings side by side"
    )
    reporting.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, finished or not, or sweeps"
    )
    reporting.add_argument("--to", type=Path, metavar="FILE.html", help="else report.html in the run's folder, or here")
    reporting.set_defaults(do=_report)
    comparing = commands.add_parser("compare", help="two evaluations, episode by episode; seeds; a published rate")
    results = "A and B: folders of runs (their last evaluation), evaluations, .jsonl files; A alone: before and after"
    comparing.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=results)
    only = comparing.add_mutually_exclusive_group()
    only.add_argument("--with", type=Path, nargs="+", dest="others", metavar="RUN", help="the seeds of B")
    only.add_argument("--published", type=float, metavar="PERCENT", help="a rate instead of B, such as 97.1")
    comparing.add_argument("--episodes", type=int, metavar="NUMBER", help="that the published rate is of, such as 500")
    only.add_argument("--mean-of", metavar="GROUPS", help="such as easy,medium,hard,very_hard; else eval.mean_of")
    comparing.set_defaults(do=_compare)
    rollouts = commands.add_parser("rollouts", help="what a policy or an expert did, as a data set of LeRobot")
    rollouts.add_argument(
        "evaluation", type=Path, metavar="FOLDER", help="of evaluate.py, a training or demonstrations"
    )
    rollouts.add_argument("--to", type=Path, required=True, metavar="NEW", help="a folder that is not there yet")
    rollouts.add_argument("--only-success", action="store_true", help="leave out what was not solved")
    rollouts.set_defaults(do=_rollouts)
    merging = commands.add_parser("merge", help="a policy with its adapter added to its weights")
    merging.add_argument("folder", type=Path, metavar="FOLDER", help="of a run or a policy, such as runs/ppo/latest")
    merging.add_argument("--to", type=Path, required=True, metavar="NEW", help="a folder that is not there yet")
    merging.set_defaults(do=_merge)
    exporting = commands.add_parser("export", help="pi0 and pi0.5 in the other layout, LeRobot's or openpi's")
    exporting.add_argument("folder", type=Path, metavar="FOLDER", help="of a run, a policy or a published checkpoint")
    exporting.add_argument("--layout", required=True, choices=("lerobot", "openpi"), help="to be written")
    exporting.add_argument("--to", type=Path, metavar="NEW", help="else FOLDER-LAYOUT")
    exporting.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="with its files in that layout")
    settings = "of a published checkpoint, such as policy.benchmark=metaworld"
    exporting.add_argument("--settings", nargs="+", default=(), metavar="policy.NAME=VALUE", help=settings)
    exporting.set_defaults(do=_export)
    card = commands.add_parser("card", help="write README.md, the model card, beside a policy; uploads nothing")
    card.add_argument("folder", type=Path, metavar="FOLDER", help="of a run or a policy, such as runs/ppo/latest")
    card.add_argument("evaluations", type=Path, nargs="*", metavar="EVALUATION", help="folders of recipes/evaluate.py")
    card.add_argument("--repository", default="NAME/REPOSITORY", metavar="NAME/REPOSITORY", help="its hub id to be")
    card.add_argument("--base-model", metavar="NAME/REPOSITORY", help="hub id of what training began with")
    card.add_argument("--license", metavar="NAME", help="by the hub's names, such as mit")
    card.add_argument("--force", action="store_true", help="replace a README.md that was not written by this command")
    card.set_defaults(do=_card)
    serving = commands.add_parser("serve", help="a policy behind a websocket, for robots and other benchmarks")
    serving.add_argument("folder", metavar="FOLDER", help="of a run, a policy or a published checkpoint, or hf:NAME")
    serving.add_argument("--protocol", choices=("openpi", "vla-eval"), default="openpi", help="of its clients")
    serving.add_argument("--host", default="127.0.0.1", help="to listen on; this machine alone unless given")
    serving.add_argument("--port", type=int, default=8000, help="0 for a free one")
    serving.add_argument("--sample", action="store_true", help="sample actions instead of the greedy ones")
    serving.add_argument(
        "--max-batch", type=int, default=16, help="observations of several clients that are computed together"
    )
    serving.add_argument("--max-wait", type=float, default=5.0, metavar="MS", help="of the first of them, for others")
    named = "such as images=observation/exterior_image_1_left; wrist_images=A,B for two cameras"
    serving.add_argument("--names", nargs="+", default=(), metavar="KEY=NAME", help=named)
    serving.add_argument("--settings", nargs="+", default=(), metavar="policy.NAME=VALUE", help=settings)
    serving.set_defaults(do=_serve)
    return parser


def recipes() -> dict[str, Path]:
    """List names and files of the recipes: those that have a configuration of their name."""
    files = {path.stem: path for path in sorted(HOME.glob("*.py"))}
    return {name: path for name, path in files.items() if (CONF / f"{name}.yaml").is_file()}


def _run(chosen: argparse.Namespace) -> Iterable[str]:
    """Become ``python .../NAME.py SETTINGS``: the same process, as a cluster, torchrun and signals see it."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(_file_of(chosen.recipe)), *chosen.settings])
    return ()


def _report(chosen: argparse.Namespace) -> Iterable[str]:
    from vla_algos.run.report import write_report  # it imports torch

    yield f"wrote {write_report(chosen.runs, chosen.to, CONF)}"


def _compare(chosen: argparse.Namespace) -> Iterable[str]:
    from vla_algos.run.comparing import compare_folders, compare_published, compare_seeds

    if (chosen.published is None) != (chosen.episodes is None):
        raise ValueError("a rate and its episodes belong together; type: --published 97.1 --episodes 500")
    if chosen.published is not None:
        return compare_published(chosen.runs, chosen.published, chosen.episodes)
    if chosen.others:
        return compare_seeds(chosen.runs, chosen.others)
    if len(chosen.runs) > 2:
        raise ValueError("which of them are A, which are B? type: vla-recipe compare A1 A2 --with B1 B2")
    groups = None if chosen.mean_of is None else [name for name in chosen.mean_of.split(",") if name]
    return compare_folders(chosen.runs[0], chosen.runs[1] if chosen.runs[1:] else None, groups)


def _rollouts(chosen: argparse.Namespace) -> Iterable[str]:
    from vla_algos.run.rollouts import write_rollouts

    return write_rollouts(chosen.evaluation, chosen.to, only_success=chosen.only_success)


def _merge(chosen: argparse.Namespace) -> Iterable[str]:
    from vla_algos.run.merging import merge_folder

    return merge_folder(chosen.folder, chosen.to)


def _export(chosen: argparse.Namespace) -> Iterable[str]:
    from vla_algos.run.merging import export_folder
    from vla_policies.cli import read_settings

    settings = read_settings(chosen.settings)
    return export_folder(chosen.folder, chosen.layout, chosen.to, chosen.tokenizer, settings)


def _card(chosen: argparse.Namespace) -> Iterable[str]:
    from vla_algos.run.card import write_card

    names = {"repository": chosen.repository, "base_model": chosen.base_model, "license_name": chosen.license}
    return write_card(chosen.folder, chosen.evaluations, **names, force=chosen.force)


def _serve(chosen: argparse.Namespace) -> Iterable[str]:
    from vla_policies.cli import policy_of, read_settings
    from vla_policies.serving import serve_folder

    settings = read_settings(chosen.settings)
    names = {key: name.split(",") for key, _, name in (each.partition("=") for each in chosen.names)}
    options = {"sample": chosen.sample, "max_batch": chosen.max_batch, "max_wait": chosen.max_wait / 1000}
    place = chosen.protocol.replace("-", "_"), chosen.host, chosen.port
    serve_folder(policy_of(chosen.folder), *place, settings, names=names, **options)
    return ()


def _copy(chosen: argparse.Namespace) -> Iterable[str]:
    """Copy a recipe and ``conf/`` into a folder; nothing where a file is there and differs, unless forced."""
    name, folder = chosen.recipe, chosen.to or Path(f"my_{chosen.recipe}")
    files = [_file_of(name), *sorted(CONF.rglob("*.yaml"))]
    targets = {path: folder / path.relative_to(HOME) for path in files}
    differing = [path for file, path in targets.items() if path.exists() and not _same(file, path)]
    if differing and not chosen.force:
        others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise FileExistsError(
            f"{differing[0]}{others} would be overwritten; type vla-recipe copy {name} --to FOLDER for another folder, "
            "or add --force"
        )
    if out := [target for target in targets.values() if not target.resolve().is_relative_to(folder.resolve())]:
        raise ValueError(f"{out[0]} is behind a link out of {folder}; type another folder: --to FOLDER")
    for path, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    where = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    yield f"copied {folder / files[0].name} and {folder / 'conf'} ({len(files) - 1} configuration files)"
    yield f"now type: {where}python {files[0].name}"


def describe() -> list[str]:
    """Return a line for each recipe and each experiment."""
    docstrings = {name: ast.get_docstring(ast.parse(path.read_text())) or "" for name, path in recipes().items()}
    lines = ["Recipes: vla-recipe run NAME"]
    lines += _table({name: text.partition("\n")[0].partition(": ``")[0] for name, text in docstrings.items()})
    lines += ["", "Experiments: vla-recipe run NAME experiment=EXPERIMENT", *_table(_experiments_in(CONF))]
    for package in config_packages():
        try:
            folders = map(Path, importlib.import_module(package).__path__)
        except Exception as error:  # anything that the module of a stranger raises
            print(f"warning: {package} is left out: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if found := {name: text for folder in folders for name, text in _experiments_in(folder).items()}:
            lines += ["", f"Experiments of the package {package}", *_table(found)]
    return lines


def _experiments_in(conf: Path) -> dict[str, str]:
    """Say what each experiment is; of a row of a table, which file with which ``env.id``."""
    found = find_experiments(conf).items()
    return {name: f"env.id={each.suite}" if each.suite else _first_sentence(each.file) for name, each in found}


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


def _first_sentence(path: Traversable) -> str:
    """Return that of the comment at the head of a configuration file."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    text = " ".join(line.lstrip("# ") for line in lines if not line.startswith("# @package"))
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0].rstrip(".")


if __name__ == "__main__":
    run_main(main)
