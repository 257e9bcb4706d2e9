"""CALVIN: see :func:`make_spec` for its options."""

from vla_common.schema import BenchmarkSchema, Gripper
from vla_envs.calvin.checks import check
from vla_envs.calvin.spec import make_spec, suites
from vla_envs.registry import Benchmark

__all__ = ["BENCHMARK", "make_spec", "suites"]

BENCHMARK = Benchmark(
    name="calvin",
    title="CALVIN",
    schema=BenchmarkSchema(
        image_size=(200, 200),
        wrist_images=(1, 84, 84),
        states=(
            *(f"hand {axis} (m)" for axis in "xyz"),
            *(f"hand Euler angle {axis} (rad)" for axis in "xyz"),
            "gripper opening (m)",
        ),
        actions=(
            *(f"move {axis} (-1 to 1)" for axis in "xyz"),
            *(f"turn {axis} (-1 to 1)" for axis in "xyz"),
            "gripper (1 or -1)",
        ),
        gripper=Gripper(dimension=6, closed=-1.0, opened=1.0),
        instruction="push the handle to open the drawer",
        families={
            # The gripper must be exactly 1 or -1.
            "openvla": {"model_action_dim": 7, "dimensions": (0, 1, 2, 3, 4, 5, 6), "gripper": (-1.0, 1.0)},
            "pi0": {
                "gripper": (-1.0, 1.0),
                "presets": {
                    "pi0_calvin": {"pi05": False, "horizon": 5, "relative": (), "state_in_prompt": False},
                    "pi05_calvin": {"pi05": True, "horizon": 5, "relative": (), "state_in_prompt": False},
                },
            },
        },
    ),
    make_spec=make_spec,
    suites=suites,
    checks=check,
    unseen=("path",),
)
