"""One Meta-World arm behind the :class:`~vla_envs.simulator.Simulator` protocol."""

import sys
import warnings
import zlib
from functools import cache, partial
from typing import Any

import numpy as np

from vla_envs.folders import check_installed
from vla_envs.rendering.egl import check_gpus
from vla_envs.simulator import Episode, Observation, Outcome, SimulatorSpec
from vla_envs.stress import hand_way

_VERSIONS = {"metaworld": "3.1.1", "mujoco": "3.3.0"}  # whose episodes and pixels results belong to
INSTALL = "pip install 'vla-torchrl[metaworld]'"
_check_installed = partial(check_installed, "Meta-World", {name: name for name in _VERSIONS}, _VERSIONS, INSTALL)
_TABLE = (-0.4, 0.45), (0.4, 0.95)  # m; the part in view
_MOVE = 0.01  # m; of the hand, by an action of 1
_ACTIONS, _REST = 10, 5  # of the hand's way to its start


class MetaWorldSimulator:
    """Switching the task at ``reset`` costs 0.1 to 0.3 s when no built world of it is waiting in this process."""

    def __init__(self, spec: SimulatorSpec):
        _check_installed()
        self.spec = spec
        from vla_envs.metaworld import worlds  # only now: it imports MuJoCo

        self._worlds = worlds
        self._built: Any = None  # a World, of the running episode
        self._world: Any = None  # Meta-World's environment in it
        self._task: Any = None  # of the running episode
        self._shaped = 0.0  # Meta-World's shaped reward of the current state, 0 to 10
        self._look: Any = None  # a Look, under stress

    @staticmethod
    def check(spec: SimulatorSpec) -> None:
        _check_installed()

    check_gpus = staticmethod(lambda spec, gpus: check_gpus(gpus))

    def reset(self, episode: Episode) -> None:
        task = self.spec.task_of(episode)
        if task != self._task:
            self.close()
            self._built = self._worlds.world_cache.take(task.name, self.spec)
            self._world, self._task = self._built.env, task
        # Meta-World ignores reset(seed=...): with seeded_rand_vec it draws from np_random instead.
        if self.spec.options["protocol"] == "lerobot":
            _draw_twice(self._world, np.random.default_rng(episode.trial_id))
        else:  # The task's name, not its index, goes into the seed: an episode is the same in MT50 and on its own.
            name = zlib.crc32(self._task.name.encode())
            self._world.np_random = np.random.default_rng([episode.seed, name, episode.trial_id])
            _draw(self._world)
            _place(self._world)
        self._world.max_path_length = sys.maxsize  # Meta-World raises past its own horizon; ours is in the spec
        self._shaped, self._look = 0.0, None
        for _ in range(self.spec.options["settle_steps"]):
            self._shaped = self._world.step(np.zeros(4, np.float32))[1]

    def perturb(self, kind: str, strength: float, random: np.random.Generator) -> bool:
        if kind == "start":
            move = np.append(hand_way(strength, random) / _ACTIONS / _MOVE, 0).astype(np.float32)
            return not any([self.step(each).success for each in [*[move] * _ACTIONS, *[0 * move] * _REST]])
        self._look = self._look or self._worlds.Look(_TABLE, self._world.model, self._world.data)
        self._look.draw(kind, strength, random)
        return True

    def step(self, action: np.ndarray) -> Outcome:
        _, shaped, _, _, info = self._world.step(action)
        success = bool(info["success"])
        # A difference, because a shaped reward that is paid in every state makes it worth while to stall.
        progress = float(shaped - self._shaped) / 10 if self.spec.options["reward_type"] == "progress" else 0.0
        self._shaped = shaped
        return Outcome(reward=float(success) + progress, success=success)

    def observe(self) -> Observation:
        return Observation(
            images=self._built.renderer.render(self._world.model, self._world.data, look=self._look),
            states=self._world._get_curr_obs_combined_no_goal()[:4].astype(np.float32),
            task_description=self._task.instruction,
        )

    def expert_action(self) -> np.ndarray:
        """Ask Meta-World's scripted expert for an action, float32 ``[4]`` within the bounds."""
        world = self._world
        current = world._get_curr_obs_combined_no_goal()
        observation = np.hstack((current, current, world._get_pos_goal()))
        with warnings.catch_warnings():  # that the action is out of bounds, which is why it is clipped here
            warnings.simplefilter("ignore")
            return np.clip(_expert(self._task.name).get_action(observation), -1.0, 1.0).astype(np.float32)

    def close(self) -> None:
        if self._built is not None:
            self._worlds.world_cache.give_back(self._built, self.spec.options["cache_gigabytes"])
        self._built = self._world = self._task = None


def _draw(world: Any) -> None:
    """Draw the random vector of an episode from ``world.np_random``, and freeze it as Meta-World's ``set_task`` does.

    Meta-World's ``reset()`` places the objects twice. Unfrozen, it draws again the second time, on the traces of the
    first: twelve tasks then start where the benchmark never does. One physics step in place of 250 is enough here,
    where no draw depends on the hand: it says where the bodies are.
    """
    frame_skip, move_hand = world.frame_skip, world._reset_hand
    world._freeze_rand_vec, world.frame_skip = False, 1
    world._reset_hand = lambda *_, **__: move_hand(steps=1)
    try:
        world.reset()
    finally:
        world._freeze_rand_vec, world.frame_skip = True, frame_skip
        del world._reset_hand


def _place(world: Any) -> None:
    """Reset to the drawn vector, without the first of Meta-World's two resets, of which nothing is left."""
    times = iter((lambda: None, world.reset_model))
    world.reset_model = lambda: next(times)()
    try:
        world.reset()
    finally:
        del world.reset_model


def _draw_twice(world: Any, random: np.random.Generator) -> None:
    """Reset as LeRobot, whose random vector is not frozen: the second placing draws again, on traces of the first.

    Without the traces of the episode before, in which LeRobot begins: they would move a marker by 10 micrometres.
    """
    import mujoco

    world.np_random, world._freeze_rand_vec = random, False
    mujoco.mj_resetData(world.model, world.data)
    world.reset()


@cache
def _expert(task: str) -> Any:
    from metaworld import policies

    stem = "".join(part.capitalize() for part in task.split("-"))  # "pick-place-v3" -> "PickPlaceV3"
    stem = {"PegInsertSideV3": "PegInsertionSideV3"}.get(stem, stem)
    return getattr(policies, f"Sawyer{stem}Policy")()
