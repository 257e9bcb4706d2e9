"""ManiSkill3 and plate-25: see :func:`make_spec` for its options."""

from vla_envs.maniskill.spec import make_spec, suites

__all__ = ["make_spec", "suites"]
