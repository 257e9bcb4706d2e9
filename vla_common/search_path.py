"""Configuration groups of installed packages (``vla_torchrl.configs``), for Hydra."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from vla_common.registry import config_packages


class PluginSearchPath(SearchPathPlugin):
    """Puts the packages on Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them after the recipe's own."""
        for package in config_packages():
            search_path.append("vla-torchrl", f"pkg://{package}")


def search_packages() -> None:
    """Have Hydra look into the packages too; may be called again."""
    Plugins.instance().register(PluginSearchPath)
