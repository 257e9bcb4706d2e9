"""A benchmark for LeRobot 0.6: ``env.py`` of a hub repository, or of a folder for ``lerobot-eval``."""

import importlib.util
from dataclasses import dataclass

import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.vector import VectorEnv, utils

from vla_envs import make_spec
from vla_envs.gym import SimulatorVectorEnv

BENCHMARK = "metaworld/MT50"  # or calvin/D, maniskill/plate25-ood, ...; --env.task of lerobot-eval
OPTIONS = {}  # such as {"image_size": 224}


class _OneTask(VectorEnv):
    """Episodes of one task. Simulators start with the first reset: LeRobot makes all tasks before it runs one."""

    def __init__(self, spec, task_id, num_envs):
        self.simulator_spec, self.task_id, self.num_envs = spec, task_id, num_envs
        self.metadata = {"render_fps": spec.control_frequency}
        wrists, *size = spec.wrist_image_shape or (0,)
        sizes = {"image": spec.image_shape, **{f"wrist_image{number}": size for number in range(wrists)}}
        pixels = Dict({camera: Box(0, 255, (*size, 3), np.uint8) for camera, size in sizes.items()})
        self.single_observation_space = Dict({"pixels": pixels, "agent_pos": Box(-np.inf, np.inf, (spec.state_dim,))})
        self.single_action_space = Box(np.float32(spec.action_low), np.float32(spec.action_high))
        self.observation_space = utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = utils.batch_space(self.single_action_space, num_envs)
        self.envs, self.first_seed, self.get_attr = None, None, self.call

    def reset(self, *, seed=None, options=None):
        if self.envs is None:
            self.envs = SimulatorVectorEnv(self.simulator_spec, self.num_envs, render_mode="rgb_array")
        chosen = {"task_id": self.task_id}
        if seed is not None:  # S, S + 1, ... are trials 0, 1, ... of recipes/evaluate.py with eval.seed=S
            self.first_seed = seed[0] if self.first_seed is None else self.first_seed
            trials = self.simulator_spec.evaluation_trials or range(self.simulator_spec.initial_states or 1_000_000)
            chosen["trial_id"] = [trials[(each - self.first_seed) % len(trials)] for each in seed]
            seed = [self.first_seed] * self.num_envs
        return self.seen(*self.envs.reset(seed=seed, options=chosen))

    def step(self, actions):
        return self.seen(*self.envs.step(actions))

    def seen(self, observation, *rest):
        wrists = np.moveaxis(observation["wrist_images"], 1, 0) if "wrist_images" in observation else ()
        pixels = dict(zip(self.single_observation_space["pixels"], [observation["images"], *wrists], strict=True))
        return {"pixels": pixels, "agent_pos": observation["states"], "task": observation["task_descriptions"]}, *rest

    def call(self, name, *args, **kwargs):
        if name == "_max_episode_steps":
            return (self.simulator_spec.max_episode_steps,) * self.num_envs
        return self.envs.call("task_description" if name == "task" else name, *args, **kwargs)

    def close_extras(self, **kwargs):
        if self.envs is not None:
            self.envs.close()


def make_env(n_envs=1, use_async_envs=False, cfg=None):
    """Return ``{group: {task: environments}}``; simulators have processes of their own, async or not."""
    spec, made = make_spec(getattr(cfg, "task", None) or BENCHMARK, **OPTIONS), {}
    for number, task in enumerate(spec.tasks):
        made.setdefault(task.group or spec.id.replace("/", "-"), {})[number] = _OneTask(spec, number, n_envs)
    return made


if importlib.util.find_spec("lerobot"):  # lerobot-eval --env.type=vla
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.envs import EnvConfig

    @dataclass
    class _Config(EnvConfig):
        task: str = BENCHMARK
        gym_kwargs = None

        def __post_init__(self):
            env = _OneTask(make_spec(self.task, **OPTIONS), 0, 1)
            self.features = {"action": PolicyFeature(FeatureType.ACTION, env.single_action_space.shape)}
            self.features["agent_pos"] = PolicyFeature(FeatureType.STATE, (env.simulator_spec.state_dim,))
            for camera, images in env.single_observation_space["pixels"].items():
                self.features[f"observation.images.{camera}"] = PolicyFeature(FeatureType.VISUAL, images.shape)
            self.features_map = {name: name for name in self.features} | {"agent_pos": "observation.state"}

        def create_envs(self, n_envs, use_async_envs=False):
            return make_env(n_envs, use_async_envs, self)

    if "vla" not in EnvConfig.get_known_choices():
        EnvConfig.register_subclass("vla", _Config)
