"""Evaluation on held-out episodes within a run: shared by the processes, with a progress bar and videos."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tensordict.nn import TensorDictModuleBase

from vla_algos import parallel
from vla_algos.evaluation import EpisodeResult, EvaluationResult, evaluate
from vla_algos.run.files import attempt
from vla_algos.run.logging import progress_bar, write_video
from vla_common.settings import Count, Seed, Whole
from vla_envs import Episode, SimulatorSpec, VLAEnv, evaluation_episodes


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """What an evaluation runs and keeps.

    Attributes:
        trials: initial states per task; ``None`` for the benchmark's number.
        repeats: runs of each.
        seed: family of initial states; another one than training uses.
        videos: episodes that are recorded.
        sampled: evaluate the sampling policy too, not only the greedy one.
    """

    trials: Count | None = None
    repeats: Count = 1
    seed: Seed = 9_000_000
    videos: Whole = 4
    sampled: bool = False

    def episodes(self, spec: SimulatorSpec) -> list[Episode]:
        """List the episodes of all processes.

        Raises:
            ValueError: the benchmark has fewer initial states.
        """
        return evaluation_episodes(spec, self.trials, self.seed, self.repeats)

    def run(self, title: str, env: VLAEnv, policy: TensorDictModuleBase, **options: Any) -> EvaluationResult:
        """Evaluate this process's share of the episodes; :func:`gather` puts the shares together.

        Args:
            title: of the progress bar, which shows the success so far.
            env: the episodes that run in it are abandoned.
            policy: writes ``action``.
            **options: of :func:`~vla_algos.evaluation.evaluate`.
        """
        rank, processes = parallel.rank(), parallel.world_size()
        own = self.episodes(env.simulator_spec)[rank::processes]
        solved = 0
        with progress_bar(title, len(own), "episode") as bar:

            def show(result: EpisodeResult) -> None:
                nonlocal solved
                solved += result.success_once
                bar.update()
                bar.set_postfix(success=f"{100 * solved / max(1, bar.n):.1f}%", refresh=False)

            return evaluate(env, policy, own, on_episode=show, **options)

    def run_both(self, title: str, env: VLAEnv, policy: TensorDictModuleBase) -> dict[str, EvaluationResult]:
        """Evaluate the greedy policy, filmed, and the sampling one if asked: shares by the prefix of their metrics."""
        results = {"eval": self.run(title, env, policy, record=self.local_videos)}
        if self.sampled:
            results["eval_sampled"] = self.run(f"{title}, sampled", env, policy, greedy=False)
        return results

    @property
    def local_videos(self) -> int:
        """How many of the recorded episodes this process runs."""
        return len(range(parallel.rank(), self.videos, parallel.world_size()))


def gather(share: EvaluationResult) -> EvaluationResult:
    """Join the result of an evaluation of which each process has run its share."""
    return EvaluationResult.interleaved(parallel.all_gather_object(share))


def save_videos(folder: Path, result: EvaluationResult, fps: float = 8.0) -> list[Path]:
    """Write the recorded episodes of an evaluation as mp4, named after task, trial and outcome."""
    paths: list[Path] = []
    if not parallel.is_main():
        return paths
    for index, frames in result.videos.items():
        episode = result.episodes[index]
        outcome = "success" if episode.success_once else "failure"
        name = f"{index:03d}_{episode.task}_trial{episode.episode.trial_id}_{outcome}.mp4"
        write = partial(write_video, folder / name, frames, fps)
        if attempt(f"a video in {folder}", write, "the run goes on without it"):
            paths.append(folder / name)
    return paths
