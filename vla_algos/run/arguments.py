"""What is typed after ``python recipes/ppo.py``: earlier names of settings, mistakes that Hydra does not explain."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from vla_common.errors import unknown_name
from vla_common.registry import config_packages

_RENAMED = {
    **dict.fromkeys(("reward_level", "gamma", "lmbda", "normalize", "bootstrap"), "gae"),
    **dict.fromkeys(("log_prob_level", "clip_epsilon", "dual_clip", "entropy_coeff", "entropy_level"), "loss"),
    **dict.fromkeys(("critic_coeff", "clip_value", "huber_delta", "reference_kl_coeff"), "loss"),
    **dict.fromkeys(("aggregation", "epochs", "minibatch_size", "minibatches", "micro_batch_size"), "update"),
    **dict.fromkeys(("target_kl", "critic_warmup_steps", "max_log_ratio"), "update"),
    **dict.fromkeys(("groups", "max_groups", "success_bounds"), "collector"),
}
RENAMED = {  # settings of version 0.1's first recipes, and what they are called now
    **{f"algo.{name}": f"{section}.{name}" for name, section in _RENAMED.items()},
    "algo.group_size": "group_size",
    "algo.patience": "patience",
    **{f"sft.{name}": f"demonstrations.{name}" for name in ("episodes", "stride", "noise", "noise_correlation")},
    "sft.max_steps": "demonstrations.max_steps",
    **{f"sft.{name}": f"cloning.{name}" for name in ("steps", "batch_size", "lr", "weight_decay", "label_sigma")},
    **{f"sft.{name}": f"cloning.{name}" for name in ("state_noise", "warmup_steps")},
    "launcher.warning": "launcher.signal_delay_s",
    "policy.prefix_gigabytes": "policy.prefix_cache_gb",
    "eval=grid": "eval=heldout",
}
_OVERRIDE = re.compile(r"(?P<prefix>\+{0,2}|~)(?P<name>[\w./@]+)(?P<rest>=.*)?", re.DOTALL)
_FLAGS: tuple[str, ...] = ("-h", "-r", "-m", "-i", "-sc", "--help", "--hydra-help", "--version", "--resolve")
_FLAGS += ("--run", "--multirun", "--info", "--shell-completion")
_FLAGS_WITH_VALUE: tuple[str, ...] = ("-c", "-p", "-cp", "-cn", "-cd", "--cfg", "--package", "--config-path")
_FLAGS_WITH_VALUE += ("--config-name", "--config-dir", "--experimental-rerun")


class PluginSearchPath(SearchPathPlugin):
    """Puts configuration groups of installed packages on Hydra's search path (``vla_torchrl.configs``)."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them after the recipe's own."""
        for package in config_packages():
            search_path.append("vla-torchrl", f"pkg://{package}")


Plugins.instance().register(PluginSearchPath)


def translate_arguments(recipe: str) -> None:
    """Replace earlier names of settings in ``sys.argv``, with a line that says so.

    Ends the program, with one line, at what is no setting at all and at an experiment of another recipe.

    Args:
        recipe: name of the recipe that is about to run; its ``conf`` is beside the program.
    """
    try:
        arguments = translated(sys.argv[1:])
        check_experiment(recipe, arguments, Path(sys.argv[0]).resolve().parent / "conf" / "experiment")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.argv[1:] = arguments


def translated(arguments: Sequence[str]) -> list[str]:
    """Replace earlier names of settings by today's.

    Raises:
        ValueError: an argument that is neither a setting nor a flag.
    """
    found = []
    for index, argument in enumerate(arguments):
        flag = argument.partition("=")[0]
        if flag in _FLAGS or flag in _FLAGS_WITH_VALUE or (index and arguments[index - 1] in _FLAGS_WITH_VALUE):
            found.append(argument)
            continue
        match = _OVERRIDE.fullmatch(argument)
        if match is None or (match["rest"] is None and match["prefix"] != "~"):
            name = argument.lstrip("-").partition("=")[0]
            raise ValueError(f"{argument!r} is no setting; type name=value, such as {name or 'seed'}=1")
        old = f"{match['name']}{match['rest']}" if f"{match['name']}{match['rest']}" in RENAMED else match["name"]
        if old in RENAMED:
            print(
                f"warning: {old} is called {RENAMED[old]} now; the old name goes with the next version", file=sys.stderr
            )
            new = RENAMED[old] if "=" in old else f"{RENAMED[old]}{match['rest'] or ''}"
            argument = f"{match['prefix']}{new}"
        found.append(argument)
    return found


def check_experiment(recipe: str, arguments: Sequence[str], folder: Path) -> None:
    """Refuse an experiment that was written for another recipe, or that does not exist.

    Raises:
        ValueError: says which recipe it is for, or the nearest names.
    """
    chosen = [argument.partition("=")[2] for argument in arguments if re.match(r"\+?experiment=", argument)]
    known = {file.stem: file for file in folder.glob("*.yaml")}
    for name in chosen:
        if name in ("", "null") or "," in name:
            continue
        if name not in known:
            if config_packages():
                return  # it may be a plugin's: Hydra says
            raise unknown_name("experiment", name, sorted(known))
        written_for = (yaml.safe_load(known[name].read_text()) or {}).get("recipe", recipe)
        if written_for != recipe:
            raise ValueError(
                f"experiment={name} is for {written_for}.py; type: python recipes/{written_for}.py experiment={name}"
            )
