"""The evaluations of a training run, on held-out episodes, and the summary of it that they end with."""

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from vla_algos import distributed
from vla_algos.evaluation import EvaluationResult
from vla_algos.run.comparing import before_and_after
from vla_algos.run.environments import (
    as_evaluated,
    check_share,
    describe_spec,
    evaluated_env,
    facts_of,
    make_env_spec,
    own_share,
)
from vla_algos.run.evaluator import Evaluator, check_temperature
from vla_algos.run.logging import never_trained
from vla_algos.run.run import Run
from vla_algos.run.seeds import random_state, set_random_state
from vla_algos.run.training_env import differences
from vla_algos.run.videos import save_videos
from vla_common.experiments import as_typed
from vla_envs import EpisodeQueue, SimulatorSpec, VLAEnv, make_env
from vla_envs.gym.env import frames_per_second
from vla_envs.make import check_machine
from vla_envs.workers.pool import SimulatorCrash
from vla_policies import VLAPolicy
from vla_policies.sharding import gathered


class HeldOut:
    """Evaluates a policy on the same held-out episodes each time, greedy and filmed, and sampled where asked.

    Args:
        run: has the settings (``eval``, ``env``, ``pipeline``), and gets results and videos.
        spec: of the environment of training.
        processes: that evaluate; ``None`` for all.

    Attributes:
        spec: of the environment of evaluations.

    Raises:
        ValueError: settings that do not fit each other, or fewer initial states than are asked for.
    """

    def __init__(self, run: Run, spec: SimulatorSpec, processes: int | None = None):
        config = run.config
        self.run, self.spec, self._trained_on = run, spec, spec
        self.evaluator = Evaluator(**config.eval)
        self._pipeline: Mapping[str, Any] = getattr(config, "pipeline", {})
        self._other: Mapping[str, Any] | None = None  # settings of another suite, as this process starts it
        env = {**evaluated_env(config.env, config.eval), "group_size": 1}
        self._otherwise = differences(config.env, env)  # than training: {setting: (then, now)}
        if config.eval.get("env"):
            self.spec = make_env_spec(env, "eval.env")
            self._other = own_share(env, self.spec, self._pipeline, "eval.env", processes)
        self.evaluator.episodes(self.spec)  # there are so many
        self.spec = as_evaluated(self.spec, self.evaluator.trials)
        run.facts |= facts_of(self.spec)

    def check_policy(self, policy: VLAPolicy) -> None:
        """Refuse a policy that samples at no temperature, or cannot act in the other suite, before any work."""
        check_temperature(policy, self.evaluator.temperature)
        if self._other is None:
            return
        try:
            check_share(self._other, policy)
            policy.check_environment(self.spec)
        except ValueError as error:
            raise ValueError(f"eval.env.id={self.spec.id}: {error}") from error
        check_machine(self.spec, self._other["num_envs"], self._other.get("gpus"))
        self.spec.check()

    def __call__(self, env: VLAEnv, policy: VLAPolicy, iteration: int, collector: Any = None) -> None:
        """Evaluate once, in all processes, and log it; see :meth:`measure`."""
        self.note(self.measure(env, policy, iteration, collector), policy, iteration)

    def measure(
        self, env: VLAEnv, policy: VLAPolicy, iteration: int, collector: Any = None
    ) -> dict[str, EvaluationResult]:
        """Evaluate once, in all processes that share an environment; the episodes that run in it are abandoned.

        ``collector`` is reset, where the evaluation uses its simulators. Returns results by the prefix of their
        metrics: ``eval``, ``eval_sampled``.
        """
        folder = self.run.folder / "evaluations" / f"iteration_{iteration:04d}"
        title = f"evaluation after {iteration}" + (f" on {self.spec.id}" if self._other else "")
        with self._started(env, policy.chunk_size) as held_out, gathered(policy):
            results = self.evaluator.run_both(title, held_out, policy, folder, **self._pipeline)
        if collector is not None and self._other is None:
            collector.reset()
        return results

    @contextlib.contextmanager
    def _started(self, env: VLAEnv, chunk_size: int) -> Iterator[VLAEnv]:
        """Start the simulators of the other suite, if there is one; random numbers continue where they were."""
        if self._other is None:
            yield env
            return
        before = random_state()
        other = make_env(**self._other, chunk_size=chunk_size, episodes=EpisodeQueue())
        try:
            yield other
        finally:
            other.close()
            set_random_state(before)

    def note(self, results: dict[str, EvaluationResult], policy: VLAPolicy, iteration: int) -> None:
        """Log what :meth:`measure` found, with its videos."""
        self.run.state["failure"] = next((each.failure for each in results.values() if each.failure), "")
        for result in results.values():
            if result.failure:  # broken for good, the next iteration ends the run
                self.run.say(f"evaluation after {iteration}: {result.failure}")
        fps = frames_per_second(self._trained_on, policy.chunk_size)
        videos = save_videos(self.run.folder / "videos" / f"iteration_{iteration:04d}", results["eval"], fps)
        metrics = {name: value for prefix, result in results.items() for name, value in result.metrics(prefix).items()}
        self.run.state.setdefault("evaluations", []).append((results["eval"].table(), metrics))
        self.run.log(iteration, metrics, notes={"evaluated_on": self.spec.id} if self._other else None)
        self.run.log_videos("eval", videos, iteration)

    def describe(self) -> str:
        """Name the suite of training, and that of evaluations where it is another one, for printing."""
        if self._other is None:
            return describe_spec(self.spec)
        lines = [f"trained on {describe_spec(self._trained_on)}", f"evaluated on {describe_spec(self.spec)}"]
        others = [f"{name}={now}, not {then}" for name, (then, now) in self._otherwise.items() if name != "id"]
        if others:
            lines.append(f"  otherwise than training: {'; '.join(others)}")
        return "\n".join(lines)

    def summarise(self) -> None:
        """End the run: note its result, and print it and where everything is. SimulatorCrash: there is none."""
        run, state = self.run, self.run.state
        evaluations, speeds = state["evaluations"], sorted(state.get("speeds", []))
        ended, failure = {"ended": state["ended"]} if "ended" in state else {}, state.get("failure")
        where = run.finish(evaluations[-1][1], ended) if not failure else []
        if distributed.is_main():
            texts = [f"stopped: {state['ended']}"] if "ended" in state else []
            texts += [*never_trained(run.folder), self.describe()]
            shown = [("before", evaluations[0])] * (len(evaluations) > 1) + [("after", evaluations[-1])]
            for when, (table, metrics) in shown:
                rate = metrics.get("eval_sampled/success_once")
                sampled = "" if rate is None else f"\nsampled: {100 * rate:.1f}%"
                texts.append(f"{when} {run.config.recipe.upper()}\n{table}{sampled}")
            texts += before_and_after(run.folder, self.evaluator.mean_of)
            speed = f", {speeds[len(speeds) // 2]:.0f} env steps/s in training (median)" if speeds else ""
            rows = {
                "run": run.folder,
                "time": f"{run.elapsed / 60:.1f} minutes{speed}",
                "policy": run.folder / "policy",
                "checkpoints": run.folder / "checkpoints",
                "curves": f"\n{' ' * 13}".join([*where, str(run.folder / "metrics.jsonl")]),
                **({"videos": run.folder / "videos"} if (run.folder / "videos").is_dir() else {}),
                "evaluate": shlex.join(["vla-recipe", "run", "evaluate", *self._typed()]),
            }
            texts.append("\n".join(f"{name:<12} {value}" for name, value in rows.items()))
            print("\n" + "\n\n".join(texts))
        if failure:
            raise SimulatorCrash(f"the run is complete, but its last evaluation has no result: {failure}")

    def _typed(self) -> list[str]:
        """List the settings with which evaluate.py repeats the evaluations of this run."""
        settings: dict[str, Any] = {"policy.checkpoint": str(self.run.folder / "policy")}
        if self._other is not None:
            settings |= {f"env.{name}": now for name, (_, now) in self._otherwise.items()}
            settings["eval.trials"] = self.evaluator.trials
            for name in ("repeats", "seed", "mean_of"):
                if (value := getattr(self.evaluator, name)) not in (getattr(Evaluator, name), []):
                    settings[f"eval.{name}"] = value
        return [f"{name}={as_typed(value)}" for name, value in settings.items()]
