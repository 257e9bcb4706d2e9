"""``vla-recipe report RUN ...``: what came of a run, or of several, as a page: one file, which needs no network.

What a folder says may be a stranger's: the template escapes it, and the page forbids itself scripts.
"""

import base64
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from vla_algos.comparison import Pairs, Row, compare, rows_of
from vla_algos.files import check_links, write_atomically
from vla_algos.results import NAME, EpisodeResult, read_episodes
from vla_algos.run.arguments import compose_settings
from vla_algos.run.comparing import ablated_file, ablations_of, evaluations_of
from vla_algos.run.folder import flat, settings_of
from vla_algos.run.logging import entries, never_trained
from vla_algos.run.plots import number, plots, points
from vla_algos.run.provenance import read_record
from vla_common.experiments import as_typed

PAGE = "report.html"
LARGEST = 5_000_000  # bytes of a page
_FILMS, _FILM_BYTES = 24, 2_400_000  # on a page; as text they are a third longer
_MARKS = ("config.yaml", "run.json", "metrics.jsonl", NAME)  # the folder of a run has one of them
_FREE = ("seed", "resume", "checkpoint_every", "launcher.", "logger.", "train_videos.")  # make no other experiment
_PARTS = {  # of the time of an iteration
    "collecting": "time/rollout",
    "… simulators": "time/env",
    "… policy": "time/policy",
    "update": "time/train",
    "sending weights": "time/weight_sync",
}


def write_report(folders: Sequence[Path], to: Path | None = None, conf: Path | None = None) -> Path:
    """Write the page of runs. Those that differ in their seed alone are shown as one, with bands; others are compared.

    ``folders`` are of runs, or of sweeps, which have runs in them. Returns the file ``to``: by default ``report.html``
    in the folder, or of several in the working one. ``conf`` says what the defaults are. FileNotFoundError: there is no
    such folder. ValueError: a folder has no run, or a link out of it; or the file is there and is no such page.
    """
    runs = [_Run(folder) for given in folders for folder in _runs_in(given)]
    file = to or (folders[0] if len(folders) == 1 else Path()) / PAGE
    if file.is_dir() or (file.exists() and "vla-recipe report" not in file.read_text(errors="replace")[:1000]):
        raise ValueError(f"{file} is there and is no page of vla-recipe report; type --to FILE.html for another one")
    from jinja2 import Environment, FileSystemLoader  # at the end of a run, not as each begins

    settings = [{key: str(v) for key, v in sorted(run.settings.items()) if not key.startswith(_FREE)} for run in runs]
    names = [key for key in settings[0] if len(found := {own.get(key) for own in settings}) > 1 and None not in found]
    grouped: dict[tuple[str, str], list[_Run]] = {}
    for run, own in zip(runs, settings, strict=True):
        grouped.setdefault((", ".join(f"{name}={own[name]}" for name in names), str(own)), []).append(run)
    several = len({label for label, _ in grouped}) < len(grouped)  # settings that not all of them have
    groups = [_Group(str(each[0].folder) if several else label, each, conf) for (label, _), each in grouped.items()]
    films, shown, room = [row for group in groups for row in group.films], dict[Path, str](), _FILM_BYTES
    for row in films:
        size = sum(film.stat().st_size for *_, film in row)
        if size <= room and len(shown) + len(row) <= _FILMS:
            room -= size
            shown |= {film: f"data:video/mp4;base64,{base64.b64encode(film.read_bytes()).decode()}" for *_, film in row}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"default": vars}
    curves = plots({group.label: [run.lines for run in group.runs] for group in groups})
    left_out = sum(len(row) for row in films) - len(shown)
    template = environment.get_template("report.html.jinja")
    page = template.render(runs=runs, groups=groups, plots=curves, films=shown, left_out=left_out)
    if len(page.encode()) > LARGEST:
        raise ValueError(f"the page of {len(runs)} runs has more than {LARGEST // 10**6} MB; type fewer of them")
    write_atomically(file, page)
    return file


def report_at_end(folder: Path, conf: Path | None) -> str:
    """Write the page of a run that is complete, and stays so where that fails; returns what to print."""
    try:
        return f"{'report':<12} {write_report([folder], conf=conf)}"
    except Exception as error:
        return f"warning: there is no page of this run ({error}); to try again type: vla-recipe report {folder}"


def _runs_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder; type that of a run, such as runs/ppo/latest")
    if any((folder / mark).is_file() for mark in _MARKS):
        return [folder]
    inside = sorted({path.parent for mark in _MARKS for path in folder.glob(f"*/{mark}")})
    if not (found := [path for path in inside if not path.is_symlink()]):  # latest is one of the others
        raise ValueError(f"{folder} has no run in it; type the folder of a run, such as runs/ppo/latest")
    return found


class _Evaluation(NamedTuple):
    """How an evaluation is called, where its videos are, and results by kind (greedy, sampled)."""

    heading: str
    videos: Path
    results: Mapping[str, Sequence[EpisodeResult]]


class _Run:
    """What the folder of a run has; of evaluations that were broken off nothing, because solved episodes end first."""

    def __init__(self, folder: Path):
        check_links(folder)
        self.folder, self._nested, self.record = folder.resolve(), settings_of(folder), read_record(folder)
        self.settings, self.lines = flat(self._nested), entries(folder / "metrics.jsonl")
        self.recipe = str(self.settings.get("recipe", "a run"))
        self.suite = str(self.record.get("evaluated_on") or self.settings.get("env.id", "an unknown suite"))
        self.unit, planned = ("step", "cloning.steps") if self.recipe == "sft" else ("iteration", "iterations")
        self.done, self.planned = max((line["step"] for line in self.lines), default=0), self.settings.get(planned)
        self.last = {name: value for line in self.lines for name in line if (value := number(line, name)) is not None}
        whole = number(self.record, "seconds") if "finished" in self.record else None
        self.seconds = self.last.get("time/elapsed", 0.0) if whole is None else whole
        self.process: dict[str, Any] = (self.record.get("processes") or [{}])[-1]
        self.never_trained, self.not_compared = never_trained(folder), 0
        self.evaluations = list(self._ablated() if self.recipe == "evaluate" else self._of_training())
        kinds = list(dict.fromkeys(kind for each in self.evaluations for kind in each.results))
        self.kind = kinds[0] if kinds else ""
        self.rows = {kind: self._rows(pairs) for kind in kinds if (pairs := self._pairs(kind))}
        ablated = self.evaluations[1:] if self.recipe == "evaluate" else []
        compared = {each.heading: self._compared(self.evaluations[0], each, self.kind) for each in ablated}
        self.ablations = {heading: Row.of(pairs) for heading, pairs in compared.items() if pairs}

    def _ablated(self) -> Iterator[_Evaluation]:
        if (self.folder / "metrics.json").is_file():
            kind = "sampled" if self.settings.get("greedy") is False else "greedy"
            for name in ["", *ablations_of(self.folder)]:
                file = self.folder / (ablated_file(name) if name else NAME)
                videos, results = self.folder / "videos" / name, {kind: read_episodes(file)}
                yield _Evaluation(name.replace("_", " ") or "as it is", videos, results)

    def _of_training(self) -> Iterator[_Evaluation]:
        there = evaluations_of(self.folder)
        for each in there[:1] + there[1:][-1:]:
            step = int(each.place.name.rpartition("_")[2])
            heading = "before" if step == 0 else "after" if step == self.planned else f"after {step} {self.unit}s"
            results = {kind: read_episodes(file) for kind, file in each.files.items()}
            yield _Evaluation(heading, self.folder / "videos" / each.place.name, results)

    def _pairs(self, kind: str) -> Pairs:
        first, *others = self.evaluations
        if others and self.recipe != "evaluate":
            return self._compared(first, others[-1], kind)
        finished = [each for each in first.results[kind] if not each.crashed]
        return [(each, None) if first.heading == "before" else (None, each) for each in finished]

    def _compared(self, first: _Evaluation, second: _Evaluation, kind: str) -> Pairs:
        try:
            found = compare(first.results.get(kind, []), second.results.get(kind, []))
        except ValueError:  # they share no episode
            self.not_compared += len(second.results.get(kind, []))
            return []
        self.not_compared += found.first_alone + found.second_alone + found.crashed
        return found.pairs

    def _rows(self, pairs: Pairs) -> dict[str, Row]:
        groups = rows_of(pairs, "group")
        found, mean_of = {"all tasks": Row.of(pairs)}, self._nested.get("eval", {}).get("mean_of")
        if mean_of and groups.keys() >= {*mean_of}:
            found[f"mean of {', '.join(mean_of)}"] = Row.mean([groups[name] for name in mean_of])
        return found | {f"all {name}": row for name, row in groups.items() if len(groups) > 1} | rows_of(pairs, "task")

    @property
    def command(self) -> str:
        """What was typed."""
        typed = (self.record.get("submitted") or self.process).get("command")
        return shlex.join(map(str, [Path(str(typed[0])).name, *typed[1:]])) if isinstance(typed, list) and typed else ""

    @property
    def time(self) -> dict[str, float]:
        """Seconds by part."""
        sums = {part: sum(value for _, value in points(self.lines, name)) for part, name in _PARTS.items()}
        if whole := sum(value for _, value in points(self.lines, "time/iteration")):
            sums["the rest of an iteration"] = whole - sum(sums[part] for part in sums if part[0] != "…")
            sums["evaluations, cloning, saving"] = self.seconds - whole
        return {part: seconds for part, seconds in sums.items() if seconds > 0} | {"all": self.seconds}


class _Group:
    """Runs of one setting, which differ in their seed alone; ``label`` says what differs from other groups."""

    def __init__(self, label: str, runs: list[_Run], conf: Path | None):
        self.label, self.runs, self.first, self._conf = label, runs, runs[0], conf
        self.tables: dict[str, dict[str, Row]] = {}  # by kind and task
        for kind in dict.fromkeys(kind for run in runs for kind in run.rows):
            parts = [run.rows[kind] for run in runs if kind in run.rows]
            names = dict.fromkeys(name for part in parts for name in part)
            self.tables[kind] = {name: Row.mean([p[name] for p in parts if name in p]) for name in names}

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Episodes that fail in the end: in how many runs, and in how many of these they were solved before."""
        found: dict[str, dict[str, Any]] = {}
        for run in (run for run in self.runs if run.evaluations):
            first, last = run.evaluations[0], run.evaluations[0 if run.recipe == "evaluate" else -1]
            solved = {each.name for each in first.results.get(run.kind, ()) if each.success_once}
            failed = {each.name: each for each in last.results.get(run.kind, ()) if not each.success_once}
            for each in failed.values():
                row = found.setdefault(each.name, {"result": each, "times": 0, "before": 0})
                row.update(times=row["times"] + 1, before=row["before"] + (each.name in solved))
        return sorted(found.values(), key=lambda row: (-row["times"], row["result"].index))

    @property
    def films(self) -> list[list[tuple[str, EpisodeResult, Path]]]:
        """Filmed episodes of the first run: of each its films, as evaluations are called, with the result."""
        found: dict[int, list[tuple[str, EpisodeResult, Path]]] = {}
        for each in self.first.evaluations:
            for result in each.results.get(self.first.kind, ()):
                for film in each.videos.glob(f"{result.index:03d}_*.mp4"):
                    found.setdefault(result.index, []).append((each.heading, result, film))
        return [found[index] for index in sorted(found)]

    @property
    def deviations(self) -> list[str] | None:
        """What differs from the benchmark's protocol; ``None`` where that is not known."""
        known = [said for run in self.runs if isinstance(said := run.record.get("protocol_deviations"), list)]
        return list(dict.fromkeys(str(text) for said in known for text in said)) if known else None

    @property
    def settings(self) -> list[tuple[str, str, str]]:
        """Settings that are not the recipe's own: name, the recipe's, and that of these runs, as they are typed."""
        recipe, now = self.first.recipe, self.first.settings
        if self._conf is None or recipe not in [path.stem for path in self._conf.glob("*.yaml")]:
            return []
        default = flat(OmegaConf.to_container(compose_settings(recipe, [], self._conf), resolve=True))
        changed = [name for name in now if now[name] != default.get(name, ...) and not name.startswith(_FREE)]
        return [(name, as_typed(default[name]) if name in default else "", as_typed(now[name])) for name in changed]

    @property
    def time(self) -> dict[str, float]:
        """Seconds by part, mean of the runs."""
        times = [run.time for run in self.runs]
        return {part: fmean(each.get(part, 0.0) for each in times) for part in {**times[-1], **times[0]}}
