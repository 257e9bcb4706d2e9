"""LIBERO: see :func:`make_spec` for its options."""

from vla_common.schema import BenchmarkSchema, Gripper
from vla_envs.doctor import check_asset_folder, check_extra, check_renderers
from vla_envs.libero import package
from vla_envs.libero.spec import make_spec, suites
from vla_envs.probe import Finding
from vla_envs.registry import Benchmark

__all__ = ["BENCHMARK", "make_spec", "suites"]

_IMPORT = "from vla_envs.libero import package; package.check_versions(); package.import_libero()"
_ARM = (0, 1, 2, 3, 4, 5)


def check() -> list[Finding]:
    """Find what this machine has and lacks."""
    return [
        *check_extra("libero", code=_IMPORT, without_dependencies=package.PACKAGES.requirements),
        *check_renderers("libero"),
        check_asset_folder("LIBERO", package.find_assets, package.describe_assets),
    ]


BENCHMARK = Benchmark(
    name="libero",
    title="LIBERO",
    schema=BenchmarkSchema(
        image_size=(256, 256),
        wrist_images=(1, 256, 256),
        states=(
            *(f"hand {axis} (m)" for axis in "xyz"),
            *(f"hand axis-angle {axis} (rad)" for axis in "xyz"),
            "left finger (m)",
            "right finger (m)",
        ),
        actions=(
            *(f"move {axis} (-1 to 1)" for axis in "xyz"),
            *(f"turn {axis} (-1 to 1)" for axis in "xyz"),
            "gripper (-1 to 1)",
        ),
        gripper=Gripper(dimension=6, closed=1.0, opened=-1.0),
        instruction="put the bowl on the stove",
        families={
            "openvla": {"model_action_dim": 7, "dimensions": (0, 1, 2, 3, 4, 5, 6), "gripper": (0.0, 1.0)},
            "lerobot": {"published": {"cameras": ("observation.images.image", "observation.images.image2")}},
            "pi0": {
                "presets": {
                    "pi0_libero": {"pi05": False, "horizon": 50, "relative": _ARM},
                    "pi05_libero": {"pi05": True, "horizon": 10, "value_head": (1024, 512, 256)},
                }
            },
        },
    ),
    make_spec=make_spec,
    suites=suites,
    suite_title=str.capitalize,
    checks=check,
    unseen=("assets", "cache_gigabytes"),
    downloads=(package.PACKAGES, package.ASSETS, package.PRO),
)
