"""RoboTwin 2.0: see :func:`make_spec` for its options."""

from dataclasses import replace

from vla_common.schema import BenchmarkSchema
from vla_envs.doctor import check_asset_folder, check_extra, check_vulkan
from vla_envs.probe import Finding
from vla_envs.registry import Benchmark
from vla_envs.robotwin import package
from vla_envs.robotwin.spec import make_spec, suites

__all__ = ["BENCHMARK", "make_spec", "suites"]


def check() -> list[Finding]:
    """Find what this machine has and lacks."""
    code = check_asset_folder("RoboTwin", package.CHECKOUT.find, package.CHECKOUT.describe)
    return [
        *check_extra("robotwin", "sapien", "from vla_envs.robotwin import package; package.import_all()"),
        check_vulkan("robotwin"),
        replace(code, name="RoboTwin's checkout"),
        check_asset_folder("RoboTwin", package.find_assets, package.describe_assets),
    ]


_JOINTS = (
    *(f"left joint {number} (rad)" for number in range(1, 7)),
    "left gripper opening (0 to 1)",
    *(f"right joint {number} (rad)" for number in range(1, 7)),
    "right gripper opening (0 to 1)",
)
_BOTH_ARMS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12)
# openvla-oft's ALOHA_CONSTANTS, which RLinf sets by ROBOT_PLATFORM: chunks of 25, bounds of actions and states are the
# extremes of the data. All 14 numbers are normalised (JOINT_POS_BIMANUAL) and nothing is done to the grippers after
# that. RLinf's environment crops the frames, its model does not.
_PUBLISHED_OPENVLA = {
    "layout": "official",
    "statistics": "min_max",
    "num_action_chunks": 25,
    "image_resize": "bicubic",
    "center_crop": False,
}
# RLinf's configurations of that name (openpi/dataconfig/__init__.py at a3816b596). Joints move relative to the state,
# grippers do not. adapt_to_pi is False for pi0 and, left at its default, True for pi0.5; the signs are openpi's.
_PI = {"horizon": 50, "relative": _BOTH_ARMS, "joints": {"flip": (1, 2, 8, 9), "aloha_gripper": (6, 13)}}
BENCHMARK = Benchmark(
    name="robotwin",
    title="RoboTwin",
    schema=BenchmarkSchema(
        image_size=(240, 320),
        wrist_images=(2, 240, 320),
        states=_JOINTS,
        actions=_JOINTS,  # positions to go to
        instruction="place the empty cup on the coaster",
        families={
            "openvla": {"model_action_dim": 14, "dimensions": tuple(range(14)), "published": _PUBLISHED_OPENVLA},
            "pi0": {
                "presets": {
                    "pi0_aloha_robotwin": {**_PI, "pi05": False, "state_in_prompt": False},
                    "pi05_aloha_robotwin": {**_PI, "pi05": True, "adapt_to_pi": True, "state_in_prompt": True},
                }
            },
        },
    ),
    make_spec=make_spec,
    suites=suites,
    checks=check,
    unseen=("path", "assets_path"),
    downloads=(package.CHECKOUT.download, package.ASSETS),
)
