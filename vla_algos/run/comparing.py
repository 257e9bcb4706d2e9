"""``vla-recipe compare A B``: the results of two evaluations that are on disk, episode by episode."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_algos.comparison import compare
from vla_algos.results import NAME, files_of, read_episodes
from vla_algos.run import episode_log
from vla_algos.run.evaluated import evaluated_env
from vla_algos.run.folder import flat, settings_of

_OF_THE_MACHINE = ("num_envs", "num_workers", "gpus", "step_timeout", "start_timeout", "group_size")
_OF_TRAINING = ("reward_type", "reward_coef", "relative_reward", "step_penalty")


@dataclass(frozen=True)
class _Found:
    """Evaluations in one place: the file of each kind (greedy, sampled, ...) and the run that they are of."""

    place: Path
    files: Mapping[str, Path]
    run: Path


def compare_folders(first: Path, second: Path | None = None, mean_of: Sequence[str] | None = None) -> Iterator[str]:
    """Compare evaluations that are on disk; yields what to print.

    Args:
        first: the folder of a run (its last evaluation counts), of one evaluation, or a file with results of episodes.
        second: another one; ``None`` compares what ``first`` has: the first evaluation of a training run with its
            last, or an evaluation with its ablations.
        mean_of: groups of which the mean is taken too; ``None`` for those of the runs' own ``eval.mean_of``.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: there are no results, or they share no episode.
    """
    if second is None:
        yield from _compare_own(first, mean_of)
        return
    one, other = _find(first), _find(second)
    groups = _mean_of(one, other) if mean_of is None else mean_of
    yield from (f"  differs: {text}" for text in _differences(one, other))
    kinds = [kind for kind in one.files if kind in other.files]
    if not kinds:  # of each the first there is
        kind, theirs = next(iter(one.files)), next(iter(other.files))
        if kind and theirs:
            yield f"  differs: {kind} and {theirs}"
        yield _table(one.files[kind], other.files[theirs], groups, "A", "B", one.place, other.place, tasks=True)
    for kind in kinds:
        yield _table(one.files[kind], other.files[kind], groups, "A", "B", one.place, other.place, kind, tasks=True)


def before_and_after(folder: Path, mean_of: Sequence[str]) -> list[str]:
    """Compare the first and the last evaluation of a training run; nothing where it has one.

    What cannot be compared, because files are gone, is said in a line.
    """
    try:
        evaluations = _evaluations(folder)
        return list(_before_and_after(evaluations, mean_of, tasks=False)) if len(evaluations) > 1 else []
    except (ValueError, OSError) as error:
        return [f"before and after are not compared: {error}"]


def _compare_own(folder: Path, mean_of: Sequence[str] | None) -> Iterator[str]:
    found = _find(folder)
    groups = _mean_of(found) if mean_of is None else mean_of
    if len(evaluations := _evaluations(folder)) > 1:
        yield from _before_and_after(evaluations, groups, tasks=True)
        return
    ablations = episode_log.ablated(folder) if folder.is_dir() else {}
    if not ablations:
        raise ValueError(f"{folder} has one evaluation; with what? type: vla-recipe compare {folder} OTHER")
    normal = folder / NAME
    for name, path in ablations.items():
        yield _table(normal, path, groups, "normal", name, normal, path, tasks=True)


def _before_and_after(evaluations: Sequence[_Found], mean_of: Sequence[str], *, tasks: bool) -> Iterator[str]:
    before, after = evaluations[0], evaluations[-1]
    for kind in before.files:
        if kind in after.files:
            files = before.files[kind], after.files[kind]
            yield _table(*files, mean_of, "before", "after", before.place, after.place, kind, tasks=tasks)


def _table(
    one: Path,
    other: Path,
    mean_of: Sequence[str],
    first: str,
    second: str,
    place: Path,
    other_place: Path,
    kind: str = "",
    *,
    tasks: bool,
) -> str:
    found = compare(read_episodes(one), read_episodes(other), mean_of)
    said = [kind] * bool(kind) + [f"{first} {place.name}, {second} {other_place.name}"] * (first == "before")
    said += [f"{first} {place}, {second} {other_place}"] * (first == "A")
    title = f"{second} - {first}, paired over {len(found.pairs)} episodes"
    return f"\n{'; '.join([title, *said])}\n{found.table(first, second, tasks=tasks)}"


def _find(path: Path) -> _Found:
    """Find the results in a file, an evaluation or a run, of which its last evaluation counts."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or folder; type the folder of a run")
    run = next((each for each in (path, *path.absolute().parents) if (each / "config.yaml").is_file()), path)
    if path.is_file():
        return _Found(path, {"": path}, run)
    if _there(path / NAME):
        kind = "sampled" if settings_of(run).get("greedy") is False else "greedy"
        return _Found(path, {kind: path / NAME}, run)
    names = {"greedy": path / "eval.jsonl", "sampled": path / "eval_sampled.jsonl"}
    if files := {kind: file for kind, file in names.items() if _there(file)}:
        return _Found(path, files, run)
    if evaluations := _evaluations(path):
        return evaluations[-1]
    raise ValueError(
        f"{path} has no results of episodes: neither {NAME} nor evaluations/; type the folder of a run, of "
        "an evaluation, or such a file"
    )


def _evaluations(run: Path) -> list[_Found]:
    """List the evaluations of a training run, in their order."""
    folders = sorted(run.glob("evaluations/iteration_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    return [_find(folder) for folder in folders if any(folder.glob("eval*.jsonl"))]


def _there(path: Path) -> bool:
    """Tell whether an evaluation has written there; one that was broken off may have files of other processes alone."""
    return bool(files_of(path))


def _mean_of(*found: _Found) -> list[str]:
    for each in found:
        section = settings_of(each.run).get("eval")
        if isinstance(section, dict) and section.get("mean_of"):
            return list(section["mean_of"])
    return []


def _differences(one: _Found, other: _Found) -> Iterator[str]:
    """Say what differs between two runs of what an episode is."""
    first, second = _protocol(one.run), _protocol(other.run)
    for name in first:
        if first[name] != second[name]:
            yield f"{name}: {first[name]} and {second[name]}"
    settings = [_env(each.run) for each in (one, other)]
    for name in sorted(settings[0].keys() | settings[1].keys()):
        if name.removeprefix("env.") in (*_OF_THE_MACHINE, *_OF_TRAINING) or not all(settings):
            continue
        if settings[0].get(name) != settings[1].get(name):
            yield f"{name}: {settings[0].get(name)} and {settings[1].get(name)}"


def _env(run: Path) -> dict[str, Any]:
    """List the settings of the environment in which a run is evaluated, by name; nothing where they are unknown."""
    config = settings_of(run)
    if not isinstance(config.get("env"), dict):
        return {}
    evaluation = config.get("eval")
    return flat(evaluated_env(config["env"], evaluation if isinstance(evaluation, dict) else {}), "env")


def _protocol(run: Path) -> dict[str, Any]:
    """Read what ``run.json`` says of the protocol; nothing where it has not finished."""
    try:
        record = json.loads((run / "run.json").read_bytes())
    except (OSError, ValueError):
        record = {}
    return {name: record.get(name) or "none" for name in ("protocol", "protocol_deviations")}
