"""CALVIN: see :func:`make_spec` for its options."""

from vla_common.schema import BenchmarkSchema, Gripper
from vla_envs.calvin import package, world
from vla_envs.calvin.spec import choose_renderer, make_spec, suites
from vla_envs.doctor import check_asset_folder, check_extra
from vla_envs.probe import RENDERING, Finding
from vla_envs.registry import Benchmark

__all__ = ["BENCHMARK", "make_spec", "suites"]

_IMPORT = "from vla_envs.calvin import package; package.import_all()"


def check() -> list[Finding]:
    """Find what this machine has and lacks."""
    found = check_extra("calvin", "pybullet", _IMPORT)
    if found[-1].status == "ok":  # what is imported can draw
        found.append(_check_renderers())
    return [*found, check_asset_folder("CALVIN", package.CHECKOUT.find, package.CHECKOUT.describe)]


def _check_renderers() -> Finding:
    used = choose_renderer("auto")
    works = {name: world.try_renderer(egl=name == "egl") for name in ("tiny", "egl")}
    ok, problem = works[used]
    other = "egl" if used == "tiny" else "tiny"
    detail = "draws" if ok else problem
    return Finding(
        "ok" if ok else "broken",
        f"PyBullet renderer={used}",
        f"{detail}; renderer={other} {'works too' if works[other][0] else 'does not'}",
        "" if ok else f"type renderer={other}" if works[other][0] else package.INSTALL,
        RENDERING,
        required=not any(works for works, _ in works.values()),
    )


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
                "presets": {"pi0_calvin": {"pi05": False, "horizon": 5}, "pi05_calvin": {"pi05": True, "horizon": 5}},
            },
        },
    ),
    make_spec=make_spec,
    suites=suites,
    checks=check,
    unseen=("path",),
    downloads=(package.CHECKOUT.download,),
)
