"""What a machine needs for Meta-World."""

from __future__ import annotations

from vla_envs.doctor.checks import check_renderers, check_simulator
from vla_envs.probe import Finding


def check() -> list[Finding]:
    """Find what this machine has and lacks."""
    return [*check_simulator("metaworld"), *check_renderers("metaworld")]
