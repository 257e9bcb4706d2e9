"""Meta-World v3: see :func:`make_spec` for its options."""

from vla_envs.metaworld.spec import make_spec, suites

__all__ = ["make_spec", "suites"]
