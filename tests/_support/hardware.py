"""What an experiment needs of GPUs, calculated from its settings, as docs/results.md has it."""

import functools
import math
from importlib import import_module

from omegaconf import OmegaConf
from paths import CONF

from vla_algos.run.arguments import compose_settings
from vla_algos.run.config import read_config
from vla_algos.run.gpu import CARDS, Fitting
from vla_algos.run.training_env import evaluation_defaults
from vla_common.experiments import find_experiments
from vla_policies.memory import MemoryPlan, PolicyMemory, usable
from vla_policies.processing.adapters import published_settings
from vla_policies.registry import meta_policy

GUIDE = 8  # GPUs of RLinf's runs
LARGEST = 80  # GB of each of them; a run that needs more alone has an adapter
ADAPTER = {"lora_rank": 32, "dtype": "bfloat16"}
DIMENSIONS = {"robotwin": {"action_dim": 14}}
UNSAID = {"family", "checkpoint", "device", "lora_adapter"}


def compose_experiment(experiment):
    """The whole configuration of an experiment, as its recipe gets it."""
    recipe = find_experiments(CONF)[experiment].recipe
    return OmegaConf.to_container(compose_settings(recipe, [f"experiment={experiment}"], CONF), resolve=True)


def compose_evaluation(experiment):
    """That of its evaluation."""
    typed = evaluation_defaults([f"experiment={experiment}", "policy.checkpoint=x"], CONF)
    return OmegaConf.to_container(compose_settings("evaluate", typed, CONF), resolve=True)


@functools.cache
def memory_of(family, settings):
    return PolicyMemory(meta_policy(family, **dict(settings)))


def settings_of(config):
    benchmark = config["env"]["id"].partition("/")[0]
    found = {name: value for name, value in config["policy"].items() if value is not None and name not in UNSAID}
    if config["policy"]["family"] == "pi0":
        found.setdefault("config_name", "pi05_aloha_robotwin" if benchmark == "robotwin" else f"pi05_{benchmark}")
    elif benchmark in DIMENSIONS:
        found |= DIMENSIONS[benchmark]
    elif config["policy"]["family"] == "smolvla":
        found = {**published_settings(benchmark, "lerobot"), **found}
    return found


def gigabytes(config, plan=None, processes=GUIDE, **other):
    """GB that each GPU needs, rounded up: the larger of update and rollout, activations included."""
    settings = {**settings_of(config), **other}
    frozen = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in settings.items())
    both = memory_of(config["policy"]["family"], frozen).gigabytes(
        plan or MemoryPlan(),
        checkpointing=bool(settings.get("gradient_checkpointing")),
        decisions=config.get("update", {}).get("micro_batch_size") or 0,
        num_envs=-(-config["env"]["num_envs"] // processes),
    )
    return math.ceil(max(both))


def row(experiment):
    """Its row of docs/results.md: GB on each of 8 GPUs and on one alone, with an adapter likewise, in evaluations."""
    config, evaluated = compose_experiment(experiment), compose_evaluation(experiment)
    compute = config["sharding"]["compute"] is not None
    numbers = [
        gigabytes(config, MemoryPlan(shards=GUIDE, compute=compute)),
        gigabytes(config, MemoryPlan(compute=compute), 1),
    ]
    if numbers[1] <= LARGEST:
        numbers += ["", ""]
    else:
        numbers += [
            gigabytes(config, MemoryPlan(shards=GUIDE), **ADAPTER),
            gigabytes(config, MemoryPlan(), 1, **ADAPTER),
        ]
    acting = MemoryPlan(acting=True)
    numbers += [gigabytes(evaluated, acting, 1, dtype=dtype) for dtype in ("float32", "bfloat16")]
    return f"| `{experiment}` | {' | '.join(map(str, numbers))} |".replace("|  |", "| |").replace("|  |", "| |")


def cards(experiment):
    """Its row of docs/hardware.md: what ``gpu=`` makes of it alone on a GPU of each size, and GB that it then needs."""
    recipe = find_experiments(CONF)[experiment].recipe
    settings = read_config(
        compose_settings(recipe, [f"experiment={experiment}"], CONF), import_module(f"recipes.{recipe}").SETTINGS
    )
    settings.policy.update(settings_of({"env": settings.env, "policy": settings.policy}))
    fitting, cells = Fitting(settings, 1, ()), []
    for card in CARDS:
        changes = fitting.changes(usable(card))
        if changes is None:
            cells.append("no")
            continue
        load = fitting.load(changes)
        needed = math.ceil(max(load.peaks(changes)))
        assert needed <= usable(card) + 1
        cells.append(f"adapter, {needed}" if load is fitting.adapted else f"same, {needed}" if changes else f"{needed}")
    return f"| `{experiment}` | {' | '.join(cells)} |"
