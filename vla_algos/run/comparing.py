"""``vla-recipe compare``: two evaluations that are on disk, episode by episode; several seeds; a published rate."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_algos.comparison import compare
from vla_algos.intervals import Estimate, independent_difference, wilson_interval
from vla_algos.results import IDENTITY, IN_TRAINING, NAME, EpisodeResult, files_of, read_episodes
from vla_algos.run.environments import evaluated_env
from vla_algos.run.folder import flat, settings_of
from vla_algos.run.logging import entries
from vla_algos.run.plots import points
from vla_algos.run.provenance import read_record
from vla_algos.run.training_env import unseen
from vla_algos.seeds import Seeds, hierarchical_bootstrap, interquartile_mean, probability_of_improvement
from vla_common.experiments import as_typed
from vla_common.settings import Count, checked


@dataclass(frozen=True)
class Found:
    """Evaluations in one place: the file of each kind (greedy, sampled, ...) and the run that they are of."""

    place: Path
    files: Mapping[str, Path]
    run: Path


def compare_folders(first: Path, second: Path | None = None, mean_of: Sequence[str] | None = None) -> Iterator[str]:
    """Compare evaluations that are on disk; yields what to print.

    Each is the folder of a run (its last evaluation counts), of one evaluation, or a file with results of episodes.
    Without a ``second`` the first and last evaluation of a run are compared, or one with its ablations. ``mean_of`` are
    groups of which the mean is taken too, by default those of the runs' own ``eval.mean_of``. FileNotFoundError: there
    is no such folder or file. ValueError: there are no results, they share no episode, or both are the same folder.
    """
    one = _find(first)
    if second is None:
        yield from _compare_own(first, _mean_of(one) if mean_of is None else mean_of)
        return
    if first.is_dir() and first.resolve() == second.resolve():
        raise ValueError(f"{first} is compared with itself; leave the second out to compare its before and after")
    other = _find(second)
    groups = (_mean_of(one) or _mean_of(other)) if mean_of is None else mean_of
    yield from (f"  differs: {text}" for text in _differences(one.run, other.run))
    if not one.files.keys() & other.files.keys():  # of each the first there is
        (kind, file), (theirs, their_file) = next(iter(one.files.items())), next(iter(other.files.items()))
        if kind and theirs:
            yield f"  differs: {kind} and {theirs}"
        one, other = Found(one.place, {"": file}, one.run), Found(other.place, {"": their_file}, other.run)
    yield from _tables(one, other, groups, ("A", "B"), f"A {one.place}, B {other.place}")


@checked
def compare_published(runs: Sequence[Path], published: float, episodes: Count) -> Iterator[str]:
    """Compare a run, or the mean of several seeds, with a ``published`` rate, in percent; yields what to print."""
    if not (published == 0 or 1 <= published <= 100):
        percent = f"{100 * published:g}" if 0 < published < 1 else "97.1"
        raise ValueError(f"--published {published:g} is no percentage of 1 to 100, or 0; type --published {percent}")
    theirs = Estimate(published / 100, *wilson_interval(published / 100 * episodes, episodes))
    for said, seeds in _seeds_of(runs):
        solved, number = int(seeds.solved.sum()), int(seeds.episodes.sum())
        ours = Estimate(solved / number, *wilson_interval(solved, number))
        if len(runs) > 1:
            ours = hierarchical_bootstrap(np.mean, seeds.pooled())
        gained = independent_difference(theirs, ours)
        verdict = "above" if gained.low > 0 else "below" if gained.high < 0 else "consistent"
        yield f"{said}\npublished   {_shown(theirs)} of {episodes} episodes\nhere        {_shown(ours)}"
        yield f"difference  {_shown(gained, '+.1f', '')}: {verdict}"


def compare_seeds(first: Sequence[Path], second: Sequence[Path]) -> Iterator[str]:
    """Compare the seeds of two trainings, each as of :func:`compare_folders`; yields what to print."""
    if len(first) == len(second) == 1:
        raise ValueError(f"--with is for several seeds; type: vla-recipe compare {first[0]} {second[0]}")
    for said, seeds in _seeds_of([*first, *second]):
        a, b = (Seeds(seeds.episodes[of], seeds.solved[of]) for of in np.split(range(len(seeds.solved)), [len(first)]))
        yield f"{said}\n{'':<18}  {'A':>22}  {'B':>22}  B - A"
        rows: list[tuple[str, Callable[..., float], Seeds, Seeds]]
        rows = [("mean", np.mean, a.pooled(), b.pooled()), ("interquartile mean", interquartile_mean, a, b)]
        for name, mean, *of in rows:
            alone = "  ".join(f"{_shown(hierarchical_bootstrap(mean, each)):>22}" for each in of)
            gained = hierarchical_bootstrap(lambda x, y, mean=mean: mean(y) - mean(x), *of)
            yield f"{name:<18}  {alone}  {_shown(gained, '+.1f', '')}"
        better = hierarchical_bootstrap(probability_of_improvement, a, b)
        yield f"a seed of B is better than one of A on a task: {_shown(better)}"


def before_and_after(folder: Path, mean_of: Sequence[str]) -> list[str]:
    """Compare the first and the last evaluation of a training run, or say why not; nothing where it has one."""
    try:
        return list(_before_and_after(evaluations_of(folder), mean_of, tasks=False))
    except (ValueError, OSError) as error:
        return [f"before and after are not compared: {error}"]


def ablated_file(ablation: str) -> str:
    """Return the name of the file with the results of an ablation: ``episodes_blank_images.jsonl``."""
    return f"{Path(NAME).stem}_{ablation}.jsonl"


def ablations_of(folder: Path) -> list[str]:
    """List the ablations that the folder of an evaluation has results of."""
    pattern = re.compile(ablated_file(r"(?!rank\d)(\w+?)(_rank\d+)?"))
    there = sorted(folder.iterdir()) if folder.is_dir() else []
    return list(dict.fromkeys(match[1] for path in there if (match := pattern.fullmatch(path.name))))


def _compare_own(folder: Path, mean_of: Sequence[str]) -> Iterator[str]:
    if len(evaluations := evaluations_of(folder)) > 1:
        yield from _before_and_after(evaluations, mean_of, tasks=True)
        return
    if not (ablations := ablations_of(folder)):
        raise ValueError(f"{folder} has one evaluation; with what? type: vla-recipe compare {folder} OTHER")
    one = Found(folder, {"": folder / NAME}, folder)
    for name in ablations:
        other = Found(folder, {"": folder / ablated_file(name)}, folder)
        yield from _tables(one, other, mean_of, ("normal", name))


def _before_and_after(evaluations: Sequence[Found], mean_of: Sequence[str], *, tasks: bool) -> Iterator[str]:
    if len(evaluations) > 1:
        one, other = evaluations[0], evaluations[-1]
        said = f"before {one.place.name}, after {other.place.name}"
        yield from _tables(one, other, mean_of, ("before", "after"), said, tasks=tasks)


def _tables(
    one: Found, other: Found, mean_of: Sequence[str], names: tuple[str, str], said: str = "", *, tasks: bool = True
) -> Iterator[str]:
    """Compare each kind of evaluation that both have."""
    first, second = names
    for kind in [kind for kind in one.files if kind in other.files]:
        both = [read_episodes(each.files[kind]) for each in (one, other)]
        for place, results in zip((one.place, other.place), both, strict=True):
            yield from (f"  {text}" for text in _unfinished(place, results))
        found = compare(both[0], both[1], mean_of)
        title = [f"{second} - {first}, paired over {len(found.pairs)} episodes", kind, said]
        yield f"\n{'; '.join(filter(None, title))}\n{found.table(first, second, tasks=tasks)}"


def _find(path: Path) -> Found:
    """Find the results in a file, an evaluation or a run, of which its last evaluation counts."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or folder; type the folder of a run")
    run = next((each for each in (path, *path.absolute().parents) if (each / "config.yaml").is_file()), path)
    if path.is_file():
        return Found(path, {"": path}, run)
    sampled = settings_of(run).get("greedy") is False
    names = {"sampled" if sampled else "greedy": path / NAME}
    if not files_of(path / NAME):  # an interrupted one may have files of other processes alone
        names = {"greedy": path / IN_TRAINING, "sampled": path / "eval_sampled.jsonl"}
    if files := {kind: file for kind, file in names.items() if files_of(file)}:
        return Found(path, files, run)
    if evaluations := evaluations_of(path):
        return evaluations[-1]
    raise ValueError(
        f"{path} has no results of episodes: neither {NAME} nor evaluations/; type the folder of a run, of "
        "an evaluation, or such a file"
    )


def _seeds_of(runs: Sequence[Path]) -> Iterator[tuple[str, Seeds]]:
    """Yield what to say, and the counts, of each kind of evaluation that all have."""
    found = [_find(path) for path in runs]
    if len({each.place.resolve() for each in found}) < len(found):
        raise ValueError("one of them is there twice; type each seed once")
    if not (kinds := [kind for kind in found[0].files if all(kind in each.files for each in found)]):
        raise ValueError(
            "they share no kind of evaluation, greedy or sampled; type folders alone, or .jsonl files alone"
        )
    texts = [f"differs: {text}" for each in found[1:] for text in _differences(found[0].run, each.run)]
    texts += [f"not the benchmark's: {text}" for text in read_record(found[0].run).get("protocol_deviations") or ()]
    for kind in kinds:
        results = {str(each.place): read_episodes(each.files[kind]) for each in found}
        for text in (text for place in results for text in _unfinished(place, results[place])):
            raise ValueError(text)
        seeds = Seeds.of(results)
        crashed = sum(map(len, results.values())) - seeds.episodes.sum()
        rates = [f"{place} {100 * rate:.1f}%" for place, rate in zip(results, seeds.pooled().scores[:, 0], strict=True)]
        title = f"{seeds.episodes.sum()} episodes of {seeds.episodes.shape[1]} tasks, with 95 % intervals"
        title = "; ".join(filter(None, [title, kind, crashed and f"{crashed} crashed and are not counted"]))
        yield "\n".join(["", *(f"  {text}" for text in dict.fromkeys(texts)), title, ", ".join(rates)]), seeds


def _unfinished(place: Path | str, results: Sequence[EpisodeResult]) -> Iterator[str]:
    own = Path(place).absolute()
    broken_off = (own / IDENTITY).exists() and not (own / "metrics.json").exists()
    broken_off |= not _evaluations(own.parent.parent).get(own, True)
    if broken_off or [each.index for each in results] != list(range(len(results))):
        yield f"{place} is not finished, and solved episodes end first: its rates are too high; type its command again"


def _shown(found: Estimate, form: str = ".1f", unit: str = "%") -> str:
    return f"{100 * found.value:{form}}{unit} ({100 * found.low:{form}} to {100 * found.high:{form}})"


def evaluations_of(run: Path) -> list[Found]:
    """List the finished evaluations of a training run, in their order."""
    finished = [path for path, done in _evaluations(run).items() if done]
    return [_find(path) for path in finished if any(path.glob("eval*.jsonl"))]


def _evaluations(run: Path) -> dict[Path, bool]:
    """Say which evaluations of a training run, in order, finished; what its metrics.jsonl lacks was broken off."""
    found = [(path.name.rpartition("_")[2], path) for path in run.glob("evaluations/iteration_*")]
    there = {int(step): path for step, path in found if step.isdigit()}
    lines = entries(run / "metrics.jsonl")
    done = {step for step, episodes in points(lines, "eval/num_episodes") if episodes} if lines else there.keys()
    return {there[step]: step in done for step in sorted(there)}


def _mean_of(found: Found) -> list[str]:
    return list(settings_of(found.run).get("eval", {}).get("mean_of") or ())


def _differences(first: Path, second: Path) -> Iterator[str]:
    """Say what differs between two runs of what an episode is."""
    one, other = read_record(first), read_record(second)
    both = {name: (one.get(name) or "none", other.get(name) or "none") for name in ("protocol", "protocol_deviations")}
    envs = _env(first), _env(second)
    if all(envs):
        hidden = set.union(*(unseen(str(env.get("env.id"))) for env in envs)) - {"ignore_terminations"}
        shown = [name for name in sorted({**envs[0], **envs[1]}) if hidden.isdisjoint(name.split(".")[1:])]
        both |= {name: (as_typed(envs[0].get(name)), as_typed(envs[1].get(name))) for name in shown}
    yield from (f"{name}: {here} and {there}" for name, (here, there) in both.items() if here != there)


def _env(run: Path) -> dict[str, Any]:
    """List the settings of the environment in which a run is evaluated, by name; nothing where they are unknown."""
    config = settings_of(run)
    return flat(evaluated_env(config["env"], config.get("eval", {})), "env") if "env" in config else {}
