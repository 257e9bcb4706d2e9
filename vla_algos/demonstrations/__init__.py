"""Demonstrations by a benchmark's scripted expert: recorded in parallel, kept in memory or on disk, read back.

A recording knows no policy: no tokens, no resized images.
"""

from vla_algos.demonstrations.dataset import FACTS as FACTS
from vla_algos.demonstrations.dataset import DemonstrationSet as DemonstrationSet
from vla_algos.demonstrations.dataset import for_policy as for_policy
from vla_algos.demonstrations.dataset import load_demonstrations as load_demonstrations
from vla_algos.demonstrations.experts import RecordingSettings as RecordingSettings
from vla_algos.demonstrations.experts import record_demonstrations as record_demonstrations
from vla_algos.demonstrations.experts import write_demonstrations as write_demonstrations
from vla_algos.demonstrations.record import Demonstrations as Demonstrations
from vla_algos.demonstrations.record import DemonstrationSettings as DemonstrationSettings
