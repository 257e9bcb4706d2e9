from . import distributed as distributed
from .advantages import (
    check_levels as check_levels,
)
from .advantages import (
    gae as gae,
)
from .advantages import (
    group_advantages as group_advantages,
)
from .advantages import (
    normalize_advantages as normalize_advantages,
)
from .collectors import EpisodeCollector as EpisodeCollector
from .collectors import StepCollector as StepCollector
from .comparison import Comparison as Comparison
from .comparison import compare as compare
from .demonstrations import Demonstrations as Demonstrations
from .demonstrations import DemonstrationSet as DemonstrationSet
from .demonstrations import for_policy as for_policy
from .demonstrations import load_demonstrations as load_demonstrations
from .demonstrations import record_demonstrations as record_demonstrations
from .demonstrations import write_demonstrations as write_demonstrations
from .evaluation import EvaluationResult as EvaluationResult
from .evaluation import evaluate as evaluate
from .groups import Group as Group
from .groups import collect_groups as collect_groups
from .groups import grpo as grpo
from .imitation import BehaviourCloning as BehaviourCloning
from .imitation import clone as clone
from .interventions import Interventions as Interventions
from .learner import Learner as Learner
from .lerobot.demonstrations import LeRobotDemonstrations as LeRobotDemonstrations
from .losses import ChunkClipPPOLoss as ChunkClipPPOLoss
from .losses import ChunkGRPOLoss as ChunkGRPOLoss
from .losses import ChunkPolicyLoss as ChunkPolicyLoss
from .losses import add_proximal_log_prob as add_proximal_log_prob
from .losses import add_reference_log_prob as add_reference_log_prob
from .off_policy import Replay as Replay
from .off_policy import demonstrated as demonstrated
from .off_policy import make_sac_loss as make_sac_loss
from .off_policy import paid_by_success as paid_by_success
from .off_policy import transitions as transitions
from .results import EpisodeResult as EpisodeResult
from .samples import Samples as Samples
from .self_imitation import SelfImitation as SelfImitation

__version__: str
