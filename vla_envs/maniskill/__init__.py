"""ManiSkill3 and plate-25: see :func:`make_spec` for its options."""

from vla_common.schema import BenchmarkSchema, Gripper
from vla_envs.doctor import check_asset_folder, check_extra, check_vulkan
from vla_envs.maniskill.assets import DOWNLOAD, describe_assets, find_assets
from vla_envs.maniskill.spec import make_spec, suites
from vla_envs.probe import Finding
from vla_envs.registry import Benchmark

__all__ = ["BENCHMARK", "make_spec", "suites"]

_IMPORT = "from vla_envs.rendering.vulkan import choose_driver; choose_driver(); import mani_skill.envs"


def check() -> list[Finding]:
    """Find what this machine has and lacks."""
    return [
        *check_extra("maniskill", "mani_skill", _IMPORT),
        check_vulkan("maniskill"),
        check_asset_folder("Plate-25", find_assets, describe_assets, without="its own tasks, not plate-25"),
    ]


BENCHMARK = Benchmark(
    name="maniskill",
    title="ManiSkill",
    schema=BenchmarkSchema(  # of plate-25
        image_size=(480, 640),
        states=(*(f"joint {number} (rad)" for number in range(1, 7)), "left finger (m)", "right finger (m)"),
        actions=(
            *(f"move {axis} (m)" for axis in "xyz"),
            *(f"turn {axis} (rad)" for axis in "xyz"),
            "gripper (-1 to 1)",
        ),
        gripper=Gripper(dimension=6, closed=-1.0, opened=1.0),
        instruction="put carrot on plate",
        families={
            # Bridge data, WidowX.
            "openvla": {"model_action_dim": 7, "dimensions": (0, 1, 2, 3, 4, 5, 6), "gripper": (0.0, 1.0)},
            "pi0": {
                "gripper": (0.0, 1.0),
                "presets": {
                    "pi0_maniskill": {"pi05": False, "horizon": 50},
                    "pi05_maniskill": {"pi05": True, "horizon": 10, "value_head": (1024, 512, 256)},
                },
            },
        },
    ),
    make_spec=make_spec,
    suites=suites,
    checks=check,
    downloads=(DOWNLOAD,),
    unseen=("assets", "reward_type"),
)
