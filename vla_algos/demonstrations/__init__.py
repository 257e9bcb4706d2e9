"""Demonstrations by a benchmark's scripted expert: recorded in parallel, kept in memory or on disk, read back.

A recording knows no policy: no tokens, no resized images. :mod:`~vla_algos.demonstrations.recording` makes one,
:mod:`~vla_algos.demonstrations.experts` counts what the experts solve, :mod:`~vla_algos.demonstrations.folder` is the
format on disk and makes of it what a policy learns from, :mod:`~vla_algos.demonstrations.samples` are the rows of that.
"""

from vla_algos.demonstrations.experts import ExpertTally as ExpertTally
from vla_algos.demonstrations.experts import describe_experts as describe_experts
from vla_algos.demonstrations.folder import FACTS as FACTS
from vla_algos.demonstrations.folder import DemonstrationSet as DemonstrationSet
from vla_algos.demonstrations.folder import for_policy as for_policy
from vla_algos.demonstrations.folder import load_demonstrations as load_demonstrations
from vla_algos.demonstrations.recording import record_demonstrations as record_demonstrations
from vla_algos.demonstrations.recording import write_demonstrations as write_demonstrations
from vla_algos.demonstrations.samples import CAMERAS as CAMERAS
from vla_algos.demonstrations.samples import Samples as Samples
from vla_algos.demonstrations.samples import check_heldout as check_heldout
from vla_algos.demonstrations.samples import is_held_out as is_held_out
