"""Walkers that are simulated together in this process, with images on a device, as a simulator on CUDA has them."""

import os
from dataclasses import replace

import torch

from vla_envs.workers.shared_memory import SharedArrays
from vla_envs.workers.worker import Worker


class BatchedWalkers:
    """What :class:`~vla_envs.workers.pool.WorkerPool` is; ``spec.options["device"]`` says where images are."""

    unstarted, restarts = frozenset(), 0

    def __init__(self, spec, num_envs, chunk_size, ignore_terminations):
        self._shared, memory = SharedArrays.create(spec, num_envs, chunk_size)
        os.close(memory)
        self._worker = Worker(0, spec, self._shared, ignore_terminations)
        self.device, self.errors = spec.options["device"], {}
        self.texts = [spec.tasks[0].instruction] * num_envs
        self.executed = [[] for _ in range(num_envs)]
        self._hear(({}, {}, {}))

    def reset(self, episodes):
        self.restore({slot: (episode, []) for slot, episode in episodes.items()})

    give_up = reset

    def restore(self, running):
        for slot, (_, chunks) in running.items():
            self.executed[slot] = list(chunks)
        self._hear(self._worker.begin(running))

    def step(self, slots):
        self._shared.clear_outcomes(slice(None))
        for slot in slots:
            self.executed[slot].append(self.arrays.actions[slot].copy())
        self._hear(self._worker.step(dict.fromkeys(slots)))
        return []

    def check(self):
        pass

    def close(self):
        self._worker.close()

    def _hear(self, answer):
        texts, errors, _ = answer
        assert not errors, errors
        for slot, text in texts.items():
            self.texts[slot] = text
        self.arrays = replace(self._shared, images=torch.from_numpy(self._shared.images.copy()).to(self.device))
