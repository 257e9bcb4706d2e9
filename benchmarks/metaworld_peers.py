"""Meta-World as the field runs it, for ``rollouts.py``."""

import argparse
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv
from timing import Contender
from torchrl.envs import GymWrapper, ParallelEnv

CAMERA = "corner4"


def peers(options: argparse.Namespace) -> list[Contender]:
    """Gymnasium's and TorchRL's vector environments, with a frame for every step and for every chunk."""
    makers = (_async_vector_env, _parallel_env, _make_vec)
    return [make(options, chunk) for make in makers for chunk in (None, options.chunk)]


class PeerEnv(gymnasium.Env):
    """Meta-World as it is commonly wrapped: its own class, its own renderer.

    Args:
        task: such as ``"pick-place-v3"``.
        size: pixels of a side.
        quality: ``"benchmark"`` or ``"fast"``, which switches off what VLAEnv's switches off.
        chunk: primitive actions per ``step``, after which one frame is rendered; ``None`` for one plain action.
    """

    def __init__(self, task: str, size: int, quality: str, chunk: int | None = None):
        from metaworld.env_dict import ENV_CLS_MAP

        self.world = ENV_CLS_MAP[task](render_mode="rgb_array", camera_name=CAMERA, width=size, height=size)
        if quality == "fast":
            self.world.model.vis.quality.shadowsize = 0
            self.world.model.vis.quality.offsamples = 0
        self.world._set_task_called, self.world._freeze_rand_vec = True, False
        self.chunk = chunk
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (size, size, 3), np.uint8),
                "state": spaces.Box(-np.inf, np.inf, (4,)),
            }
        )
        self.action_space = spaces.Box(-1, 1, (4,) if chunk is None else (chunk, 4))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        return self._observe(self.world.reset()[0]), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        reward = 0.0
        for primitive in action.reshape(-1, 4):
            observation, _, _, _, info = self.world.step(primitive)
            reward += info["success"]
        return self._observe(observation), reward, False, False, {}

    def _observe(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        image = np.ascontiguousarray(self.world.render()[::-1, ::-1])  # corner4 hangs upside down
        return {"image": image, "state": observation[:4].astype(np.float32)}

    def close(self) -> None:
        self.world.close()


def _async_vector_env(options: argparse.Namespace, chunk: int | None) -> Contender:
    make = partial(PeerEnv, options.env.partition("/")[2], options.size, options.quality, chunk)
    env = AsyncVectorEnv([make] * options.envs)

    def run(actions: np.ndarray, times: int) -> None:
        for _ in range(times):
            for action in actions.swapaxes(0, 1) if chunk is None else [actions]:
                env.step(action)

    name = f"AsyncVectorEnv, {_mode(chunk)}"
    return Contender(name, partial(env.reset, seed=0), run, env.close, _decisions(options, chunk))


def _make_vec(options: argparse.Namespace, chunk: int | None) -> Contender:
    """This library's simulators behind Gymnasium's vector interface."""
    id = f"vla_envs:vla/MetaWorld-{options.env.partition('/')[2].removesuffix('-v3')}-v0"
    env = gymnasium.make_vec(
        id,
        options.envs,
        image_size=options.size,
        render_quality=options.quality,
        horizon=500,
        chunk_size=chunk,
        num_workers=options.workers,
        autoreset_mode="Disabled",
        step_timeout=300.0,
    )

    def run(actions: np.ndarray, times: int) -> None:
        for _ in range(times):
            for action in actions.swapaxes(0, 1) if chunk is None else [actions]:
                env.step(action)

    return Contender(
        f"make_vec, {_mode(chunk)}", partial(env.reset, seed=0), run, env.close, _decisions(options, chunk)
    )


def _parallel_env(options: argparse.Namespace, chunk: int | None) -> Contender:
    task = options.env.partition("/")[2]
    env = ParallelEnv(options.envs, partial(_wrapped_peer, task, options.size, options.quality, chunk))
    state = {}

    def start() -> None:
        state["td"] = env.reset()

    def run(actions: np.ndarray, times: int) -> None:
        tensors = torch.from_numpy(actions)
        for _ in range(times):
            for action in tensors.unbind(1) if chunk is None else [tensors]:
                env.step(state["td"].set("action", action))

    return Contender(f"ParallelEnv, {_mode(chunk)}", start, run, env.close, _decisions(options, chunk))


def _wrapped_peer(*arguments: Any) -> GymWrapper:
    return GymWrapper(PeerEnv(*arguments))


def _mode(chunk: int | None) -> str:
    return "every step" if chunk is None else "per chunk"


def _decisions(options: argparse.Namespace, chunk: int | None) -> int:
    """Who renders every step takes long enough with fewer decisions."""
    return max(2, options.decisions // options.chunk) if chunk is None else options.decisions
