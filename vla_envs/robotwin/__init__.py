"""RoboTwin 2.0: see :func:`make_spec` for its options."""

from vla_common.schema import BenchmarkSchema
from vla_envs.registry import Benchmark
from vla_envs.robotwin.checks import check
from vla_envs.robotwin.spec import make_spec, suites

__all__ = ["BENCHMARK", "make_spec", "suites"]

_JOINTS = (
    *(f"left joint {number} (rad)" for number in range(1, 7)),
    "left gripper opening (0 to 1)",
    *(f"right joint {number} (rad)" for number in range(1, 7)),
    "right gripper opening (0 to 1)",
)
_BOTH_ARMS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12)
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
            "openvla": {"model_action_dim": 14, "dimensions": tuple(range(14))},
            "pi0": {
                "presets": {
                    "pi0_aloha_robotwin": {
                        "pi05": False,
                        "horizon": 50,
                        "relative": _BOTH_ARMS,
                        "state_in_prompt": False,
                    },
                    "pi05_aloha_robotwin": {
                        "pi05": True,
                        "horizon": 50,
                        "relative": _BOTH_ARMS,
                        "state_in_prompt": True,
                    },
                }
            },
        },
    ),
    make_spec=make_spec,
    suites=suites,
    checks=check,
)
