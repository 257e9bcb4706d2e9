"""CALVIN behind the :class:`~vla_envs.simulator.Simulator` protocol: chains of tasks, and tasks one by one."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_envs.calvin.chains import draw_chain, published_chains
from vla_envs.calvin.expert import Expert
from vla_envs.calvin.package import CHECKOUT, check_packages
from vla_envs.calvin.spec import EVALUATION, SUBTASK_STEPS, spoken
from vla_envs.calvin.states import published_state, start_of
from vla_envs.calvin.world import World, try_renderer
from vla_envs.rendering import egl
from vla_envs.rendering.gpus import show
from vla_envs.simulator import Episode, Observation, Outcome, SimulatorSpec
from vla_envs.stress import hand_way

_MOVE, _ACTIONS, _REST = 0.02, 10, 5  # m, by an action of 1; of the hand's way to its start


class CalvinSimulator:
    """One CALVIN world; an episode loads its scene again (60 ms)."""

    def __init__(self, spec: SimulatorSpec):
        options = spec.options
        check_packages(options["path"])
        self.spec = spec
        on_gpu = options["renderer"] == "egl"
        if on_gpu:
            egl.take_device("EGL_VISIBLE_DEVICES", egl.egl_devices())
        self.world = World(CHECKOUT.find(options["path"]), fixes=options["scene_fixes"], egl=on_gpu)
        self.chain: tuple[str, ...] = ()
        self.done = 0  # tasks of the chain
        self._steps = 0  # since the last of them
        self._before: dict[str, Any] = {}  # what the oracle compares with
        self._sentences: tuple[str, ...] = ()

    @staticmethod
    def check(spec: SimulatorSpec) -> None:
        check_packages(spec.options["path"])
        ok, detail = try_renderer(egl=True) if spec.options["renderer"] == "egl" else (True, "")
        if not ok:
            raise RuntimeError(f"PyBullet's EGL renderer cannot be used on this machine ({detail}); type renderer=tiny")

    @staticmethod
    def check_gpus(spec: SimulatorSpec, gpus: Sequence[int]) -> None:
        if spec.options["renderer"] != "egl":
            raise ValueError(
                f"gpus={show(gpus)}: renderer=tiny draws on the CPU; type env.renderer=egl, or leave out one"
            )
        egl.check_devices(gpus, "EGL_VISIBLE_DEVICES")

    def reset(self, episode: Episode) -> None:
        """Begin a chain, or a task alone; of published chains ``episode.seed`` decides the training sentences alone."""
        options, task = self.spec.options, self.spec.task_of(episode)
        fixes = options["scene_fixes"]
        if options["kind"] == "task":
            # The name, not the index, goes into the seed: an episode is the same with other tasks and on its own.
            seed = (episode.seed, zlib.crc32(task.name.encode()), episode.trial_id)
            letter = options["scenes"][np.random.default_rng([*seed, 1]).integers(len(options["scenes"]))]
            self.chain = (task.name,)
            self.world.begin(letter, *start_of(task.name, letter, fixes, *seed))
        else:
            letter = options["scenes"][episode.task_id]
            condition, self.chain = self._chain_of(episode, letter)
            self.world.reset(letter, *published_state(condition, letter if fixes else "D"))
        draw = np.random.default_rng([episode.seed, episode.trial_id, *map(ord, options["kind"])])
        said = [spoken(name, options["sentences"]) for name in self.chain]
        self._sentences = tuple(sentences[draw.integers(len(sentences))] for sentences in said)
        self.done = self._steps = 0
        self._before = self.world.info()

    def _chain_of(self, episode: Episode, letter: str) -> tuple[Any, tuple[str, ...]]:
        if not self.spec.options["published"]:
            return draw_chain(episode.seed, ord(letter), episode.trial_id)
        chains = published_chains()
        if episode.trial_id >= len(chains):
            raise ValueError(f"{self.spec.id} has chains 0 to {len(chains) - 1}, got trial_id={episode.trial_id}")
        return chains[episode.trial_id]

    def perturb(self, kind: str, strength: float, random: np.random.Generator) -> None:
        if kind == "camera":
            self.world.move_camera(strength * random.uniform(-1, 1, 6))
            return
        move, grip = hand_way(strength, random) / _ACTIONS / _MOVE, self.world.states()[0][14]
        for place in range(_ACTIONS + _REST):
            self.world.step(np.array([*(move if place < _ACTIONS else 0 * move), 0, 0, 0, grip]))
        self._before = self.world.info()  # what was done on the way does not count

    def step(self, action: np.ndarray) -> Outcome:
        command = np.asarray(action, np.float64).copy()
        command[6] = 1.0 if command[6] > 0 else -1.0  # calvin_env takes nothing in between
        self.world.step(command)
        self._steps += 1
        solved = self.done < len(self.chain) and self.world.solved(self.chain[self.done], self._before)
        if solved:
            self.done, self._steps = self.done + 1, 0
            if self.done < len(self.chain):
                self._before = self.world.info()
        published, complete = self.spec.options["kind"] == EVALUATION, self.done == len(self.chain)
        return Outcome(
            reward=float(solved),
            success=complete,
            ends_chunk=published and solved,
            ends_episode=published and not complete and self._steps == SUBTASK_STEPS,
            subtasks=self.done,
        )

    def observe(self) -> Observation:
        images, wrist = self.world.render(self.spec.image_shape[0], wrist=self.spec.wrist_image_shape is not None)
        return Observation(
            images=images,
            states=self.world.states()[0][:7].astype(np.float32),
            task_description=self._sentences[min(self.done, len(self.chain) - 1)],
            wrist_images=None if wrist is None else wrist[None],
        )

    def close(self) -> None:
        self.world.close()


class ExpertSimulator(CalvinSimulator):
    """Tasks for each of which there is a scripted expert."""

    _expert: Expert | None = None

    def reset(self, episode: Episode) -> None:
        super().reset(episode)
        self._expert = None

    def expert_action(self) -> np.ndarray:
        """Ask the scripted expert, which knows where things are, for an action, float32 ``[7]`` within the bounds."""
        if self._expert is None:
            self._expert = Expert(self.world, self.chain[0])
        return self._expert.action()
