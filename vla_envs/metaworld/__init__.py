"""Meta-World v3: see :func:`make_spec` for its options."""

from vla_common.schema import BenchmarkSchema, Gripper
from vla_envs.doctor import check_extra, check_renderers
from vla_envs.metaworld.spec import make_spec, suites
from vla_envs.registry import Benchmark

__all__ = ["BENCHMARK", "make_spec", "suites"]

BENCHMARK = Benchmark(
    name="metaworld",
    title="MetaWorld",
    schema=BenchmarkSchema(
        image_size=(480, 480),
        states=("hand x (m)", "hand y (m)", "hand z (m)", "gripper opening (0 to 1)"),
        actions=("x (-1 to 1)", "y (-1 to 1)", "z (-1 to 1)", "gripper effort (-1 to 1)"),
        gripper=Gripper(dimension=3, closed=1.0, opened=-1.0),
        instruction="push the puck to the goal",
        families={
            # Position and gripper effort, which passes through; nothing turns the hand.
            "openvla": {"model_action_dim": 7, "dimensions": (0, 1, 2, 6)},
            "lerobot": {"published": {"cameras": ("observation.image",)}},
            "pi0": {
                "presets": {
                    "pi0_metaworld": {"pi05": False, "horizon": 5},
                    "pi05_metaworld": {"pi05": True, "horizon": 5},
                }
            },
        },
    ),
    make_spec=make_spec,
    suites=suites,
    checks=lambda: [*check_extra("metaworld"), *check_renderers("metaworld")],
    unseen=("cache_gigabytes", "reward_type"),
)
