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
    compute = config["sharding"]["compute"] is not None
    shared, alone = Way(shards=GUIDE, compute=compute), Way(compute=compute)
    text = (
        f"Hardware, calculated: with {GUIDE} GPUs each needs {gigabytes(config, shared)} GB, and one that trains alone "
        f"{gigabytes(config, alone, 1)}; the guide takes {GUIDE} of 80."
    )
    if gigabytes(config, alone, 1) <= 80:
        return text
    adapted, by_itself = gigabytes(config, Way(shards=GUIDE), **ADAPTER), gigabytes(config, Way(), 1, **ADAPTER)
    return (
        f"{text} With an adapter, policy.lora_rank=32 policy.dtype=bfloat16 sharding.compute=null and optim.lr=1.0e-4, "
        f"which RLinf takes for adapters, {adapted} and {by_itself}."
    )
