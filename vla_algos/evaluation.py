"""Evaluation on fixed episodes: every episode counts, whichever finishes first."""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import ExplorationType

from vla_algos.ablations import Observe
from vla_algos.collectors import EpisodeCollector
from vla_algos.files import write_atomically
from vla_algos.intervals import Estimate, mean_interval, mean_of_estimates, wilson_interval
from vla_algos.policies import Policy, as_module
from vla_algos.results import IDENTITY, IN_TRAINING, NAME, EpisodeResult, as_lines, files_of, parts_of, read_episodes
from vla_common import keys
from vla_common.plain import read_json
from vla_common.settings import Count
from vla_common.texts import to_strings
from vla_envs.env import base_env
from vla_envs.simulator import Episode, SimulatorSpec
from vla_envs.workers.calls import reason

TRAINING_ENV = "environment.json"  # of a policy's folder: in what a recipe trained it
_NAMED = 5  # crashed episodes that a table names


def estimate_chains(results: Sequence[EpisodeResult], chain_length: int) -> dict[str, Estimate]:
    """Estimate ``avg_num_subtasks`` of chains, and shares: ``success_len_2`` of those with two or more solved tasks."""
    if chain_length == 1:
        return {}
    solved = [result.subtasks or 0 for result in results]
    found = {"avg_num_subtasks": Estimate(_mean(solved), *mean_interval(solved, chain_length))}
    for length in range(1, chain_length + 1):
        reached = [number >= length for number in solved]
        found[f"success_len_{length}"] = Estimate(_mean(reached), *wilson_interval(sum(reached), len(reached)))
    return found


def _deviations_file(episodes: Path) -> Path:
    return episodes.with_suffix(".deviations.json")


@dataclass(frozen=True)
class EvaluationResult:
    """The results of all episodes.

    Attributes:
        episodes: one result per episode, in their order.
        videos: frames uint8 ``[decisions + 1, H, W, 3]`` of the recorded episodes, by the index of their result.
        broken: why it ended before all episodes had run; empty if it did not.
        captions: of each frame of ``videos``: the instruction, the return so far, and whether it is solved.
        chain_length: tasks that an episode asked for one after the other.
        mean_of: suites or difficulties of which the mean is reported too, each counting the same.
        protocol_deviations: how the environment of :func:`evaluate` differs from the benchmark's; recipes say it too.
    """

    episodes: list[EpisodeResult]
    videos: dict[int, np.ndarray] = field(default_factory=dict)
    broken: str = ""
    captions: dict[int, list[str]] = field(default_factory=dict)
    chain_length: int = 1
    mean_of: tuple[str, ...] = ()
    protocol_deviations: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: str | Path, *, chain_length: int = 1, mean_of: Sequence[str] = ()) -> "EvaluationResult":
        """Read what :meth:`save`, or a recipe, has written: a folder with ``episodes.jsonl``, or a file of such lines.

        A ``FileNotFoundError`` if nothing is there; a ``ValueError`` if it has no results, or of chains of tasks and
        ``chain_length``, which lines do not say, is wrong.
        """
        path = Path(path)
        file = path / NAME if path.is_dir() else path
        if not files_of(file):
            raise FileNotFoundError(
                f"{file}: there is no such file; give the folder or file of EvaluationResult.save, or the folder of "
                "an evaluation by a recipe"
            )
        episodes = read_episodes(file)
        most = max((result.subtasks or 0 for result in episodes), default=0)
        chains = any(result.subtasks is not None for result in episodes)
        if chains != (chain_length > 1) or most > chain_length:
            said = "chains of tasks" + f", of which {most} were solved" * (most > 1) if chains else "no chains of tasks"
            right = "the length of the environment: chain_length=env.simulator_spec.chain_length"
            raise ValueError(f"{file}: its episodes are {said}; give {right if chains else 'chain_length=1'}")
        note = _deviations_file(file)
        deviations = tuple(map(str, read_json(note, list))) if note.exists() else ()
        return cls(episodes, chain_length=chain_length, mean_of=tuple(mean_of), protocol_deviations=deviations)

    def save(self, path: str | Path) -> Path:
        """Write the episodes that were tried, one to a line, which ``vla-recipe compare`` reads. Returns the file.

        ``path`` is a folder, which gets ``episodes.jsonl``, or a ``.jsonl`` file; what is there is replaced, but for
        the evaluation of a recipe (``FileExistsError``). ``protocol_deviations``, if there are any, are in
        ``episodes.deviations.json`` of the same folder.
        """
        path = Path(path)
        file = path if path.suffix == ".jsonl" else path / NAME
        if (file.parent / IDENTITY).exists() or (file.parent / IN_TRAINING).exists():
            raise FileExistsError(f"{file.parent} has an evaluation by a recipe, which resumes there; save elsewhere")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, as_lines(self.episodes))
        if self.protocol_deviations:
            write_atomically(_deviations_file(file), json.dumps(self.protocol_deviations) + "\n")
        else:
            _deviations_file(file).unlink(missing_ok=True)
        for part in parts_of(file):
            part.unlink()
        return file

    @property
    def finished(self) -> list[EpisodeResult]:
        """The episodes that have a result, all but the crashed ones."""
        return [result for result in self.episodes if not result.crashed]

    @property
    def crashed(self) -> list[EpisodeResult]:
        """The episodes that were tried and have no result."""
        return [result for result in self.episodes if result.crashed and result.attempts]

    @property
    def failure(self) -> str:
        """Why there is no result, or not of all episodes; empty if only crashed ones lack."""
        if not self.broken and (self.finished or not self.episodes):
            return ""
        lacking = len(self.episodes) - len(self.finished)
        why = self.broken or f"every one crashed: {next((r.error for r in self.crashed if r.error), 'see above')}"
        return f"{lacking} of {len(self.episodes)} episodes have no result; {why}"

    @property
    def success_once(self) -> float:
        """Share of the finished episodes that were solved at some time."""
        return _mean(result.success_once for result in self.finished)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of :attr:`success_once`."""
        return _interval(self.finished)

    def by_task(self) -> dict[str, list[EpisodeResult]]:
        """Finished episodes by task name, tasks in the order of the episodes."""
        return self._by("task")

    def by_group(self) -> dict[str, list[EpisodeResult]]:
        """Finished episodes by suite or difficulty, where there is more than one."""
        groups = self._by("group")
        return groups if len(groups) > 1 else {}

    def _by(self, attribute: str) -> dict[str, list[EpisodeResult]]:
        parts: dict[str, list[EpisodeResult]] = {getattr(result, attribute): [] for result in self.episodes}
        for result in self.finished:
            parts[getattr(result, attribute)].append(result)
        return parts

    def mean_of_groups(self) -> tuple[Estimate, float] | None:
        """Average success once, and at the end, over the groups of ``mean_of``, if each has a finished episode."""
        groups = [[result for result in self.finished if result.group == name] for name in self.mean_of]
        if not groups or not all(groups):
            return None
        once = [Estimate(_mean(r.success_once for r in group), *_interval(group)) for group in groups]
        return mean_of_estimates(once), _mean(_mean(r.success_at_end for r in group) for group in groups)

    def _parts(self) -> dict[str, list[EpisodeResult]]:
        """Finished episodes by where their metrics stand: over all, per task and per group."""
        tasks = {f"task/{name}/": results for name, results in self.by_task().items()}
        return {"": self.finished, **tasks, **{f"group/{name}/": part for name, part in self.by_group().items()}}

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """Return means over the finished episodes and of every task and group; of :attr:`mean_of` ``mean/...``."""
        metrics = {
            "return": _mean(result.episode_return for result in self.finished),
            "episode_len": _mean(result.episode_len for result in self.finished),
            "num_episodes": len(self.finished),
            "crashed_episodes": len(self.crashed),
        }
        for place, results in self._parts().items():
            metrics[f"{place}success_once"] = _mean(result.success_once for result in results)
            metrics[f"{place}success_at_end"] = _mean(result.success_at_end for result in results)
            for name, estimate in estimate_chains(results, self.chain_length).items():
                metrics[f"{place}{name}"] = estimate.value
        if (mean := self.mean_of_groups()) is not None:
            metrics |= {"mean/success_once": mean[0].value, "mean/success_at_end": mean[1]}
        return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}

    def intervals(self, prefix: str = "eval") -> dict[str, tuple[float, float]]:
        """Return 95 % intervals: :attr:`interval`, of the mean of groups, and of what :func:`estimate_chains` adds."""
        found = {f"{prefix}/interval": self.interval}
        if (mean := self.mean_of_groups()) is not None:
            found[f"{prefix}/mean/interval"] = (mean[0].low, mean[0].high)
        for place, results in self._parts().items():
            for name, estimate in estimate_chains(results, self.chain_length).items():
                found[f"{prefix}/{place}{name}/interval"] = (estimate.low, estimate.high)
        return found

    def table(self) -> str:
        """Tabulate success per task, per group and over all, with 95 % intervals, for the terminal."""
        rows = self.by_task()
        if len(rows) > 1:
            rows |= {f"all {name}": results for name, results in self.by_group().items()}
            rows["all tasks"] = self.finished
        width = max(map(len, rows), default=0)
        lines = [f"{'task':<{width}}  episodes  success  95 % interval  at end  length"]
        for name, results in rows.items():
            if not results:
                lines.append(f"{name:<{width}}  {0:8}  {'-':>7}  {'-':^13}  {'-':>6}  {'-':>6}")
                continue
            low, high = _interval(results)
            once, at_end = _mean(r.success_once for r in results), _mean(r.success_at_end for r in results)
            lines.append(
                f"{name:<{width}}  {len(results):8}  {100 * once:6.1f}%  {100 * low:5.1f} - {100 * high:5.1f}"
                f"  {100 * at_end:5.1f}%  {_mean(r.episode_len for r in results):6.1f}"
            )
        lines += [*self._mean_lines(), *self._chain_lines(rows), *self._lines_without_result()]
        return "\n".join([*lines, *(f"not the benchmark's: {text}" for text in self.protocol_deviations)])

    def _mean_lines(self) -> list[str]:
        names = ", ".join(self.mean_of)
        if (mean := self.mean_of_groups()) is None:
            return [f"mean of {names}: none, one of them has no result"] if self.mean_of else []
        once, at_end = mean
        return [
            f"mean of {names}: success {100 * once.value:.1f}%, at end {100 * at_end:.1f}%; "
            f"95 % interval of success {100 * once.low:.1f} - {100 * once.high:.1f}"
        ]

    def _lines_without_result(self) -> list[str]:
        lines, crashed = [], self.crashed
        if not_run := len(self.episodes) - len(self.finished) - len(crashed):
            lines.append(f"not run: {not_run} (no result)")
        if crashed:
            names = "; ".join(result.name for result in crashed[:_NAMED])
            more = f"; and {len(crashed) - _NAMED} more" if len(crashed) > _NAMED else ""
            lines.append(f"crashed: {len(crashed)} (their simulator failed; no result): {names}{more}")
        if remarked := [result for result in self.episodes if result.remark]:
            lines.append(f"with a remark: {len(remarked)}, such as {remarked[0].name}: {remarked[0].remark}")
        return lines

    def _chain_lines(self, rows: Mapping[str, Sequence[EpisodeResult]]) -> list[str]:
        if self.chain_length == 1:
            return []
        width = max(map(len, rows), default=0)
        shares = [f"{name:>16}" for name in list(estimate_chains([], self.chain_length))[1:]]
        header = "  ".join([f"{'task':<{width}}", f"{'avg_num_subtasks':>17}", *shares])
        lines = ["", f"of chains of {self.chain_length} tasks, with 95 % intervals", header]
        for row, results in rows.items():
            cells = [f"{'-':>17}", *[f"{'-':>16}"] * self.chain_length]
            if results:
                mean, *estimates = estimate_chains(results, self.chain_length).values()
                cells = [f"{mean.value:.2f}, {mean.low:.2f} - {mean.high:.2f}"]
                for share in estimates:
                    interval = f"{100 * share.low:.0f} - {100 * share.high:.0f}"
                    cells.append(f"{100 * share.value:5.1f}%, {interval:>8}")
            lines.append("  ".join([f"{row:<{width}}", *cells]))
        return lines


def film(
    shots: dict[int, list[tuple[np.ndarray, str]]],
    outcome: TensorDictBase,
    rows: Mapping[int, int],
    *,
    restart: bool = False,
) -> None:
    """Add copies of the frame after a decision, and of that before it where an episode begins, with captions.

    ``shots`` get them by episode or environment, which ``rows`` has by row of ``outcome`` ``[N]``; with ``restart`` an
    episode that begins replaces what was filmed before.
    """
    after = outcome[keys.NEXT]
    instructions = (to_strings(outcome), to_strings(outcome, (keys.NEXT, keys.TASK_DESCRIPTIONS))) if rows else ()
    for row, whose in rows.items():
        filmed, (before, now) = shots.setdefault(whose, []), (texts[row] for texts in instructions)
        if after[keys.EPISODE_LEN][row] == after[keys.STEP_MASK][row].sum():  # it begins, perhaps after a crash
            if restart:
                filmed.clear()
            filmed.append((outcome[keys.IMAGES][row].cpu().numpy().copy(), f"{before}\nreturn 0.00"))
        so_far, solved = float(after[keys.EPISODE_RETURN][row]), bool(after[keys.SUCCESS][row])
        caption = f"{now}\nreturn {so_far:.2f}{', solved' if solved else ''}"
        filmed.append((after[keys.IMAGES][row].cpu().numpy().copy(), caption))


def evaluate(
    env: EnvBase,
    policy: Policy,
    episodes: Iterable[Episode],
    *,
    indices: Sequence[int] | None = None,
    greedy: bool = True,
    observe: Observe | None = None,
    on_episode: Callable[[EpisodeResult], None] | None = None,
    record: int = 0,
    keep_actions: bool = False,
    stages: Count = 1,
    overlap_resets: bool = False,
) -> EvaluationResult:
    """Run every episode once; a collector of ours that used ``env`` begins with fresh episodes after it.

    Args:
        env: a :class:`~vla_envs.env.VLAEnv`, with or without transforms; returns are those of the environment itself.
        policy: any TensorDictModule that writes ``action``, or a callable that does. One of ours has to fit ``env``
            (:meth:`~vla_policies.policy.VLAPolicy.check_environment`); behind transforms that is not checked. A
            warning says if the folder that it was loaded from tells of training in another environment.
        episodes: what to run, see :func:`~vla_envs.episodes.evaluation_episodes`.
        indices: of ``episodes`` among all those of an evaluation that is shared, in results and for ``observe``.
        greedy: take the policy's greedy action; sample if False.
        observe: changes what the policy sees, see :mod:`vla_algos.ablations`: gets and returns the policy's inputs, of
            which ``episode_index`` is the place among ``episodes``, or one of ``indices`` (-1: none), and
            ``decision_index`` counts from 0.
        on_episode: called with each result, in the order of finishing.
        record: keep the frames of the first so many episodes.
        keep_actions: keep in each result what was executed, but of chunks that are one motion.
        stages: of :class:`~vla_algos.collectors.EpisodeCollector`; other batches round otherwise.
        overlap_resets: likewise.

    Returns:
        Results in the order of ``episodes``; crashes count as :class:`~vla_algos.collectors.EpisodeCollector` does.

    Raises:
        ValueError: the policy cannot act there; or it should record, but a transform has changed the images.
        SimulatorCrash: simulators fail whatever they are to run; ``on_episode`` has got the results so far.
    """
    spec = base_env(env).simulator_spec
    if record and getattr(env.observation_spec.get(keys.IMAGES, None), "dtype", None) != torch.uint8:
        raise ValueError(
            f"record={record}, but a transform of the environment has changed {keys.IMAGES!r}, which are filmed: give "
            'it out_keys=["pixels"], or record=0'
        )
    if hasattr(policy, "check_environment") and not isinstance(env, TransformedEnv):  # which may show it what it reads
        policy.check_environment(spec)
    _warn_of_other_training(policy, spec)
    wanted = list(episodes)
    places = range(len(wanted)) if indices is None else indices
    if len(places) != len(wanted):
        raise ValueError(f"there are {len(places)} indices for {len(wanted)} episodes; give one for each")
    recorded = set(places[:record])
    shots: dict[int, list[tuple[np.ndarray, str]]] = {}
    results: dict[int, EpisodeResult] = {}

    def deciding() -> tuple[list[int], list[int]]:
        return [-1 if each is None else places[each.queue_index] for each in collector.deciding], collector.decided

    def record_decision(outcome: TensorDictBase) -> None:
        rows = {slot: index for slot, index in enumerate(deciding()[0]) if index in recorded}
        film(shots, outcome, rows, restart=True)

    def note(place: int, decisions: TensorDictBase) -> None:
        result = _result(spec, wanted[place], place, decisions[keys.NEXT][-1], collector)
        keeps = keep_actions and not result.crashed and spec.control_frequency is not None
        result = replace(result, index=places[place], actions=executed(decisions) if keeps else None)
        results[result.index] = result
        if on_episode is not None:
            on_episode(result)

    actor = as_module(policy, env)
    asks_where = keys.DECISION_INDEX in actor.in_keys
    collector = EpisodeCollector(
        env,
        _Observing(actor, observe or (lambda seen: seen), deciding) if observe or asks_where else actor,
        wanted,
        exploration=ExplorationType.DETERMINISTIC if greedy else ExplorationType.RANDOM,
        for_learning=False,
        stages=stages,
        overlap_resets=overlap_resets,
        on_episode=note,
        step_hook=record_decision if record else None,
    )
    training = [module for module in actor.modules() if module.training]  # one that was in eval() by itself stays so
    actor.eval()
    try:
        for _ in collector.iterator():  # not iter(): a failure must not close the caller's environment
            pass
    finally:
        for module in training:
            module.training = True
    ordered = [results[index] for index in places]
    filmed = {index: tuple(zip(*shots[index], strict=True)) for index in sorted(shots) if not results[index].crashed}
    videos = {index: np.stack(frames) for index, (frames, _) in filmed.items()}
    captions = {index: [*said] for index, (_, said) in filmed.items()}
    deviations = spec.protocol_deviations
    return EvaluationResult(ordered, videos, "", captions, spec.chain_length, protocol_deviations=deviations)


def _warn_of_other_training(policy: Policy, spec: SimulatorSpec) -> None:
    folder = getattr(policy, "loaded_from", None)
    if folder is None or not (note := Path(folder) / TRAINING_ENV).is_file():
        return
    trained = read_json(note)
    env, then = trained.get("env"), _seen(trained.get("protocol_deviations"))
    suites = [env.get("id") if isinstance(env, dict) else None, trained.get("evaluated_on")]  # may be another suite
    if spec.id not in suites or then != _seen(spec.protocol_deviations):
        both = (suites[0] or suites[1], then), (spec.id, _seen(spec.protocol_deviations))
        ways = (f"{name} ({'; '.join(deviations) or 'as the benchmark has it'})" for name, deviations in both)
        warnings.warn(
            f"{note.parent} was trained for {', and is evaluated on '.join(ways)}; "
            "make_env(**vla_algos.run.env_of(FOLDER)) is the former",
            stacklevel=3,
        )


def _seen(deviations: Any) -> list[str]:
    """List what a policy sees of the deviations that a file, perhaps a stranger's, or a spec has."""
    texts = map(str, deviations if isinstance(deviations, (list, tuple)) else ())
    return [text for text in texts if not text.startswith("training reward")]


def _result(
    spec: SimulatorSpec, episode: Episode, place: int, outcome: TensorDictBase, collector: EpisodeCollector
) -> EpisodeResult:
    task, crashed = spec.tasks[episode.task_id], bool(outcome[keys.CRASHED])
    return EpisodeResult(
        episode,
        task.name,
        bool(outcome[keys.SUCCESS]) and not crashed,
        bool(outcome[keys.SUCCESS_AT_END]) and not crashed,
        float(outcome[keys.EPISODE_RETURN]),
        int(outcome[keys.EPISODE_LEN]),
        crashed,
        attempts=collector.attempts[place],
        group=task.group,
        error=reason(collector.errors.get(place, "")) if crashed else "",
        subtasks=int(outcome[keys.SUBTASKS]) if spec.chain_length > 1 else None,
        remark=collector.remarks.get(place, ""),
    )


def executed(decisions: TensorDictBase) -> list[list[float]]:
    """Return the actions that were executed in decisions ``[T]`` of an episode, or in one of them, as ``[L, A]``."""
    actions = decisions[keys.ACTION][decisions[keys.NEXT, keys.STEP_MASK]]
    return [[float(f"{number:.9g}") for number in action] for action in actions.tolist()]  # all digits of a float32


class _Observing(TensorDictModuleBase):
    """A policy that sees something else than there is."""

    def __init__(
        self, policy: TensorDictModuleBase, observe: Observe, deciding: Callable[[], tuple[list[int], list[int]]]
    ):
        super().__init__()
        self.policy, self.observe, self.deciding = policy, observe, deciding
        self.in_keys, self.out_keys, self.loss_keys = policy.in_keys, [keys.ACTION], ()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        inputs = tensordict.select(*self.in_keys, strict=False)
        inputs[keys.EPISODE_INDEX], inputs[keys.DECISION_INDEX] = map(torch.tensor, self.deciding())
        where = {keys.EPISODE_INDEX, keys.DECISION_INDEX}.difference(self.in_keys)
        return tensordict.set(keys.ACTION, self.policy(self.observe(inputs).exclude(*where))[keys.ACTION])


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else float("nan")


def _interval(results: Sequence[EpisodeResult]) -> tuple[float, float]:
    return wilson_interval(sum(result.success_once for result in results), len(results))
