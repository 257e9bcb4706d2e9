"""Evaluation on held-out episodes within a run: shared by the processes, with a progress bar and videos."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Gt, Le
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tqdm import tqdm

from vla_algos import parallel
from vla_algos.ablations import Observe
from vla_algos.evaluation import EvaluationResult, evaluate
from vla_algos.results import EpisodeResult
from vla_algos.run.captions import caption, describe, enlarge
from vla_algos.run.episode_log import EpisodeLog, finished_episodes
from vla_algos.run.evaluated import at_temperature
from vla_algos.run.files import attempt
from vla_algos.run.logging import progress_bar, write_video
from vla_common.errors import unknown_name
from vla_common.keys import EPISODE_INDEX
from vla_common.settings import Count, Seed, Whole
from vla_envs import Episode, SimulatorSpec, VLAEnv, evaluation_episodes
from vla_envs.workers.pool import SimulatorCrash
from vla_policies import VLAPolicy

Temperature = Annotated[float, Gt(0), Le(100)]


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """What an evaluation runs and keeps.

    Attributes:
        trials: initial states per task; ``None`` for the benchmark's number.
        repeats: runs of each.
        seed: family of initial states; another one than training uses.
        videos: episodes that are recorded.
        mean_of: suites or difficulties of which the mean is reported too, each counting the same.
        sampled: evaluate the sampling policy too, not only the greedy one.
        temperature: at which that samples; ``None`` for that of training.
        env: settings of the environment of evaluations that are not those of training, such as ``id``; none of them
            (``None``, or nothing) evaluates in that of training.

    Raises:
        ValueError: a temperature, and nothing is sampled.
    """

    trials: Count | None = None
    repeats: Count = 1
    seed: Seed = 9_000_000
    videos: Whole = 4
    mean_of: Sequence[str] = ()
    sampled: bool = False
    temperature: Temperature | None = None
    env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None and not self.sampled:
            raise ValueError(
                f"eval.temperature={self.temperature:g}: is of sampled actions, and none are; type eval.sampled=true"
            )

    def episodes(self, spec: SimulatorSpec) -> list[Episode]:
        """List the episodes of all processes.

        Raises:
            ValueError: the benchmark has fewer initial states, or no group of a name in ``mean_of``.
        """
        groups = list(dict.fromkeys(task.group for task in spec.tasks))
        for name in self.mean_of:
            if name not in groups:
                raise unknown_name("group in eval.mean_of", name, groups)
        return evaluation_episodes(spec, self.trials, self.seed, self.repeats)

    def settings_of_episodes(self) -> list[str]:
        """List the settings with which another recipe evaluates the same episodes: ``["eval.trials=10"]``."""
        shown = [f"eval.trials={'null' if self.trials is None else self.trials}"]
        shown += [f"eval.repeats={self.repeats}"] if self.repeats != Evaluator.repeats else []
        shown += [f"eval.seed={self.seed}"] if self.seed != Evaluator.seed else []
        return shown + ([f"eval.mean_of=[{','.join(self.mean_of)}]"] if self.mean_of else [])

    def run(
        self,
        title: str,
        env: VLAEnv,
        policy: TensorDictModuleBase,
        path: Path,
        *,
        go_on: bool = False,
        record: Whole = 0,
        again: Container[int] = (),
        observe: Observe | None = None,
        **options: Any,
    ) -> EvaluationResult:
        """Evaluate this process's share of the episodes; :func:`gather` puts the shares together.

        Where simulators fail whatever they are to run, the result is ``broken`` and has what finished until then.

        Args:
            title: of the progress bar, which shows how many are solved so far.
            env: the episodes that run in it are abandoned.
            policy: writes ``action``.
            path: where results go as they come, see :class:`~vla_algos.run.episode_log.EpisodeLog`.
            go_on: skip the episodes whose results are there; those to be filmed run again.
            record: keep the frames of the first so many episodes of this process.
            again: indices of episodes that run again if ``go_on`` would skip them.
            observe: of :func:`~vla_algos.evaluation.evaluate`; indices are those among the episodes of all processes.
            **options: of :func:`~vla_algos.evaluation.evaluate`.
        """
        rank, processes = parallel.rank(), parallel.world_size()
        everybodys = self.episodes(env.simulator_spec)
        own = range(rank, len(everybodys), processes)
        known = finished_episodes(path, everybodys, env.simulator_spec.chain_length) if go_on else {}
        results = {index: known[index] for index in own[record:] if index in known and index not in again}
        left = [index for index in own if index not in results]
        share, broken = EvaluationResult([]), ""
        solved = sum(result.success_once for result in results.values())
        log = EpisodeLog(path, keep=go_on)
        with progress_bar(title, len(own), "episode", initial=len(results)) as bar:

            def note(result: EpisodeResult) -> None:
                nonlocal solved
                result = replace(result, index=left[result.index])
                results[result.index] = result
                log.add(result)
                solved += result.success_once
                bar.update()
                bar.set_postfix(solved=solved, refresh=False)  # no share: who succeeds ends first

            try:
                if left:
                    episodes = [everybodys[index] for index in left]
                    options["observe"] = observe and _of_everybody(observe, left)
                    share = evaluate(env, policy, episodes, on_episode=note, record=record, **options)
            except SimulatorCrash as error:
                broken = " ".join(str(error).split())  # what it quotes has several lines
            except BaseException:
                if go_on:
                    tqdm.write(f"{len(results)} of {len(own)} episodes are in {path}")
                raise
            finally:
                log.close()
        tasks = env.simulator_spec.tasks
        for index in set(own) - results.keys():
            task = tasks[everybodys[index].task_id]
            nothing = EpisodeResult(everybodys[index], task.name, False, False, 0.0, 0, True, 0, task.group, index)
            results[index] = nothing
        ordered = [results[index] for index in own]
        length, mean_of = env.simulator_spec.chain_length, tuple(self.mean_of)
        return EvaluationResult(ordered, share.videos, broken, share.instructions, length, mean_of, share.progress)

    def run_both(
        self, title: str, env: VLAEnv, policy: VLAPolicy, folder: Path, **options: Any
    ) -> dict[str, EvaluationResult]:
        """Evaluate the greedy policy, filmed, and the sampling one if asked: shares by the prefix of their metrics.

        Their results come into ``folder`` under that prefix. ``options`` are of
        :func:`~vla_algos.evaluation.evaluate`.
        """
        results = {"eval": self.run(title, env, policy, folder / "eval.jsonl", record=self.local_videos, **options)}
        if self.sampled:
            path = folder / "eval_sampled.jsonl"
            with at_temperature(policy, self.temperature):
                results["eval_sampled"] = self.run(f"{title}, sampled", env, policy, path, greedy=False, **options)
        return results

    @property
    def local_videos(self) -> int:
        """How many of the recorded episodes this process runs."""
        return len(range(parallel.rank(), self.videos, parallel.world_size()))


def _of_everybody(observe: Observe, indices: Sequence[int]) -> Observe:
    """Let ``observe`` know episodes by their place among those of all processes, of which some run here."""
    places = torch.tensor([*indices, -1])  # the last one is that of an idle slot

    def observe_everybodys(td: TensorDictBase) -> TensorDictBase:
        td[EPISODE_INDEX] = places[td[EPISODE_INDEX].cpu()]
        return observe(td)

    return observe_everybodys


def gather(share: EvaluationResult, path: Path) -> EvaluationResult:
    """Join the result of an evaluation of which each process has run its share, and the files of their episodes."""
    result = EvaluationResult.interleaved(parallel.all_gather_object(share))
    EpisodeLog.join(path, result.episodes)
    return result


def save_videos(folder: Path, result: EvaluationResult, fps: float) -> list[Path]:
    """Write the recorded episodes of an evaluation as mp4, named after task, trial and outcome.

    Small frames are enlarged. Below each stands what the policy was told, its return so far, and that it is solved.

    Args:
        folder: where to.
        result: has them.
        fps: frames, which are decisions, per second; :func:`~vla_envs.gym.frames_per_second` is real time.
    """
    paths: list[Path] = []
    if not parallel.is_main():
        return paths
    for index, frames in result.videos.items():
        episode = result.episodes[index]
        outcome = "success" if episode.success_once else "failure"
        name = f"{index:03d}_{episode.task}_trial{episode.episode.trial_id}_{outcome}.mp4"
        lines = [
            describe(told, *progress)
            for told, progress in zip(result.instructions[index], result.progress[index], strict=True)
        ]
        shown = caption(enlarge(frames), lines)
        write = partial(write_video, folder / name, shown, fps)
        if attempt(f"a video in {folder}", write, "the run goes on without it"):
            paths.append(folder / name)
    return paths
