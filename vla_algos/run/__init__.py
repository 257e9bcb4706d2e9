"""Everything of a run that is not its algorithm: folder, configuration, checkpoints, logging, launching."""

from vla_algos.run.config import CLONING, EVALUATION, TRAINING, read_config
from vla_algos.run.evaluator import Evaluator
from vla_algos.run.launch import launch
from vla_algos.run.origin import env_of
from vla_algos.run.program import run_program
from vla_algos.run.run import Run
from vla_algos.run.warm_start import record

__all__ = [
    "CLONING",
    "EVALUATION",
    "TRAINING",
    "Evaluator",
    "Run",
    "env_of",
    "launch",
    "read_config",
    "record",
    "run_program",
]
