"""Recipes as a user runs them, as programs; and in this process, up to where simulators would start."""

import contextlib
import functools
import importlib.util
import io
import json
import re
import subprocess

import forked
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict
from paths import CONF, RECIPES
from safetensors.torch import load_file

from vla_algos.run.arguments import for_hydra

TOY = ["env.num_envs=2", "env.num_workers=1", "env.max_episode_steps=8", "env.image_size=32", "eval.trials=2"]
TOY += ["eval.videos=0", "iterations=1", "update.epochs=1", "optim.lr=1e-3"]
TOY_OF = {
    "ppo": ["collector.decisions=3", "evaluate_every=0", "update.critic_warmup_steps=0"],
    "grpo": ["group_size=2", "collector.groups=2", "collector.max_groups=2", "eval.sampled=false"],
}


class Started(Exception):
    """The recipe has checked its settings and would start simulators now."""


def recipe(name, folder, *overrides):
    """``python recipes/NAME.py OVERRIDES``, with its output in ``folder``."""
    return forked.run(name, *overrides, f"hydra.run.dir={folder}", limit=600)


def recipe_here(name, folder, *overrides):
    """What :func:`recipe` gives, without a process of its own; errors are raised."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        main_of(name)(composed(name, overrides, folder))
    return subprocess.CompletedProcess([name, *overrides], 0, out.getvalue(), err.getvalue())


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
            name,
            overrides=[*(for_hydra(each, CONF) for each in overrides), f"hydra.runtime.output_dir={folder}"],
            return_hydra_config=True,
        )
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    return config


def train(name, folder, overrides):
    """A toy run in this process: the metrics of its last iteration, and the folder of the saved policy."""
    main_of(name)(composed(name, [*TOY, *TOY_OF[name], *overrides], folder))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if "train/loss" in line), folder / "policy"


def differing(first, second, file="model.safetensors"):
    """Names of the tensors that are not the same in two folders."""
    weights, others = load_file(first / file), load_file(second / file)
    return {name for name in weights.keys() | others.keys() if not torch.equal(weights[name], others[name])}


TIMES = re.compile(r"^(time/|decisions_per_s|env_steps_per_s|fps|.*per_second)")


def metrics(folder):
    """All that was measured and is not a time, by iteration."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {}
    for line in lines:
        numbers = {key: value for key, value in line.items() if not TIMES.match(key)}
        found.setdefault((line["step"], "eval/success_once" in line), []).append(numbers)
    assert all(len(entries) == 1 for entries in found.values()), "an iteration is there twice"
    return found
