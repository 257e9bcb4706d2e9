"""What a machine needs for CALVIN."""

from __future__ import annotations

from vla_envs.calvin import package, world
from vla_envs.calvin.spec import choose_renderer
from vla_envs.doctor.checks import check_asset_folder, check_simulator
from vla_envs.probe import RENDERING, Finding

_IMPORT = "from vla_envs.calvin import package; package.import_all()"


def check() -> list[Finding]:
    """Find what this machine has and lacks."""
    *packages, imported = check_simulator("calvin", "pybullet", _IMPORT)
    return [
        *packages,
        imported,
        *([_check_renderers()] if imported.status == "ok" else []),
        check_asset_folder("CALVIN", package.find_package, package.describe_package),
    ]


def _check_renderers() -> Finding:
    """Draw with both renderers of PyBullet; they need no package of their own."""
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
