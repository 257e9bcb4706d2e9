"""Gymnasium view of the simulators: one environment (:class:`SimulatorEnv`), or many over worker processes.

Importing ``vla_envs`` registers the ids; a simulator is imported by the first ``reset``.

Example:
    >>> import gymnasium
    >>> env = gymnasium.make("vla_envs:vla/MetaWorld-reach-v0", image_size=224)  # "vla_envs:" imports us
    >>> observation, info = env.reset(seed=0)  # doctest: +SKIP
    >>> observation["images"].shape, observation["task_descriptions"]  # doctest: +SKIP
    ((224, 224, 3), 'Reach a goal position')

Each step renders a frame, because that is what Gymnasium's contract says. Training on chunks of actions is
several times faster: ``chunk_size`` of :class:`SimulatorVectorEnv`, which ``gymnasium.make_vec`` makes, or
:func:`vla_envs.make_env` render once per chunk.
"""

from vla_envs.gym.env import SimulatorEnv
from vla_envs.gym.spaces import InstructionSpace
from vla_envs.gym.vector import SimulatorVectorEnv

__all__ = ["InstructionSpace", "SimulatorEnv", "SimulatorVectorEnv"]
