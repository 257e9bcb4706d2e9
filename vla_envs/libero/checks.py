"""What a machine needs for LIBERO."""

from __future__ import annotations

from vla_envs.doctor.checks import check_asset_folder, check_renderers, check_simulator
from vla_envs.libero import package
from vla_envs.probe import Finding

_IMPORT = "from vla_envs.libero import package; package.check_versions(); package.import_libero()"


def check() -> list[Finding]:
    """Find what this machine has and lacks."""
    beside = [f"hf-libero=={package.VERSIONS['hf-libero']}"]
    return [
        *check_simulator("libero", code=_IMPORT, without_dependencies=beside),
        *check_renderers("libero"),
        check_asset_folder("LIBERO", package.find_assets, package.describe_assets),
    ]
