"""What a run is going to be in this process: its settings, and what follows from them before anything is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vla_algos import parallel
from vla_algos.demonstrations import check_heldout
from vla_algos.foresight import check_sight
from vla_algos.imitation import check_state_noise
from vla_algos.lerobot.demonstrations import LeRobotDemonstrations
from vla_algos.run.arguments import as_typed
from vla_algos.run.evaluated import OtherSuite, check_share, check_temperature, evaluated_env, make_env_spec
from vla_algos.run.evaluator import Evaluator
from vla_algos.run.loggers import check_keys
from vla_algos.run.origin import differences
from vla_algos.run.roles import Roles
from vla_algos.run.summary import describe_spec
from vla_algos.run.train_videos import TrainVideos
from vla_algos.run.warm_start import demonstration_seed, find_demonstrations
from vla_envs import SimulatorSpec
from vla_envs.demonstrations import check_expert, noise_of_dimensions
from vla_envs.stages import TOGETHER, check_stages
from vla_policies import VLAPolicy


class Plan:
    """Settings that fit each other; nothing is written, and no simulator is started or imported.

    Args:
        config: the settings, see :func:`vla_algos.run.config.read_config`.
        folder: of the run, which need not be there.
        roles: of this process.
        cores: for this process.

    Attributes:
        config, roles: as given.
        spec: description of the environment.
        pipeline: the section of that name; empty where the recipe has none.
        evaluator: of ``config.eval``.
        other_suite: of ``eval.env``; ``None`` where evaluations are in the environment of training.
        demonstration_seed: family of the demonstrations' initial states; 0 where the recipe has none.
        train_videos: what films training.
        facts: for the run's record, of the demonstrations that are there.

    Raises:
        ValueError: settings that do not fit each other.
    """

    def __init__(self, config: SimpleNamespace, folder: Path, roles: Roles, cores: int):
        self.config, self.roles, self._cores = config, roles, cores
        self.spec: SimulatorSpec = make_env_spec(config.env)
        self.pipeline: Mapping = getattr(config, "pipeline", {})
        self._check_stages(config.env, self.spec)
        self.evaluator = Evaluator(**config.eval)
        self.other_suite = self._find_other_suite()
        self.evaluator.episodes(self.evaluated_on)  # there are so many
        if (group := config.env.get("group_size", 1)) != 1 and not hasattr(config, "episode_order"):
            raise ValueError(f"env.group_size={group}: {config.recipe}.py has no groups; leave it out")
        self.demonstration_seed, self._clones = 0, False
        self.facts: dict[str, Any] = {}
        if hasattr(config, "demonstrations"):
            self.demonstration_seed = demonstration_seed(config.seed, config.eval["seed"])
            self._check_warm_start()
        self.train_videos = TrainVideos(folder / "videos" / "training", **getattr(config, "train_videos", {}))
        self._check_filming()
        check_keys(getattr(config, "logger", {}), folder)

    @property
    def evaluated_on(self) -> SimulatorSpec:
        """Description of the environment of evaluations: that of training, unless ``eval.env`` says another one."""
        return self.spec if self.other_suite is None else self.other_suite.spec

    def per_rollout(self, total: int, what: str) -> int:
        """Return the part of each process that collects of a number that is given for the whole run.

        Raises:
            ValueError: it cannot be divided evenly.
        """
        return parallel.per_rank(total, what, len(self.roles.rollouts))

    def own_share(self, env: Mapping[str, Any], section: str = "env") -> dict[str, Any]:
        """Return the settings of an environment as this process starts it: with its part of the simulators."""
        settings = {**env, **self.workers(env, section)}
        if (gpus := self.roles.gpus(env.get("gpus"))) is not None:
            settings["gpus"] = gpus
        return settings

    def workers(self, env: Mapping[str, Any], section: str = "env") -> dict[str, int]:
        """Count this process's environments, and the workers that share them: each has some of every stage."""
        num_envs = self.per_rollout(env["num_envs"], f"{section}.num_envs")
        workers = env.get("num_workers")
        if workers is None:
            stages = self.pipeline["stages"] if self.pipeline else 1
            workers = max(1, min(num_envs // stages, self._cores))
        return {"num_envs": num_envs, "num_workers": workers}

    def describe_suites(self) -> str:
        """Name the suite of training, and that of evaluations where it is another one, for printing."""
        if self.other_suite is None:
            return describe_spec(self.spec)
        other = self._otherwise()
        shown = "; ".join(f"{name}={now}, not {then}" for name, (then, now) in other.items() if name != "id")
        lines = [f"trained on {describe_spec(self.spec)}", f"evaluated on {describe_spec(self.evaluated_on)}"]
        return "\n".join([*lines, *([f"  otherwise than training: {shown}"] if shown else [])])

    def elsewhere(self) -> list[str]:
        """List the settings with which ``recipes/evaluate.py`` repeats evaluations of another suite; none otherwise."""
        if self.other_suite is None:
            return []
        env = [f"env.{name}={as_typed(now)}" for name, (_, now) in self._otherwise().items()]
        return [*env, *self.evaluator.settings_of_episodes()]

    def _otherwise(self) -> dict[str, tuple[Any, Any]]:
        return differences(self.config.env, evaluated_env(self.config.env, self.config.eval))

    def check_policy(self, policy: VLAPolicy) -> None:
        """Refuse a policy that could not act, clone or be evaluated as asked, before any work.

        Raises:
            ValueError: its chunks do not fit the environment, ``cloning.auxiliary`` of one without ``sight``, it
                samples at no temperature, or cannot act in the other suite.
        """
        check_share(self.own_share(self.config.env), policy)
        if self._clones:
            check_sight(policy, self.config.cloning.get("auxiliary", 0.0))
        check_temperature(policy, self.evaluator.temperature)
        if self.other_suite is not None:
            self.other_suite.check(policy)

    def _find_other_suite(self) -> OtherSuite | None:
        if not self.evaluator.env:
            return None
        env = evaluated_env(self.config.env, self.config.eval)
        spec = make_env_spec(env, "eval.env")
        self._check_stages(env, spec, "eval.env")
        return OtherSuite(self.own_share({**env, "group_size": 1}, "eval.env"), spec)

    def _check_stages(self, env: Mapping[str, Any], spec: SimulatorSpec, section: str = "env") -> None:
        if self.pipeline:
            workers, batched = self.workers(env, section), spec.id if spec.batched else ""
            check_stages(self.pipeline["stages"], workers["num_envs"], workers["num_workers"], batched)
            if batched and self.pipeline.get("overlap_resets"):
                raise ValueError(f"pipeline.overlap_resets=true: {TOGETHER.format(id=batched)}")

    def _check_filming(self) -> None:
        """Refuse to film more environments than there are."""
        wanted = self.train_videos.environments
        if wanted and wanted > (there := self.workers(self.config.env)["num_envs"]):
            whose = "" if len(self.roles.rollouts) == 1 else " of the first process, which films"
            raise ValueError(
                f"train_videos.environments={wanted}: there are {there} environments{whose}; type "
                f"train_videos.environments={there} or fewer"
            )

    def _check_warm_start(self) -> None:
        if self.config.demonstrations["episodes"] and "steps" not in self.config.cloning:
            raise ValueError("cloning.steps is missing: how many steps? type sft=expert, or demonstrations.episodes=0")
        settings = self.config.demonstrations
        if "noise" in settings:
            noise_of_dimensions(settings["noise"], self.spec)
        cloned = not self.config.policy.get("checkpoint") or self.config.recipe == "sft"
        self._clones = bool(settings["episodes"]) and cloned
        if not self._clones:
            found = None
        elif (found := find_demonstrations(settings, self.spec, self.config.eval["seed"])) is None:
            check_heldout(settings.get("heldout", 0.0), settings["episodes"] // len(self.spec.tasks))
            with contextlib.suppress(ImportError):  # whoever starts it says what to install
                check_expert(self.spec.simulator_class(), self.spec)
        if isinstance(found, LeRobotDemonstrations):
            self.facts["demonstrations"] = found.facts()
        if "state_noise" in self.config.cloning:
            check_state_noise(self.config.cloning["state_noise"], self.spec.state_dim)
