"""The two ways to collect: so many decisions in every environment, or a queue of whole episodes."""

from vla_algos.collectors.base import OUTCOME_KEYS as OUTCOME_KEYS
from vla_algos.collectors.base import Collector as Collector
from vla_algos.collectors.episodes import EpisodeCollector as EpisodeCollector
from vla_algos.collectors.steps import StepCollector as StepCollector
