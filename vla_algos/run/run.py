"""A run: everything around the algorithm of a recipe, so that the recipe itself reads like it."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from hydra.core.hydra_config import HydraConfig
from safetensors import SafetensorError
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import BaseCollector

from vla_algos import parallel
from vla_algos.collectors import EpisodeCollector
from vla_algos.demonstrations import Samples
from vla_algos.evaluation import EvaluationResult
from vla_algos.metrics import finished
from vla_algos.pipeline import advise
from vla_algos.run import curves, episode_log
from vla_algos.run.as_trained import is_chosen
from vla_algos.run.comparing import before_and_after
from vla_algos.run.episode_log import finished_episodes
from vla_algos.run.evaluator import gather, save_videos
from vla_algos.run.files import attempt, write_folder_atomically
from vla_algos.run.folder import finish_folder, note_start, open_folder, plain, say_what_differs
from vla_algos.run.loggers import events_of, open_loggers
from vla_algos.run.logging import RunLogger, progress_bar
from vla_algos.run.origin import differences, note_origin, origin_of
from vla_algos.run.phase import begin_work, has_begun
from vla_algos.run.plan import Plan
from vla_algos.run.resume import ResumableRun, Stateful
from vla_algos.run.roles import Roles
from vla_algos.run.seeds import seed_rank
from vla_algos.run.sharding import check_same_draws, say_host_memory
from vla_algos.run.summary import describe_policy, never_trained, show_iteration, summarise
from vla_algos.run.turns import Turns
from vla_algos.run.warm_start import clone, read, record
from vla_common import timeline
from vla_common.keys import NEXT, STEP_MASK, SUCCESS, TASK_ID
from vla_envs import EpisodeSampler, VLAEnv, make_env
from vla_envs.gym.episodes import frames_per_second
from vla_envs.workers.pool import SimulatorCrash
from vla_policies import VLAPolicy, make_policy
from vla_policies.checkpoint.hub import resolve
from vla_policies.memory import Way

B = TypeVar("B")
T = TypeVar("T")
_ADVISED_AFTER = 5  # iterations: the first calls compile, or load
_CRASHED_ITERATIONS = 10  # in a row, in which no episode finished


class Run:
    """The folder of a run, its environment and policy, checkpoints, evaluations, the log, and the summary.

    Made by :func:`vla_algos.run.launch.launch` for ``train(config, run)`` of a recipe; as a context manager it lets
    others have the folder afterwards. A training recipe makes policy
    and environment, then::

        with run.resumable(learner=learner, collector=collector):
            for iteration in run.iterations():
                ...  # collect, estimate, learn
                run.log(batch, metrics)

    :meth:`resumable` resumes from the last checkpoint or gives a new policy its warm start; :meth:`iterations`
    evaluates before the first, at every ``evaluate_every``-th and after the last iteration, and saves after each;
    afterwards the policy is saved and the summary printed.

    Args:
        config: the settings, see :func:`vla_algos.run.config.read_config`.
        folder: where everything goes.

    Attributes:
        name: of the recipe.
        config, folder, spec: the settings, the folder, and the description of the environment.
        plan: what follows from the settings.
        state: plain values that are kept over an interruption.
        differs: what the policy sees otherwise than in its training, see :func:`vla_algos.run.origin.differences`.

    Raises:
        ValueError: settings that do not fit each other, or the folder has a run of other settings.
        FolderInUse: another process writes into the folder.
    """

    def __init__(self, config: SimpleNamespace, folder: Path):
        self._started = time.perf_counter()
        self._take(Plan(config, folder, Roles.of(getattr(config, "placement", None)), parallel.cores()), folder)
        if hasattr(config, "sharding"):
            self.sharding = self.roles.shard(config.sharding)
        self._lock = open_folder(config, folder)
        self._logger = RunLogger(folder)  # that of the loop comes with it
        self._noted = False
        self.differs: dict[str, tuple[Any, Any]] = {}
        self.state: dict = {}
        self._failure = ""  # of the last evaluation
        self._unit = "iteration"
        self._seconds: dict[str, float] = {}

    def _take(self, plan: Plan, folder: Path) -> None:
        """Be the run of a plan."""
        self.plan, self.config, self.folder, self.name = plan, plan.config, folder, plan.config.recipe
        self.spec, self.roles, self.evaluator, self.pipeline = plan.spec, plan.roles, plan.evaluator, plan.pipeline
        self._samplers: list[EpisodeSampler] = []
        self._filmed = False  # a collector has what films

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        timeline.end()
        self._logger.close(failed=kind is not None)
        if kind is not None and has_begun() and parallel.world_size() == 1:  # whoever ends has the others killed
            self._draw_curves()
        if self._lock is not None:
            self._lock.release()

    # ---- the parts

    def make_policy(self) -> VLAPolicy:
        """Make the policy of ``config.policy``, complete and known to fit the environment, which is not started."""
        settings = dict(self.config.policy)
        divide, way = None, Way()
        if hasattr(self.config, "sharding"):  # whoever only acts has the policy whole
            with self.roles.own():
                divide = self.sharding.divider(settings.get("device"))
            way = self.sharding.way(self.config.offload["optimizer"] and self.roles.learns)

        def complete(policy: VLAPolicy) -> None:
            say_host_memory(policy, way)
            if divide is not None:
                divide(policy)

        with self.roles.own():
            self.policy = make_policy(self.spec, shard=None if divide is None else complete, **settings)
            if divide is None:
                complete(self.policy)
        check_same_draws()
        self.plan.check_policy(self.policy)
        if self.plan.other_suite is not None:
            self.on_rollouts(self.plan.other_suite.check_machine)
        self._say_origin()
        return self.policy

    def _say_origin(self) -> None:
        """Say in one line what is otherwise than in the policy's training, or that its folder does not tell."""
        checkpoint = self.config.policy.get("checkpoint")
        if not checkpoint:
            return
        trained, chunk = origin_of(resolve(checkpoint)), self.policy.chunk_size
        if trained is not None:
            found = differences(trained["env"], self.config.env)
            self.differs = {f"env.{name}": each for name, each in found.items()}
            if trained.get("chunk_size", chunk) != chunk:
                self.differs["actions per decision"] = (trained["chunk_size"], chunk)
        if not parallel.is_main():
            return
        known = HydraConfig.initialized()  # a job does not know what was typed
        if trained is None and self.name == "evaluate" and known and not is_chosen(HydraConfig.get().overrides.task):
            print(
                f"warning: {checkpoint} does not say what it was trained on, {self.spec.id} is taken; type env=NAME or "
                "experiment=NAME"
            )
        if self.differs:
            shown = "; ".join(f"{name}={now}, not {then}" for name, (then, now) in self.differs.items())
            print(f"warning: {checkpoint} was trained otherwise: {shown}")

    def make_env(self, policy: VLAPolicy) -> VLAEnv:
        """Start the simulators of ``config.env`` with the chunk length of the policy, as :meth:`on_rollouts` does."""
        settings = self.plan.own_share(self.config.env)
        group_size = settings.get("group_size", 1)
        self.env = self.on_rollouts(
            lambda: make_env(**settings, chunk_size=policy.chunk_size, episodes=self.training_episodes(group_size))
        )
        said = [describe_policy(policy)]
        if hasattr(self.config, "sharding"):
            with self.roles.own():
                divided = self.sharding.describe(self.config.offload["optimizer"])
            said += filter(None, [divided, self.roles.describe()])
        print(f"{self.plan.describe_suites()}\n{'; '.join(said)}")
        return self.env

    def record(self, policy: VLAPolicy) -> tuple[Samples, Samples]:
        """Record the demonstrations of ``config.demonstrations``, or read them from its folder.

        Returns:
            What ``policy`` learns from, and what is held out; see :func:`vla_algos.run.record`.
        """
        settings = self.config.demonstrations
        return record(self.env, policy, self.plan.demonstration_seed, self.config.eval["seed"], **settings)

    def per_rollout(self, total: int, what: str) -> int:
        """Return the part of each process that collects of a number that is given for the whole run.

        Raises:
            ValueError: it cannot be divided evenly.
        """
        return self.plan.per_rollout(total, what)

    def on_rollouts(self, make: Callable[[], T]) -> T:
        """Make what the processes that collect have, such as the collector; within, there are no others.

        Returns:
            It; ``None`` in the others, which have no use for it.
        """
        if not self.roles.collects:
            return cast(T, None)
        with parallel.among(self.roles.rollouts):
            return make()

    def on_actors(self, make: Callable[[], T]) -> T:
        """Make what the processes that learn have, such as the learner; within, there are no others.

        Returns:
            It; ``None`` in the others, which have no use for it.
        """
        if not self.roles.learns:
            return cast(T, None)
        with parallel.among(self.roles.actors):
            return make()

    @property
    def film(self) -> Callable[[TensorDictBase], None] | None:
        """What films training where ``config.train_videos`` asks for it: ``on_decision`` of a collector.

        The first process that collects does it; ``None`` in others, and where nothing is filmed.
        """
        self._filmed = True
        return self.plan.train_videos if self.plan.train_videos.environments and self._is_first_rollout else None

    @property
    def _is_first_rollout(self) -> bool:
        return self.roles.rank == self.roles.rollouts[0]

    def training_episodes(self, group_size: int) -> EpisodeSampler:
        """Sample this process's share of the training episodes of ``config.seed``, each ``group_size`` times.

        Called within :meth:`on_rollouts`.
        """
        sampler = EpisodeSampler(
            self.spec,
            self.config.seed,
            mode=getattr(self.config, "episode_order", "random"),
            group_size=group_size,
            rank=parallel.rank(),
            world_size=parallel.world_size(),
        )
        self._samplers.append(sampler)
        return sampler

    # ---- the loop

    @contextlib.contextmanager
    def resumable(self, *, warm_start: bool = True, **parts: Stateful | None) -> Iterator[None]:
        """Restore the last checkpoint of this folder, or begin; afterwards save the policy and print the summary.

        Args:
            warm_start: clone demonstrations into a new policy before the first iteration, and evaluate what came of it.
            **parts: what changes beside the policy's weights: ``learner`` and, where there is one, ``collector``;
                ``None`` in a process that has none.
        """
        if self.plan.train_videos.environments and self.roles.collects and not self._filmed:
            raise ValueError(
                f"train_videos.environments={self.plan.train_videos.environments}: {self.name}.py gives its collector "
                "nothing that films; write on_decision=run.film there, or leave train_videos out"
            )
        self._warm_starts = warm_start
        self._parts: dict[str, Stateful] = {name: part for name, part in parts.items() if part is not None}
        lag = self.config.sync["lag"] if hasattr(self.config, "sync") else 0
        self._turns = Turns(self.policy, self.config.seed, lag, self.roles)
        kept = self._parts if self._turns.is_plain else self._parts | {"turns": self._turns}
        self._checkpoints = ResumableRun(
            self.folder,
            self.policy,
            kept,
            self.config.checkpoint_every,
            lambda: self._logger.sync(),
            save_policy=self._write_policy,
            elastic_seed=self.config.seed if self.config.resume == "elastic" else None,
        )
        with self._checkpoints:
            resumed = self._checkpoints.resume()
            self._first, self._resumes = resumed or 0, resumed is not None
            if resumed is not None:
                say_what_differs(self.folder)
            sinks = open_loggers(self.config.logger, self.folder, resumed)
            self._note_start()
            self._logger = RunLogger(self.folder, -1 if resumed is None else resumed, sinks)
            self._logger.log_settings(plain(self.config))
            self._started -= self._checkpoints.seconds
            self.state = self._checkpoints.run_state
            if self.config.resume == "force":  # other settings may not end where the last ones did
                self.state.pop("last_iteration", None)
                self.state.pop("ended", None)
            if resumed is None:
                self._begin()
            yield
        done_before = resumed is not None and resumed >= self._last and (self.folder / "policy").is_dir()
        if not parallel.broadcast_object(done_before):
            self._save_policy()
        self._finish()

    def iterations(self, total: int | None = None, unit: str = "iteration", title: str | None = None) -> Iterator[int]:
        """Yield the numbers of the iterations that are left, from 1; between them, evaluate and save.

        Args:
            total: the last one; ``config.iterations`` if ``None``.
            unit: what they are called where they are counted.
            title: of the progress bar; the name of the recipe if ``None``.
        """
        total = self.config.iterations if total is None else total
        self._unit = unit
        self._last = self.state.get("last_iteration", total)
        self._losses: dict[str, str] = {}
        if self._resumes and parallel.is_main():
            print(f"resumed after {self._first} {unit}s")
        with progress_bar(title or self.name.upper(), total, unit, self._first) as self._bar:
            for iteration in range(min(self._first, total), total + 1):
                if iteration > self._first:
                    self._iteration, self._clock = iteration, time.perf_counter()
                    self._seconds = {}
                    self.plan.train_videos.begin(iteration)
                    yield iteration
                evaluated = self._evaluates_after(iteration)
                if iteration > self._first:
                    self._note_start()
                    self._checkpoints.finish(iteration, publish=evaluated)
                if evaluated:
                    self._evaluate(iteration)
                if iteration >= self._last:
                    break

    def turn(self, collect: Callable[[], B], learn: Callable[[B | None], T], join: Callable[[list[B]], B]) -> T:
        """Collect a batch and learn from one, as ``config.placement`` and ``config.sync`` say; see :class:`Turns`.

        Args:
            collect: returns a batch: rows, or a list. Changes no weights; a signal may break it off.
            learn: learns from this process's part of a batch, ``None`` if that has no rows.
            join: makes one batch of several.

        Returns:
            What ``learn`` has returned.
        """
        return self._turns(self._checkpoints, self._iteration, self._last, collect, learn, join)

    def stop_if_asked(self) -> None:
        """Stop here if a signal asked for it and nothing is lost; see :class:`ResumableRun`."""
        self._checkpoints.stop_if_asked()

    def end_here(self, reason: str) -> None:
        """Make the present iteration the last one; a run that is resumed after it with ``resume=force`` continues."""
        self._last = self.state["last_iteration"] = self._iteration
        self.state["ended"] = reason

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Log how long something takes, in seconds, as ``time/<name>``."""
        started = time.perf_counter()
        yield
        self._seconds[f"time/{name}"] = self._seconds.get(f"time/{name}", 0.0) + time.perf_counter() - started

    def log(self, outcomes: TensorDictBase, *metrics: Mapping[str, float]) -> None:
        """Log the present iteration, with times and speeds.

        Args:
            outcomes: the decisions of all processes, with ``("next", "step_mask")`` and, for
                ``episode_order=learnable``, ``task_id`` and all else that the environment wrote under ``"next"``.
            *metrics: numbers by their names in the log.
        """
        self._tell(outcomes)
        now = time.perf_counter()
        seconds = now - self._clock
        speed = int(outcomes[NEXT, STEP_MASK].sum()) / seconds
        self.state["speeds"].append(speed)
        logged = {name: value for numbers in metrics for name, value in numbers.items()}
        logged |= {
            **collector_stats(cast("BaseCollector | None", self._parts.get("collector"))),
            **self._turns.metrics(),
            **self._seconds,
            "time/iteration": seconds,
            "time/elapsed": now - self._started,
            "env_steps_per_s": speed,
            "decisions_per_s": outcomes.numel() / seconds,
        }
        self._logger.log(logged, self._iteration)
        self._bar.update()
        show_iteration(self._bar, self._iteration, logged)
        self._save_train_videos()
        self._advise(logged)
        self._check_crashes(logged.get("env/num_episodes", 0), logged.get("env/crashed_episodes", 0))

    def _save_train_videos(self) -> None:
        if not self.plan.train_videos.films(self._iteration):
            return
        videos = self.plan.train_videos.write(self._iteration, self._fps) if self._is_first_rollout else []
        self._logger.log_videos("train", parallel.broadcast_object(videos, self.roles.rollouts[0]), self._iteration)

    def _tell(self, outcomes: TensorDictBase) -> None:
        """Tell the sources of episodes that want to know it which tasks were solved."""
        samplers = [sampler for sampler in self._samplers if sampler.mode == "learnable"]
        if not samplers:
            return
        if outcomes.get(TASK_ID, None) is None:
            raise ValueError(
                f"episode_order=learnable needs {TASK_ID!r} in what run.log is given; keep it in the recipe's batch as "
                "recipes/ppo.py does, or type episode_order=balanced"
            )
        ended = finished(outcomes)
        for sampler in samplers:
            sampler.tell(outcomes[TASK_ID][ended].tolist(), outcomes[NEXT, SUCCESS].squeeze(-1)[ended].tolist())

    def log_step(self, metrics: Mapping[str, float]) -> None:
        """Log a step that collects nothing; its losses are shown beside the progress bar, each until the next."""
        self._logger.log(metrics, self._iteration)
        losses = {name.removeprefix("train/"): value for name, value in metrics.items() if name.endswith("loss")}
        self._losses |= {name: f"{value:.3f}" for name, value in losses.items()}
        self._bar.set_postfix(self._losses, refresh=False)
        self._bar.update()

    def write(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._bar.write(text)

    def _advise(self, logged: Mapping[str, float]) -> None:
        """Say once whether other stages would be faster, when calls take as long as they will."""
        told = "advised" in self.state or self._iteration < _ADVISED_AFTER
        if not self.pipeline or told or self.spec.batched or not self.roles.collects:
            return
        seconds = {part: logged[f"time/{part}"] for part in ("env", "policy", "rollout")}
        calls = cast(EpisodeCollector, self._parts["collector"]).calls
        self.state["advised"] = advise(self.pipeline["stages"], seconds, calls, self.env.num_envs)
        if self.state["advised"]:
            self.write(f"iteration {self._iteration}: {self.state['advised']}")

    # ---- what happens in between

    @property
    def _fps(self) -> float:
        """Frames per second of a video in real time, one for each decision."""
        return frames_per_second(self.spec, self.policy.chunk_size)

    def _note_start(self) -> None:
        """Work begins: write what this process runs; what a full disk refuses is tried again after an iteration."""
        begin_work()
        if getattr(self.config, "timeline", False) and not self._noted:
            timeline.begin(self.folder / "timeline" / f"process_{parallel.rank():05d}.jsonl")
        self._noted = self._noted or note_start(self.config, self.folder, self.plan.facts)

    def _save_policy(self) -> None:
        """Write the policy; all processes that learn send the first one what they have of it."""
        if not self.roles.learns:
            return
        try:
            if parallel.is_main():
                write_folder_atomically(self.folder / "policy", self._write_policy)
            else:
                self._write_policy(self.folder / "policy")
        except (OSError, RuntimeError, SafetensorError) as error:  # whatever is raised on a full disk
            raise OSError(
                f"{self.folder / 'policy'} could not be written: {error}; make room, then type the command above: it "
                "resumes after the last iteration"
            ) from error

    def _write_policy(self, folder: Path) -> None:
        """Write the policy's own files, and what it was trained on; all processes that learn together."""
        self.policy.save_pretrained(folder)
        if parallel.is_main():
            evaluated_on = self.plan.evaluated_on.id
            evaluation = self.config.eval
            note_origin(folder, self.name, self.config.env, self.spec, self.policy.chunk_size, evaluation, evaluated_on)

    def _begin(self) -> None:
        seed_rank(self.config.seed)  # before cloning, in which a flow draws noise for each process's part
        self._warm_start()
        self._turns.begin()
        self.state |= {"evaluations": [], "speeds": []}
        self._checkpoints.finish(0)

    def _warm_start(self) -> None:
        """Have the first process record demonstrations, and all clone them."""
        settings, cloning = self.config.demonstrations, self.config.cloning
        if not settings["episodes"] or self.config.policy.get("checkpoint") or not self._warm_starts:
            return

        first = self.roles.rollouts[0]

        def recorded() -> tuple[Samples, Samples] | None:
            return self.record(self.policy) if parallel.rank() == first else None

        found = self._checkpoints.interruptible(recorded)
        if settings.get("folder") is None:
            found = parallel.broadcast_object(found, first)
        else:
            parallel.broadcast_object(None, first)  # now they are there

        def learn() -> None:
            samples, heldout = found or read(self.spec, self.policy, self.config.eval["seed"], settings)
            folder = self.folder / "warm_start"  # its steps are not the run's
            with contextlib.closing(RunLogger(folder, -1, events_of(self.config.logger, folder))) as logger:
                clone(self.policy, samples, cloning, self.stop_if_asked, heldout, logger.log)

        self._checkpoints.apart(lambda: self.on_actors(learn))

    def _check_crashes(self, finished: float, crashed: float) -> None:
        """Say it once if most episodes crash, each time if all do, and end a run that gets no others."""
        all_crashed = crashed > 0 and finished == 0
        in_a_row = self.state["crashed_iterations"] = self.state.get("crashed_iterations", 0) + 1 if all_crashed else 0
        if in_a_row == _CRASHED_ITERATIONS:
            raise SimulatorCrash(
                f"in {in_a_row} iterations in a row every episode that ended had crashed; the log names them. Run "
                "`python -m vla_envs` to check the simulator; then type the command above to go on"
            )
        if all_crashed:
            self.write(f"iteration {self._iteration}: no episode finished; all {crashed:.0f} that ended had crashed")
        elif crashed > finished and not self.state.get("told_of_crashes"):
            self.state["told_of_crashes"] = True
            self.write(
                f"iteration {self._iteration}: {crashed:.0f} of {crashed + finished:.0f} episodes crashed; nothing is "
                "learnt from what they would have been. The log names them, env/crashed_episodes counts them"
            )

    def _evaluates_after(self, iteration: int) -> bool:
        every = getattr(self.config, "evaluate_every", 0)
        first = iteration == 0 and self._warm_starts
        return first or iteration >= self._last or bool(every and iteration and iteration % every == 0)

    def _evaluate(self, iteration: int) -> None:
        notes = {} if self.plan.other_suite is None else {"evaluated_on": self.plan.evaluated_on.id}
        title = " on ".join([f"evaluation after {iteration}", *notes.values()])
        folder = self.folder / "evaluations" / f"iteration_{iteration:04d}"

        def run() -> dict[str, EvaluationResult]:
            with self._evaluation_env() as env:
                return self.evaluator.run_both(title, env, self.policy, folder, **self.pipeline)

        with self._turns.acting():
            share = self._checkpoints.interruptible(lambda: self.on_rollouts(run))
        results = self.on_rollouts(
            lambda: {name: gather(part, folder / f"{name}.jsonl") for name, part in share.items()}
        )
        if len(self.roles.rollouts) < parallel.world_size():
            results = parallel.broadcast_object(results, self.roles.rollouts[0])
        self._failure = results["eval"].failure
        for result in results.values():
            if result.failure:  # if the simulator is broken for good, the next iteration ends the run
                self.write(f"{title}: {result.failure}")
        folder_of_videos = self.folder / "videos" / f"iteration_{iteration:04d}"
        videos = save_videos(folder_of_videos, results["eval"], self._fps)
        metrics = {name: value for prefix, result in results.items() for name, value in result.metrics(prefix).items()}
        self.state["evaluations"].append((results["eval"].table(), metrics))
        if (collector := self._parts.get("collector")) is not None and self.plan.other_suite is None:
            cast(BaseCollector, collector).reset()  # the evaluation used the same simulators
        self._logger.log({**metrics, "time/elapsed": time.perf_counter() - self._started}, iteration, notes)
        self._logger.log_videos("eval", videos, iteration)

    def _evaluation_env(self) -> AbstractContextManager[VLAEnv]:
        """Give the environment of an evaluation: that of training, or another suite's as long as it takes."""
        if self.plan.other_suite is None:
            return contextlib.nullcontext(self.env)
        return self.plan.other_suite.started(self.policy.chunk_size)

    def _finish(self) -> None:
        seconds = time.perf_counter() - self._started
        evaluations, speeds = self.state["evaluations"], sorted(self.state["speeds"])
        finish_folder(self.folder, evaluations[-1][1], seconds, self.plan.evaluated_on)
        self._logger.close()
        if self.roles.collects:
            self.env.close()
        speed = speeds[len(speeds) // 2] if speeds else None
        if "ended" in self.state:
            print(f"\nstopped: {self.state['ended']}")
        if parallel.is_main() and (said := never_trained(self.folder)):
            print(f"\n{said}")
        compared = before_and_after(self.folder, self.evaluator.mean_of) if parallel.is_main() else []
        where = [*self._draw_curves(), *self._logger.where()]
        suites = self.plan.describe_suites()
        summarise(
            self.name.upper(), self.folder, suites, evaluations, compared, speed, seconds, where, self.plan.elsewhere()
        )
        if self._failure:
            raise SimulatorCrash(f"the run is complete, but its last evaluation has no result: {self._failure}")

    def _draw_curves(self) -> list[str]:
        """Draw what was logged; returns where that is, or what to type for it."""
        if not parallel.is_main():
            return []
        if importlib.util.find_spec("matplotlib") is None:
            return ["for a picture of them: pip install 'vla-torchrl[curves]'"]
        elsewhere = "" if self.plan.other_suite is None else f", evaluated on {self.plan.evaluated_on.id}"
        title = f"{self.name} in {self.spec.id}{elsewhere}, {self.folder.name}"
        drawn: list[Path | None] = []
        draw = partial(curves.draw, self.folder, title, self._unit)
        attempt(str(self.folder / curves.NAME), lambda: drawn.append(draw()), "the run has all but it", Exception)
        return [str(path) for path in drawn if path is not None]

    # ---- evaluation alone

    def evaluate(
        self, ablation: str = "", policy: TensorDictModuleBase | None = None, **options: Any
    ) -> EvaluationResult:
        """Evaluate the policy once, and write its videos.

        It goes on after the episodes whose results are in the folder, see :meth:`check_results`.

        Args:
            ablation: name of what is done to what the policy sees (``observe``), or of another ``policy``; its results
                and videos are apart.
            policy: acts in its place.
            **options: of :meth:`~vla_algos.run.evaluator.Evaluator.run`.
        """
        self._note_start()
        path = self.folder / (episode_log.ablated_name(ablation) if ablation else episode_log.NAME)
        options = {"go_on": True, "record": self.evaluator.local_videos, **self.pipeline, **options}
        share = self.evaluator.run(ablation or "evaluation", self.env, policy or self.policy, path, **options)
        result = gather(share, path)
        save_videos(self.folder / "videos" / ablation, result, self._fps)
        return result

    def unfinished(self, ablation: str) -> list[int]:
        """List the indices of the episodes of an ablation that have no result in the folder yet."""
        episodes = self.evaluator.episodes(self.spec)
        known = finished_episodes(self.folder / episode_log.ablated_name(ablation), episodes, self.spec.chain_length)
        videos = range(self.evaluator.videos)  # which run again
        return [index for index in range(len(episodes)) if index not in known or index in videos]

    def check_results(self) -> None:
        """Refuse to go on in a folder with results of another policy than :meth:`make_policy` has made.

        Raises:
            ValueError: its weights are others.
        """
        episode_log.check_policy(self.folder, self.policy)

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Note what came of the run; called when everything is written."""
        finish_folder(self.folder, metrics, time.perf_counter() - self._started, self.spec)


def collector_stats(collector: BaseCollector | None) -> dict[str, float]:
    """Join a collector's counters of all processes: frames and restarts add up, of the rest the largest counts."""
    everybodys = [
        stats for stats in parallel.all_gather_object(None if collector is None else collector.stats()) if stats
    ]
    return {
        name: sum(stats[name] for stats in everybodys)
        if name in ("frames", "requested_frames_per_batch", "env/worker_restarts")
        else max(stats[name] for stats in everybodys)
        for name in everybodys[0]
    }
