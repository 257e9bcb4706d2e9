"""LIBERO: see :func:`make_spec` for its options."""

from vla_envs.libero.spec import make_spec, suites

__all__ = ["make_spec", "suites"]
