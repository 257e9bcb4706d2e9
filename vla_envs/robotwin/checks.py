"""What a machine needs for RoboTwin."""

from __future__ import annotations

from dataclasses import replace

from vla_envs.doctor.checks import check_asset_folder, check_simulator, check_vulkan
from vla_envs.probe import Finding
from vla_envs.robotwin import package

_IMPORT = "from vla_envs.robotwin import package; package.import_all()"


def check() -> list[Finding]:
    """Find what this machine has and lacks."""
    code = check_asset_folder("RoboTwin", package.find_package, package.describe_code)
    return [
        *check_simulator("robotwin", "sapien", _IMPORT),
        check_vulkan("robotwin"),
        replace(code, name="RoboTwin's checkout"),
        check_asset_folder("RoboTwin", package.find_assets, package.describe_assets),
    ]
