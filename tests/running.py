"""Recipes as a user runs them, as programs; and in this process, up to where simulators would start."""

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

RECIPES = Path(__file__).parent.parent / "recipes"
CONF = RECIPES / "conf"


class Started(Exception):
    """The recipe has checked its settings and would start simulators now."""


def recipe(name, folder, *overrides):
    """``python recipes/NAME.py OVERRIDES``, with its output in ``folder``."""
    return subprocess.run(
        [sys.executable, RECIPES / f"{name}.py", *overrides, f"hydra.run.dir={folder}"],
        capture_output=True,
        text=True,
    )


@functools.cache
def main_of(name):
    """The function that a recipe runs with its configuration."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main.__wrapped__


def composed(name, overrides, folder) -> DictConfig:
    """The configuration of a recipe for :func:`main_of`."""
    folder.mkdir(parents=True, exist_ok=True)
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose(
            name, overrides=[*overrides, f"hydra.runtime.output_dir={folder}"], return_hydra_config=True
        )
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    return config
