"""What a machine needs for ManiSkill and plate-25."""

from __future__ import annotations

from vla_envs.doctor.checks import check_asset_folder, check_simulator, check_vulkan
from vla_envs.maniskill import assets
from vla_envs.probe import Finding

_IMPORT = "from vla_envs.rendering.vulkan import choose_driver; choose_driver(); import mani_skill.envs"


def check() -> list[Finding]:
    """Find what this machine has and lacks."""
    return [
        *check_simulator("maniskill", "mani_skill", _IMPORT),
        check_vulkan("maniskill"),
        check_asset_folder(
            "Plate-25", assets.find_assets, assets.describe_assets, without="its own tasks, not plate-25"
        ),
    ]
