"""Configuration groups of installed packages (``vla_torchrl.configs``) and rows of experiments, for Hydra."""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from vla_common.experiments import offer_rows
from vla_common.registry import config_packages


class PluginSearchPath(SearchPathPlugin):
    """Puts the packages on Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them after the recipe's own, whose experiments' rows are offered by name."""
        for place in search_path.get_path():
            if place.provider == "main":
                offer_rows(Path(place.path.removeprefix("file://")))
        for package in config_packages():
            search_path.append("vla-torchrl", f"pkg://{package}")


def search_packages() -> None:
    """Have Hydra look into the packages too; may be called again."""
    Plugins.instance().register(PluginSearchPath)
