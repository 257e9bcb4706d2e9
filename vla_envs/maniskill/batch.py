"""Many plate-25 worlds in one batched simulation, on CUDA: what :class:`~vla_envs.workers.pool.WorkerPool` is on a CPU.

Images are drawn, given their background and resized on the GPU, and stay there.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vla_envs.maniskill.overlay import resize
from vla_envs.maniskill.simulator import PlateSimulator, episode_id_of, make_plate_world
from vla_envs.rendering.vulkan import choose_driver, has_gpu
from vla_envs.simulator import Episode, SimulatorSpec
from vla_envs.workers.shared_memory import SharedArrays

_logger = logging.getLogger(__name__)


class BatchedWorlds:
    """``num_envs`` worlds that are stepped together, with the interface of a pool of workers.

    A world whose episode ended in the middle of a chunk is held still until the chunk's end: the simulation cannot
    leave one out; its last frame and state are those of the chunk's end. ``arrays.images`` is a tensor on ``device``:
    ``"cuda"``, the current one, or such as ``"cuda:4"``; on ``"cpu"`` there can be one world only, for tests. A
    simulation that fails takes this process with it; ``restarts`` counts worlds that were not finite any more.
    """

    unstarted: frozenset[int] = frozenset()

    def __init__(
        self, spec: SimulatorSpec, num_envs: int, chunk_size: int, ignore_terminations: bool, device: str = "cuda"
    ):
        PlateSimulator.check(spec)
        if device != "cpu" and not torch.cuda.is_available():
            raise RuntimeError("backend=cuda needs a GPU that torch can use; on a CPU type backend=processes")
        choose_driver()
        self.spec, self._ignore_terminations = spec, ignore_terminations
        if device == "cuda":
            device = f"cuda:{torch.cuda.current_device()}"  # one of several where processes have one each
        self.device = device
        self._world: Any = make_plate_world(
            spec, num_envs=num_envs, sim_backend=f"physx_{device}", render_backend=device if has_gpu() else "cpu"
        )
        self._world._obs_mode = "none"  # steps and resets draw nothing
        self.arrays = SharedArrays.of_one_process(spec, num_envs, chunk_size)
        self.texts = [spec.tasks[0].instruction] * num_envs
        self.executed: list[list[np.ndarray]] = [[] for _ in range(num_envs)]
        self._elapsed = np.zeros(num_envs, np.int64)
        self.restarts = 0
        self._episodes: dict[int, Episode] = {}
        self.errors: dict[int, str] = {}
        self._lost: set[int] = set()  # slots whose state or reward was not finite, until their reset

    def reset(self, episodes: dict[int, Episode]) -> None:
        """Start ``episodes`` in the given slots, leave the others alone, and draw all."""
        if not episodes:
            return
        slots, splits = list(episodes), self._world.splits
        ids = [
            episode_id_of(splits[e.task_id], e.trial_id, e.seed, self.spec.options["only"]) for e in episodes.values()
        ]
        rows = torch.tensor(slots, device=self._world.device)
        chosen = [episode.task_id for episode in episodes.values()]
        self._world.reset(options={"env_idx": rows, "split": chosen, "episode_id": ids})
        self._elapsed[slots] = 0
        for slot in slots:
            self.executed[slot] = []
        self._episodes |= episodes
        self._lost -= episodes.keys()
        self.texts = self._world.get_language_instruction()
        self._observe(episodes)

    def restore(self, running: Mapping[int, tuple[Episode, Sequence[np.ndarray]]]) -> None:
        """Start episodes and execute chunks of actions ``[C, A]``, to where each of them was."""
        # All end together: the worlds move on whether they are asked to or not.
        longest = max((len(chunks) for _, chunks in running.values()), default=0)
        for left in range(longest, -1, -1):
            self.reset({slot: episode for slot, (episode, chunks) in running.items() if len(chunks) == left})
            slots = [slot for slot, (_, chunks) in running.items() if left and len(chunks) >= left]
            for slot in slots:
                self.arrays.actions[slot] = running[slot][1][-left]
            if slots:
                self.step(slots)

    def give_up(self, episodes: Mapping[int, Episode]) -> None:
        """Start episodes that could not be started elsewhere."""
        self.reset(dict(episodes))

    def check(self) -> None:
        """Nothing: worlds that are lost are rare enough."""

    def step(self, slots: Sequence[int]) -> list[int]:
        """Execute ``arrays.actions`` in the given slots and draw all; returns those whose numbers are not finite."""
        arrays, n = self.arrays, len(self.texts)
        arrays.clear_outcomes(slice(None))
        for slot in slots:
            self.executed[slot].append(arrays.actions[slot].copy())
        running = np.isin(np.arange(n), list(set(slots) - self._lost))
        gripper = arrays.actions[:, 0, -1].copy()
        for place in range(arrays.actions.shape[1]):
            if not running.any():
                break
            actions = arrays.actions[:, place].copy()
            gripper[running] = actions[running, -1]
            actions[~running, :-1] = 0  # the target stays where it is, and the gripper as it was
            actions[~running, -1] = gripper[~running]
            _, reward, _, _, info = self._world.step(torch.from_numpy(actions))
            success = info["success"].cpu().numpy()
            arrays.rewards[running, place] = reward.cpu().numpy()[running]
            arrays.successes[running, place] = success[running]
            arrays.executed[running, place] = True
            self._elapsed += running
            running &= self._elapsed < self.spec.max_episode_steps
            if not self._ignore_terminations:
                running &= ~success
        for slot in np.flatnonzero(~np.isfinite(arrays.rewards).all(1)).tolist():
            self._lose(slot, f"rewards are {arrays.rewards[slot].tolist()}")
        self._observe(slots)
        crashed = [slot for slot in slots if slot in self._lost]
        arrays.clear_outcomes(crashed)
        return crashed

    def map(self, *_: Any, **__: Any) -> list[Any]:
        """Refuse: no world can be simulated alone."""
        raise ValueError("worlds that are simulated together cannot be simulated alone; type env.backend=processes")

    def close(self) -> None:
        """Free the world."""
        self._world.close()

    def _lose(self, slot: int, what: str) -> None:
        if slot not in self._lost:
            self._lost.add(slot)
            self.restarts += 1
            self.errors[slot] = f"{what}, while running {self.spec.describe(self._episodes[slot])}"
            _logger.warning("%s; the episode is lost", self.errors[slot])

    def _observe(self, slots: Iterable[int]) -> None:
        """Draw all worlds; those of ``slots`` that are not finite are lost, and show zeros."""
        from vla_envs.maniskill.scene import CAMERA

        self.arrays.images = resize(self._world._get_obs_sensor_data()[CAMERA]["rgb"], *self.spec.image_shape)
        states = self._world.agent.robot.get_qpos().cpu().numpy()
        broken = ~np.isfinite(states).all(1)
        for slot in [slot for slot in slots if broken[slot]]:
            self._lose(slot, f"states are {states[slot].tolist()}")
        self.arrays.states[:] = np.where(broken[:, None], 0, states)
