"""What a machine needs for CALVIN."""

from __future__ import annotations

from vla_envs.calvin import package
from vla_envs.doctor.checks import check_asset_folder, check_simulator
from vla_envs.probe import Finding


def check() -> list[Finding]:
    """Find what this machine has and lacks."""
    return [
        *check_simulator("calvin", "pybullet"),
        check_asset_folder("CALVIN", package.find_package, tuple),
    ]
