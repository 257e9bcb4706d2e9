"""Everything of a run that is not its algorithm: folder, configuration, checkpoints, logging, launching."""

from vla_algos.run.config import CLONING, EVALUATION, TRAINING, read_config
from vla_algos.run.evaluator import Evaluator
from vla_algos.run.held_out import HeldOut
from vla_algos.run.launch import launch
from vla_algos.run.program import run_program
from vla_algos.run.run import Run
from vla_algos.run.train_videos import TrainVideos
from vla_algos.run.training_env import env_of

__all__ = [
    "CLONING",
    "EVALUATION",
    "TRAINING",
    "Evaluator",
    "HeldOut",
    "Run",
    "TrainVideos",
    "env_of",
    "launch",
    "read_config",
    "run_program",
]
