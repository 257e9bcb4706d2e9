"""The policy of a recipe; :func:`vla_policies.make_policy` does the work. To be deleted once recipes call that."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from vla_common.settings import check_settings
from vla_envs import SimulatorSpec
from vla_policies import VLAPolicy, policy_types
from vla_policies import make_policy as make
from vla_policies.checkpoint.lora import adapt

__all__ = ["adapt", "make_policy"]


def make_policy(config: DictConfig, spec: SimulatorSpec) -> VLAPolicy:
    """The policy of ``config.policy``, complete and known to fit an environment that has not been started."""
    settings = OmegaConf.to_container(config.policy, resolve=True)
    check_settings("policy", settings, policy_types(config.policy.get("family")))
    return make(spec, **settings)
