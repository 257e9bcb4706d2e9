"""Evaluation on fixed episodes: every episode counts, whichever finishes first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import ExplorationType

from vla_algos import ablations
from vla_algos.ablations import Observe
from vla_algos.acting import Policy, as_module
from vla_algos.collectors import EpisodeCollector
from vla_algos.metrics import Estimate, mean_interval, mean_of_estimates, wilson_interval
from vla_algos.results import IDENTITY, NAME, EpisodeResult, as_lines, files_of, parts_of, read_episodes
from vla_common.keys import (
    ACTION,
    CRASHED,
    DECISION_INDEX,
    EPISODE_INDEX,
    EPISODE_LEN,
    EPISODE_RETURN,
    IMAGES,
    NEXT,
    STEP_MASK,
    SUBTASKS,
    SUCCESS,
    SUCCESS_AT_END,
    TASK_DESCRIPTIONS,
)
from vla_common.settings import Count
from vla_common.texts import to_strings
from vla_envs.env import base_env
from vla_envs.simulator import Episode
from vla_envs.workers.pool import reason

_NAMED = 5  # crashed episodes that a table names


def estimate_chains(results: Sequence[EpisodeResult], chain_length: int) -> dict[str, Estimate]:
    """Estimate how far chains of tasks get, by name; nothing where ``chain_length`` is 1.

    Returns:
        ``avg_num_subtasks``, the mean number of solved tasks (:func:`~vla_algos.metrics.mean_interval`), and for each
        length of a chain ``success_len_1`` ..., the share of the episodes that solved so many or more (Wilson).
    """
    if chain_length == 1:
        return {}
    solved = [result.subtasks or 0 for result in results]
    found = {"avg_num_subtasks": Estimate(_mean(solved), *mean_interval(solved, chain_length))}
    for length in range(1, chain_length + 1):
        reached = [number >= length for number in solved]
        found[f"success_len_{length}"] = Estimate(_mean(reached), *wilson_interval(sum(reached), len(reached)))
    return found


@dataclass(frozen=True)
class EvaluationResult:
    """The results of all episodes.

    Attributes:
        episodes: one result per episode, in their order.
        videos: frames uint8 ``[decisions + 1, H, W, 3]`` of the recorded episodes by index among the episodes.
        broken: why it ended before all episodes had run; empty if it did not.
        chain_length: tasks that an episode asked for one after the other.
        instructions: what the policy was told in each of the frames of ``videos``; in a chain of tasks it changes.
        progress: the return so far, and whether it has been solved, in each of the frames of ``videos``.
        mean_of: suites or difficulties of which the mean is reported too, each counting the same.
    """

    episodes: list[EpisodeResult]
    videos: dict[int, np.ndarray] = field(default_factory=dict)
    broken: str = ""
    instructions: dict[int, list[str]] = field(default_factory=dict)
    chain_length: int = 1
    mean_of: tuple[str, ...] = ()
    progress: dict[int, list[tuple[float, bool]]] = field(default_factory=dict)

    @classmethod
    def interleaved(cls, parts: Sequence[EvaluationResult]) -> EvaluationResult:
        """Join the results of an evaluation of which part ``p`` of ``P`` has every ``P``-th episode from ``p`` on."""
        length = sum(len(part.episodes) for part in parts)
        episodes = [parts[index % len(parts)].episodes[index // len(parts)] for index in range(length)]

        def joined(of_parts: Sequence[dict[int, Any]]) -> dict[int, Any]:
            found = {index * len(parts) + n: value for n, part in enumerate(of_parts) for index, value in part.items()}
            return dict(sorted(found.items()))

        return cls(
            episodes,
            joined([part.videos for part in parts]),
            next((part.broken for part in parts if part.broken), ""),
            joined([part.instructions for part in parts]),
            parts[0].chain_length,
            parts[0].mean_of,
            joined([part.progress for part in parts]),
        )

    @classmethod
    def load(cls, path: str | Path, *, chain_length: int = 1, mean_of: Sequence[str] = ()) -> EvaluationResult:
        """Read the episodes of an evaluation that :meth:`save`, or a recipe, has written.

        Args:
            path: a folder with ``episodes.jsonl``, or a file of such lines, such as ``eval.jsonl`` of a training run.
            chain_length: tasks of an episode (``SimulatorSpec.chain_length``), which the lines do not say.
            mean_of: groups of which the mean is reported too.

        Raises:
            FileNotFoundError: nothing is there.
            ValueError: it has no results, or they are of chains of tasks and ``chain_length`` is not of them.
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
        return cls(episodes, chain_length=chain_length, mean_of=tuple(mean_of))

    def save(self, path: str | Path) -> Path:
        """Write the episodes as ``vla-recipe run evaluate`` does, one to a line; ``vla-recipe compare`` reads them.

        Videos, why an evaluation was broken off and episodes that were never tried are not in it. What was saved there
        before is replaced.

        Args:
            path: a folder, which gets ``episodes.jsonl``, or a file that ends in ``.jsonl``; missing folders are made.

        Returns:
            The file.

        Raises:
            FileExistsError: an evaluation by a recipe is there.
            OSError: it cannot be written; what was there before is still there.
        """
        path = Path(path)
        file = path if path.suffix == ".jsonl" else path / NAME
        if (file.parent / IDENTITY).exists():
            raise FileExistsError(f"{file.parent} has an evaluation by a recipe, which goes on there; save elsewhere")
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f".unfinished_{file.name}")
        unfinished.write_text(as_lines(self.episodes), encoding="utf-8")
        unfinished.replace(file)
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
        """Say in one line why there is no result, or not of all episodes; empty if nothing but crashed ones lacks."""
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
        tasks: dict[str, list[EpisodeResult]] = {result.task: [] for result in self.episodes}
        for result in self.finished:
            tasks[result.task].append(result)
        return tasks

    def by_group(self) -> dict[str, list[EpisodeResult]]:
        """Finished episodes by suite or difficulty, where there is more than one."""
        groups: dict[str, list[EpisodeResult]] = {result.group: [] for result in self.episodes}
        for result in self.finished:
            groups[result.group].append(result)
        return groups if len(groups) > 1 else {}

    def mean_of_groups(self) -> tuple[Estimate, float] | None:
        """Average over the groups of ``mean_of``, which count the same, however many episodes each has.

        Returns:
            Success once (:func:`~vla_algos.metrics.mean_of_estimates` of Wilson's), and success at the end; ``None``
            where there are no groups, or one of them has no finished episode.
        """
        groups = [[result for result in self.finished if result.group == name] for name in self.mean_of]
        if not groups or not all(groups):
            return None
        once = [Estimate(_mean(r.success_once for r in group), *_interval(group)) for group in groups]
        return mean_of_estimates(once), _mean(_mean(r.success_at_end for r in group) for group in groups)

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """Return means over the finished episodes, the success of every task and group, under ``prefix/``.

        That of :attr:`mean_of` is ``prefix/mean/success_once``. Where episodes are chains of tasks,
        :func:`estimate_chains` too, over all and for every task and group.
        """
        metrics = {
            "success_once": self.success_once,
            "success_at_end": _mean(result.success_at_end for result in self.finished),
            "return": _mean(result.episode_return for result in self.finished),
            "episode_len": _mean(result.episode_len for result in self.finished),
            "num_episodes": len(self.finished),
            "crashed_episodes": len(self.crashed),
            **self._chain_means(self.finished),
        }
        for kind, parts in (("task", self.by_task()), ("group", self.by_group())):
            for name, results in parts.items():
                metrics[f"{kind}/{name}/success_once"] = _mean(result.success_once for result in results)
                metrics[f"{kind}/{name}/success_at_end"] = _mean(result.success_at_end for result in results)
                metrics |= {f"{kind}/{name}/{key}": mean for key, mean in self._chain_means(results).items()}
        if (mean := self.mean_of_groups()) is not None:
            metrics |= {"mean/success_once": mean[0].value, "mean/success_at_end": mean[1]}
        return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}

    def intervals(self, prefix: str = "eval") -> dict[str, tuple[float, float]]:
        """Return 95 % intervals: :attr:`interval`, of the mean of groups, and of what :func:`estimate_chains` adds."""
        found = {f"{prefix}/interval": self.interval}
        if (mean := self.mean_of_groups()) is not None:
            found[f"{prefix}/mean/interval"] = (mean[0].low, mean[0].high)
        for place, results in [
            ("", self.finished),
            *((f"task/{name}/", results) for name, results in self.by_task().items()),
            *((f"group/{name}/", results) for name, results in self.by_group().items()),
        ]:
            for name, estimate in estimate_chains(results, self.chain_length).items():
                found[f"{prefix}/{place}{name}/interval"] = (estimate.low, estimate.high)
        return found

    def _chain_means(self, results: Sequence[EpisodeResult]) -> dict[str, float]:
        return {name: estimate.value for name, estimate in estimate_chains(results, self.chain_length).items()}

    def table(self) -> str:
        """Tabulate success per task, per group and over all, with 95 % intervals, for the terminal.

        Below it the mean of groups and, where episodes are chains of tasks, how far they got.
        """
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
            lines.append(
                f"{name:<{width}}  {len(results):8}  {_percent(r.success_once for r in results)}"
                f"  {100 * low:5.1f} - {100 * high:5.1f}  {_percent(r.success_at_end for r in results)[1:]}"
                f"  {_mean(r.episode_len for r in results):6.1f}"
            )
        if (mean := self.mean_of_groups()) is not None:
            once, at_end = mean
            lines.append(
                f"mean of {', '.join(self.mean_of)}: success {100 * once.value:.1f}%, at end {100 * at_end:.1f}%; "
                f"95 % interval of success {100 * once.low:.1f} - {100 * once.high:.1f}"
            )
        elif self.mean_of:
            lines.append(f"mean of {', '.join(self.mean_of)}: none, one of them has no result")
        lines += self._chain_lines(rows)
        if not_run := len(self.episodes) - len(self.finished) - len(self.crashed):
            lines.append(f"not run: {not_run} (no result)")
        if crashed := self.crashed:
            names = "; ".join(result.name for result in crashed[:_NAMED])
            more = f"; and {len(crashed) - _NAMED} more" if len(crashed) > _NAMED else ""
            lines.append(f"crashed: {len(crashed)} (their simulator failed; no result): {names}{more}")
        if remarked := [result for result in self.episodes if result.remark]:
            lines.append(f"with a remark: {len(remarked)}, such as {remarked[0].name}: {remarked[0].remark}")
        return "\n".join(lines)

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


def evaluate(
    env: EnvBase,
    policy: Policy,
    episodes: Iterable[Episode],
    *,
    greedy: bool = True,
    observe: Observe | None = None,
    on_episode: Callable[[EpisodeResult], None] | None = None,
    record: int = 0,
    max_attempts: int = 3,
    stages: Count = 1,
    overlap_resets: bool = False,
) -> EvaluationResult:
    """Run every episode once.

    An :class:`~vla_algos.collectors.EpisodeCollector` works off the episodes; a collector of ours that has used the
    environment before begins with fresh episodes afterwards, others have to be reset.

    Args:
        env: a :class:`~vla_envs.env.VLAEnv`, with or without transforms (``TransformedEnv``). Whatever they make of
            the reward, the returns are those of the environment itself.
        policy: any TensorDictModule that writes ``action``, or a callable that does. One of ours has to fit ``env``
            (:meth:`~vla_policies.policy.VLAPolicy.check_environment`); behind transforms that is not checked.
        episodes: what to run, see :func:`~vla_envs.episodes.evaluation_episodes`.
        greedy: take the policy's greedy action; sample if False.
        observe: changes what the policy sees, see :mod:`vla_algos.ablations`: gets and returns the policy's inputs, of
            which ``episode_index`` is the place among ``episodes`` (-1: none) and ``decision_index`` counts from 0.
        on_episode: called with each result, in the order of finishing.
        record: keep the frames of the first so many episodes.
        max_attempts: runs of an episode whose simulator dies before it counts as crashed.
            An episode that could not begin counts at once: the environment has tried it several times.
        stages: of :class:`~vla_algos.collectors.EpisodeCollector`; a result changes by the rounding of other batches.
        overlap_resets: of :class:`~vla_algos.collectors.EpisodeCollector`, likewise.

    Returns:
        Results in the order of ``episodes``.

    Raises:
        ValueError: the policy cannot act there; or it should record, but a transform has changed the images.
        SimulatorCrash: simulators fail whatever they are to run; ``on_episode`` has got the results so far.
    """
    if record and (env.observation_spec.get(IMAGES, None) is None or env.observation_spec[IMAGES].dtype != torch.uint8):
        raise ValueError(
            f"record={record}, but a transform of the environment has changed {IMAGES!r}, which are filmed: give it "
            'out_keys=["pixels"], or record=0'
        )
    spec = base_env(env).simulator_spec
    if hasattr(policy, "check_environment") and not isinstance(env, TransformedEnv):  # which may show it what it reads
        policy.check_environment(spec)
    wanted = list(episodes)
    frames: dict[int, list[np.ndarray]] = {}
    instructions: dict[int, list[str]] = {}
    progress: dict[int, list[tuple[float, bool]]] = {}
    results: dict[int, EpisodeResult] = {}
    tasks = spec.tasks

    def film(outcome: TensorDictBase) -> None:
        told, told_next = to_strings(outcome), to_strings(outcome, (NEXT, TASK_DESCRIPTIONS))
        for slot, episode in enumerate(collector.deciding):
            if episode is not None and episode.queue_index < record:
                before = outcome[NEXT, EPISODE_LEN][slot] - outcome[NEXT, STEP_MASK][slot].sum()
                if before == 0:  # its first decision, perhaps after a crash
                    frames[episode.queue_index] = [outcome[IMAGES][slot].cpu().numpy().copy()]
                    instructions[episode.queue_index] = [told[slot]]
                    progress[episode.queue_index] = [(0.0, False)]
                frames[episode.queue_index].append(outcome[NEXT, IMAGES][slot].cpu().numpy().copy())
                instructions[episode.queue_index].append(told_next[slot])
                so_far = float(outcome[NEXT, EPISODE_RETURN][slot]), bool(outcome[NEXT, SUCCESS][slot])
                progress[episode.queue_index].append(so_far)

    def note(index: int, decisions: TensorDictBase) -> None:
        outcome = decisions[NEXT][-1]
        crashed = bool(outcome[CRASHED])
        results[index] = EpisodeResult(
            wanted[index],
            tasks[wanted[index].task_id].name,
            bool(outcome[SUCCESS]) and not crashed,
            bool(outcome[SUCCESS_AT_END]) and not crashed,
            float(outcome[EPISODE_RETURN]),
            int(outcome[EPISODE_LEN]),
            crashed,
            attempts=collector.attempts[index],
            group=tasks[wanted[index].task_id].group,
            index=index,
            error=reason(collector.errors.get(index, "")) if crashed else "",
            subtasks=int(outcome[SUBTASKS]) if spec.chain_length > 1 else None,
            remark=collector.remarks.get(index, ""),
        )
        if on_episode is not None:
            on_episode(results[index])

    actor = as_module(policy, env)
    collector = EpisodeCollector(
        env,
        _Observing(actor, observe, lambda: collector) if observe else actor,
        wanted,
        exploration=ExplorationType.DETERMINISTIC if greedy else ExplorationType.RANDOM,
        for_learning=False,
        max_attempts=max_attempts,
        stages=stages,
        overlap_resets=overlap_resets,
        on_episode=note,
        on_decision=film if record else None,
    )
    training = [module for module in actor.modules() if module.training]
    actor.eval()
    try:
        for _ in collector.iterator():  # not iter(): a failure must not close the caller's environment
            pass
    finally:
        for module in training:  # a module that was set to eval() by itself stays so
            module.training = True
    videos = {index: np.stack(shots) for index, shots in sorted(frames.items()) if not results[index].crashed}
    told = {index: instructions[index] for index in videos}
    so_far = {index: progress[index] for index in videos}
    ordered = [results[index] for index in range(len(wanted))]
    return EvaluationResult(ordered, videos, "", told, spec.chain_length, progress=so_far)


class _Observing(TensorDictModuleBase):
    """A policy that sees something else than there is."""

    def __init__(self, policy: TensorDictModuleBase, observe: Observe, collector: Callable[[], EpisodeCollector]):
        super().__init__()
        self.policy, self.observe, self.collector = policy, observe, collector
        self.in_keys, self.out_keys, self.loss_keys = policy.in_keys, [ACTION], ()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        collector, inputs = self.collector(), tensordict.select(*self.in_keys)
        deciding = [-1 if episode is None else episode.queue_index for episode in collector.deciding]
        inputs[EPISODE_INDEX], inputs[DECISION_INDEX] = torch.tensor(deciding), torch.tensor(collector.decided)
        decision = self.policy(self.observe(inputs).exclude(EPISODE_INDEX, DECISION_INDEX))
        return tensordict.set(ACTION, decision[ACTION])


def __getattr__(name: str) -> Any:
    new = {"swap_instructions": "swapped_instructions", "blank_images": "blank_images"}.get(name)
    if new is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is {ablations.__name__}.{new} now", DeprecationWarning, stacklevel=2)
    return getattr(ablations, new)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else float("nan")


def _percent(values: Iterable[float]) -> str:
    return f"{100 * _mean(values):6.1f}%"


def _interval(results: Sequence[EpisodeResult]) -> tuple[float, float]:
    return wilson_interval(sum(result.success_once for result in results), len(results))
