"""Gymnasium view of the simulators: one environment (:class:`SimulatorEnv`), or many over worker processes.

Importing ``vla_envs`` registers the ids; a simulator is imported by the first ``reset``. Each step renders a frame, as
Gymnasium's contract says; ``chunk_size`` of :class:`SimulatorVectorEnv`, or :func:`vla_envs.make_env`, render once per
chunk of actions, which is several times faster.

Example:
    >>> import gymnasium
    >>> env = gymnasium.make("vla_envs:vla/MetaWorld-reach-v0", image_size=224)  # "vla_envs:" imports us
    >>> observation, info = env.reset(seed=0)  # doctest: +SKIP
"""

from vla_envs.gym.env import InstructionSpace, SimulatorEnv
from vla_envs.gym.vector import SimulatorVectorEnv

__all__ = ["InstructionSpace", "SimulatorEnv", "SimulatorVectorEnv"]
