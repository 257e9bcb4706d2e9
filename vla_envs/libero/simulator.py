"""One LIBERO arm: shipped initial states, exact resets, cameras that are drawn only when observed."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from vla_envs.libero.package import check_versions, find_assets, initial_states, task_file
from vla_envs.libero.spec import FIXTURES
from vla_envs.rendering.egl import check_gpus
from vla_envs.simulator import Episode, Observation, Outcome, SimulatorSpec
from vla_envs.stress import hand_way

_MOVE, _ACTIONS = 0.05, 15  # m; of the hand's target, by an action of 1; of the hand's way to its start
_SETTLE = {True: np.array([0, 0, 0, 0, 0, 0, -1.0]), False: np.zeros(7)}  # by reset_gripper_open


class LiberoSimulator:
    """Switching the task at ``reset`` costs a second or two when no built world of it is waiting in this process."""

    def __init__(self, spec: SimulatorSpec):
        options = spec.options
        check_versions()
        self.spec = spec
        self._assets = find_assets(options["assets"])
        from vla_envs.libero import world  # only now: it imports MuJoCo

        self._worlds = world
        self._world: Any = None  # a World, of the running episode
        self._task: Any = None
        self._settling = _SETTLE[options["reset_gripper_open"]]

    @staticmethod
    def check(spec: SimulatorSpec) -> None:
        check_versions()
        find_assets(spec.options["assets"])
        task_file(spec.tasks[0].group, spec.tasks[0].name)  # LIBERO-PRO's are elsewhere

    check_gpus = staticmethod(lambda spec, gpus: check_gpus(gpus))

    def reset(self, episode: Episode) -> None:
        """Restore the shipped initial state ``trial_id``; ``episode.seed`` has no influence.

        What it leaves open, the poses of fixtures, LIBERO draws as the option ``fixtures`` says.
        """
        task, trial = self.spec.task_of(episode), episode.trial_id
        states = initial_states(task.group, task.name)
        if not 0 <= trial < len(states):
            raise ValueError(f"{self.spec.id} has trials 0 to {len(states) - 1} of {task.name}, got trial_id={trial}")
        if task != self._task:
            self.close()
            with _numpy_seed(0):  # building draws as well
                self._world = self._worlds.world_cache.take(task, self.spec, self._assets)
            self._task = task
        fixtures = FIXTURES[self.spec.options["fixtures"]]
        with self._trusted(), _numpy_seed(0):
            self._world.reset(states[trial], fixtures.seeds(trial), fixtures.loads)
            for _ in range(self.spec.options["settle_steps"]):
                self._world.step(self._settling)

    def perturb(self, kind: str, strength: float, random: np.random.Generator) -> bool:
        if kind == "start":
            start, action = self._world.states()[:3] + hand_way(strength, random), self._settling.copy()
            solved = False
            for _ in range(_ACTIONS):
                action[:3] = np.clip((start - self._world.states()[:3]) / _MOVE, -1, 1)
                solved |= self.step(action).success
            return not solved
        with self._trusted():
            self._world.draw(kind, strength, random)
        return True

    def step(self, action: np.ndarray) -> Outcome:
        with self._trusted():
            success = self._world.step(np.asarray(action, np.float64))
        return Outcome(reward=float(success), success=success)

    def observe(self) -> Observation:
        with self._trusted():
            images, wrist = (self._world.render(camera) for camera in (0, 1))
        return Observation(
            images=images,
            states=self._world.states(),
            task_description=self._task.instruction,
            wrist_images=wrist[None],
        )

    @contextlib.contextmanager
    def _trusted(self) -> Iterator[None]:
        """Close a world that fails: it is in an unknown state, and is not used again."""
        try:
            yield
        except BaseException:
            failed, self._world, self._task = self._world, None, None
            if failed is not None:
                with contextlib.suppress(Exception):  # what it was that failed is the news
                    failed.close()
            raise

    def close(self) -> None:
        if self._world is not None:
            self._worlds.world_cache.give_back(self._world, self.spec.options["cache_gigabytes"])
        self._world = self._task = None


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """LIBERO and robosuite draw from numpy's global generator, which afterwards is as it was."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)
