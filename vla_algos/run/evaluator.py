"""One evaluation: its episodes are shared by the processes, and their results are on disk as they come."""

import contextlib
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt, Le
from tensordict.nn import TensorDictModuleBase
from tqdm import tqdm

from vla_algos import distributed
from vla_algos.evaluation import EvaluationResult, evaluate
from vla_algos.files import write_atomically
from vla_algos.results import IN_TRAINING, EpisodeResult, as_lines, finished_episodes, part_of, parts_of
from vla_algos.run.logging import progress_bar
from vla_common.errors import unknown_name
from vla_common.settings import Count, Seed, Whole
from vla_envs import Episode, SimulatorSpec, VLAEnv, evaluation_episodes
from vla_envs.workers.pool import SimulatorCrash
from vla_policies import VLAPolicy


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Runs evaluations; the settings are the section ``eval``.

    Attributes:
        trials: initial states per task; ``None`` for the benchmark's number.
        repeats: runs of each.
        seed: family of initial states; another one than training uses.
        videos: episodes that are recorded.
        mean_of: suites or difficulties of which the mean is reported too, each counting the same.
        sampled: evaluate the sampling policy too, not only the greedy one.
        temperature: at which that samples; ``None`` for that of training.
        env: settings of the environment that are not those of training, such as ``id``; ``None`` or empty for none.

    Raises:
        ValueError: a temperature, and nothing is sampled.
    """

    trials: Count | None = None
    repeats: Count = 1
    seed: Seed = 9_000_000
    videos: Whole = 4
    mean_of: Sequence[str] = ()
    sampled: bool = False
    temperature: Annotated[float, Gt(0), Le(100)] | None = None
    env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None and not self.sampled:
            raise ValueError(
                f"eval.temperature={self.temperature:g}: is of sampled actions, and none are; type eval.sampled=true"
            )

    def episodes(self, spec: SimulatorSpec) -> list[Episode]:
        """List the episodes of all processes. ValueError: fewer initial states, or no group of ``mean_of``."""
        groups = list(dict.fromkeys(task.group for task in spec.tasks))
        for name in self.mean_of:
            if name not in groups:
                raise unknown_name("group in eval.mean_of", name, groups)
        return evaluation_episodes(spec, self.trials, self.seed, self.repeats)

    def run(
        self,
        title: str,
        env: VLAEnv,
        policy: TensorDictModuleBase,
        path: Path,
        *,
        resume: bool = False,
        record: bool = False,
        again: Container[int] = (),
        **options: Any,
    ) -> EvaluationResult:
        """Evaluate this process's share of the episodes, and join the shares of all processes.

        Where simulators fail whatever they are to run, the result is ``broken`` and has what finished until then.

        Args:
            title: of the progress bar.
            env: the episodes that run in it are abandoned.
            policy: writes ``action``.
            path: gets a line for each result as it comes; other processes write ``..._rank1.jsonl`` until all are done.
            resume: skip the episodes whose results are there; those to be filmed run again.
            record: keep the frames of the first :attr:`videos` episodes.
            again: indices of episodes that run again if ``resume`` would skip them.
            **options: of :func:`~vla_algos.evaluation.evaluate`; indices are those among the episodes of all processes.
        """
        spec = env.simulator_spec
        episodes = self.episodes(spec)
        own = range(distributed.rank(), len(episodes), distributed.world_size())
        filmed = sum(index < self.videos for index in own) if record else 0
        known = finished_episodes(path, episodes, spec.chain_length) if resume else {}
        results = {index: known[index] for index in own[filmed:] if index in known and index not in again}
        left = [index for index in own if index not in results]
        share, broken = EvaluationResult([]), ""
        with (
            progress_bar(title, len(own), "episode", initial=len(results)) as bar,
            _open_log(path, keep=resume) as write,
        ):

            def note(result: EpisodeResult) -> None:
                results[result.index] = result
                write(result)
                bar.update()
                solved = sum(result.success_once for result in results.values())
                bar.set_postfix(solved=solved, refresh=False)  # no share: solved episodes end first

            try:
                if left:
                    queue = [episodes[index] for index in left]
                    share = evaluate(env, policy, queue, indices=left, on_episode=note, record=filmed, **options)
            except SimulatorCrash as error:
                broken = " ".join(str(error).split())  # what it quotes has several lines
            except BaseException:
                if resume:
                    tqdm.write(f"{len(results)} of {len(own)} episodes are in {path}")
                raise
        shares = distributed.all_gather_object(replace(share, episodes=[*results.values()], broken=broken))
        results = {result.index: result for each in shares for result in each.episodes}
        for index in set(range(len(episodes))) - results.keys():  # never tried
            task = spec.tasks[episodes[index].task_id]
            results[index] = EpisodeResult(episodes[index], task.name, False, False, 0.0, 0, True, 0, task.group, index)
        whole = EvaluationResult(
            [results[index] for index in range(len(episodes))],
            dict(sorted(film for each in shares for film in each.videos.items())),
            next((each.broken for each in shares if each.broken), ""),
            dict(sorted(said for each in shares for said in each.captions.items())),
            spec.chain_length,
            tuple(self.mean_of),
        )
        if distributed.is_main():
            write_atomically(path, as_lines(whole.episodes))
            for part in parts_of(path):
                part.unlink()
        return whole

    def run_both(
        self, title: str, env: VLAEnv, policy: VLAPolicy, folder: Path, **options: Any
    ) -> dict[str, EvaluationResult]:
        """Evaluate the greedy policy, filmed, and the sampling one if asked: results by the prefix of their metrics.

        They are written to ``folder`` under that prefix; ``options`` are of :func:`~vla_algos.evaluation.evaluate`.
        """
        results = {"eval": self.run(title, env, policy, folder / IN_TRAINING, record=True, **options)}
        if self.sampled:
            path = folder / "eval_sampled.jsonl"
            with at_temperature(policy, self.temperature):
                results["eval_sampled"] = self.run(f"{title}, sampled", env, policy, path, greedy=False, **options)
        return results


@contextlib.contextmanager
def at_temperature(policy: VLAPolicy, temperature: float | None) -> Iterator[None]:
    """Have a policy sample at another ``config.temperature`` than it is trained at; ``None`` for that."""
    if temperature is None:
        yield
        return
    check_temperature(policy, temperature)
    trained = policy.config
    policy.config = replace(trained, temperature=temperature)
    try:
        yield
    finally:
        policy.config = trained


def check_temperature(policy: VLAPolicy, temperature: float | None) -> None:
    """Refuse a temperature, by a ValueError, of a policy that has none."""
    if temperature is not None and not hasattr(policy.config, "temperature"):
        raise ValueError(
            f"eval.temperature={temperature:g}: policy={policy.family} does not sample at a temperature; leave it out"
        )


@contextlib.contextmanager
def _open_log(path: Path, *, keep: bool) -> Iterator[Callable[[EpisodeResult], None]]:
    """Let a process write results, each at once, behind those that are there or in their place."""
    own = part_of(path, distributed.rank())
    own.parent.mkdir(parents=True, exist_ok=True)
    torn = keep and own.exists() and not own.read_bytes().endswith(b"\n")  # by a process that died while writing
    with open(own, "ab" if keep else "wb") as file:
        file.write(b"\n" * torn)

        def write(result: EpisodeResult) -> None:
            file.write(as_lines([result]).encode())
            file.flush()

        try:
            yield write
        finally:
            os.fsync(file.fileno())
