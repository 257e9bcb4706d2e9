"""What the server of :mod:`forked` has done before it forks: imports, and the grammar and plugins of Hydra."""

import runpy

import peft  # noqa: F401
import pytest  # noqa: F401
import tensorboard  # noqa: F401
import torch
import torch.distributed.fsdp
import transformers  # noqa: F401
from hydra import compose, initialize_config_dir
from paths import CONF, RECIPES

import vla_policies.openvla
import vla_policies.pi0
import vla_policies.small  # noqa: F401

torch.set_num_threads(1)  # threads do not survive a fork
for recipe in ("ppo", "grpo", "ppo_async", "rs", "dagger", "dsrl", "sac", "sft", "evaluate"):
    runpy.run_path(str(RECIPES / f"{recipe}.py"), run_name="imported")
    with initialize_config_dir(str(CONF), version_base=None):
        compose(recipe, ["seed=1", "launcher=slurm"])
