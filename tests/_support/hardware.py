"""What an experiment needs of GPUs, calculated from its settings, in the words of its head."""

import functools
import math

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from paths import CONF

from vla_policies.memory import Way
from vla_policies.registry import outline_policy
from vla_policies.sizing import needed

GUIDE = 8  # GPUs of RLinf's runs, of 80 GB
ADAPTER = {"lora_rank": 32, "dtype": "bfloat16"}
DIMENSIONS = {"robotwin": {"action_dim": 14, "proprio_dim": 14}}
UNSAID = {"family", "checkpoint", "device", "lora_adapter"}


def compose_experiment(experiment):
    """The whole configuration of an experiment, as its recipe gets it."""
    recipe = next((name for name in ("grpo", "evaluate") if f"_{name}_" in experiment), "ppo")
    with initialize_config_dir(str(CONF), version_base=None):
        return OmegaConf.to_container(compose(recipe, overrides=[f"experiment={experiment}"]), resolve=True)


@functools.cache
def outline(family, settings):
    return outline_policy(family, **dict(settings))


def settings_of(config):
    benchmark = config["env"]["id"].partition("/")[0]
    found = {name: value for name, value in config["policy"].items() if value is not None and name not in UNSAID}
    if config["policy"]["family"] == "pi0":
        found.setdefault("config_name", "pi05_aloha_robotwin" if benchmark == "robotwin" else f"pi05_{benchmark}")
    elif benchmark in DIMENSIONS:
        found |= DIMENSIONS[benchmark]
    return found


def gigabytes(config, way=None, processes=GUIDE, **other):
    """GB that each GPU needs, rounded up: the larger of update and rollout, activations included."""
    settings = {**settings_of(config), **other}
    frozen = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in settings.items())
    both = needed(
        outline(config["policy"]["family"], frozen),
        way or Way(),
        checkpointing=bool(settings.get("gradient_checkpointing")),
        decisions=config.get("update", {}).get("micro_batch_size") or 0,
        num_envs=-(-config["env"]["num_envs"] // processes),
    )
    return math.ceil(max(both))


def sentence(experiment):
    """What its head must say."""
    config = compose_experiment(experiment)
    environments, acting = config["env"]["num_envs"], Way(acting=True)
    if "_evaluate_" in experiment:
        whole, lower = (gigabytes(config, acting, 1, dtype=dtype) for dtype in ("float32", "bfloat16"))
        return (
            f"Hardware, calculated: a GPU of {whole} GB for {environments} environments, or of {lower} with "
            "policy.dtype=bfloat16."
        )
    each, alone = gigabytes(config), gigabytes(config, processes=1)
    if each <= 80:
        return (
            f"Hardware, calculated: with {GUIDE} GPUs each needs {each} GB, and one that trains alone {alone}; "
            f"the guide takes {GUIDE} of 80."
        )
    sharded = gigabytes(config, Way(shards=GUIDE, compute=True))
    each_adapter, alone_adapter = gigabytes(config, **ADAPTER), gigabytes(config, processes=1, **ADAPTER)
    return (
        f"Hardware, calculated: the whole model needs {each} GB on each GPU, and the guide takes {GUIDE} of 80; "
        f"cut into {GUIDE} shards with bf16 compute, which the recipes cannot do yet, {sharded}. With an adapter, "
        "policy.lora_rank=32 policy.dtype=bfloat16 and optim.lr=1.0e-4, which RLinf takes for adapters, "
        f"each of {GUIDE} GPUs needs {each_adapter} GB, and one that trains alone {alone_adapter}."
    )
