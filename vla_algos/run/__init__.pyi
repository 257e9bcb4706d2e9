from .config import (
    CLONING as CLONING,
)
from .config import (
    EVALUATION as EVALUATION,
)
from .config import (
    TRAINING as TRAINING,
)
from .config import (
    read_config as read_config,
)
from .evaluator import Evaluator as Evaluator
from .held_out import HeldOut as HeldOut
from .launching import launch as launch
from .program import run_program as run_program
from .run import Run as Run
from .train_videos import TrainVideos as TrainVideos
from .training_env import env_of as env_of
