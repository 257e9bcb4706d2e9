"""Wrong settings of every recipe and experiment: each must be refused, in one line that names it, before work.

Two kinds. Those of ``mistakes.txt`` are what somebody might type, each known to be wrong. The others are drawn: some
setting of some recipe gets a nasty value, and where it is accepted, :data:`LEGAL` says whether it may be; that table
was written by hand from the documentation and shares nothing with the checks.
``python -m benchmarks.storm.configurations`` prints what was accepted, for review.

A recipe runs in this process up to where simulators would start.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import functools
import importlib.util
import io
import math
import random
import re
import shlex
import shutil
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

import vla_algos
from benchmarks.storm.tally import Tally
from vla_algos.run.arguments import read_arguments
from vla_algos.run.explanations import explain

COUNT = 1500
MISTAKES = [
    shlex.split(line)
    for line in (Path(__file__).parent / "mistakes.txt").read_text().splitlines()
    if not line.startswith("#")
]
RECIPES = Path(vla_algos.__file__).resolve().parents[1] / "recipes"
CONF = RECIPES / "conf"
VALUES = (
    *("-1", "-0.5", "-1e-3", "0", "0.0", "1e-300", "0.5", "1", "1.0", "1.5", "2", "2.5", "3", "7", "95", "99.9", "1e3"),
    *("4e0", "100000", "1000000000", "1e9", "1e400", "nan", "inf", "-inf", "99999999999999999999", "null", "true"),
    *("false", "no", "yes", "off", "on", "none", "None", "auto", "ten", "10%", "0.1.2", "''", "' '", "'4'"),
    *(
        "'true'",
        "nul",
        "[]",
        "{}",
        "[1]",
        "[1,2,3]",
        "[0.9,0.1]",
        "[-1,2]",
        "[a,b]",
        "[null]",
        "[[1,2],[3,4]]",
        "[nan,1]",
    ),
    *(
        "{a: 1}",
        "{lookat: 1}",
        "{object: [0, 4]}",
        "${seed}",
        "${nothing}",
        "???",
        "ünïcödé",
        "'two\\nlines'",
        "/nowhere",
    ),
    *("../..", "'" + "x" * 10_000 + "'", "cuda:99", "metaworld/MT50", "flow_sde", "1_000"),
)
BASES = [("ppo", []), ("grpo", []), ("sft", []), ("evaluate", ["policy.checkpoint=/nowhere"])]
BASES += [("ppo", ["policy=small_flow"]), ("ppo", ["launcher=slurm"]), ("ppo", ["env=maniskill_push_cube"])]
BASES += [("ppo", ["env=libero", "eval.trials=10", "sft=none"]), ("ppo", ["env=maniskill", "sft=none"])]
BASES += [("ppo", ["env=calvin", "sft=none"]), ("ppo", ["env=robotwin", "sft=none"])]
BASES += [("ppo", ["logger=[tensorboard,csv,wandb,swanlab]"])]


class Started(Exception):
    """The recipe has checked its settings and would start simulators, or look for a checkpoint or a cluster, now."""


# ---- one configuration


@functools.cache
def _main(recipe: str) -> Callable[[DictConfig], None]:
    spec = importlib.util.spec_from_file_location(f"storm_{recipe}", RECIPES / f"{recipe}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main.__wrapped__


def _compose(recipe: str, arguments: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base=None):
        return compose(recipe, overrides=arguments, return_hydra_config=True)


def _run(recipe: str, config: DictConfig) -> None:
    """Run a recipe up to where simulators would start.

    Raises:
        Started: nothing was refused.
        Exception: what the recipe says.
    """
    folder = Path(tempfile.mkdtemp(prefix="storm_"))
    config = copy.deepcopy(config)
    with open_dict(config):
        config.hydra.runtime.output_dir = str(folder / "run")
        HydraConfig.instance().set_config(config)
        del config["hydra"]

    def stop(*_: Any, **__: Any) -> None:
        raise Started

    quiet = io.StringIO()
    try:
        (folder / "run").mkdir()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            everything = {"_is_installed": lambda name: True, "has_key": lambda name: True}  # of the loggers
            with patch("vla_envs.env.VLAEnv", stop), patch.multiple("vla_algos.run.loggers", **everything):
                _main(recipe)(config)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    raise Started  # it has come to its end


def attempt(recipe: str, make: Callable[[], DictConfig]) -> BaseException | None:
    """Return what a configuration is refused with; ``None`` if it is accepted."""
    try:
        _run(recipe, make())
    except Started:
        return None
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        accepted = (
            "/nowhere",
            "starts from a checkpoint",
            "neither a folder here",
            "sbatch",
        )  # what a valid configuration lacks here
        if any(text in str(error) for text in accepted) and "=/nowhere: " not in str(error):
            return None
        return error
    except Exception as error:
        return error
    raise AssertionError("a recipe neither started nor refused")


def typed(recipe: str, arguments: list[str]) -> BaseException | None:
    """Return what arguments are refused with, as they are typed after ``python recipes/RECIPE.py``."""

    def make() -> DictConfig:
        return _compose(recipe, read_arguments(recipe, arguments, CONF))

    error = attempt(recipe, make)
    return None if error is None else explain(error, recipe, arguments, CONF)


def told(error: BaseException, name: str) -> bool:
    """Tell whether an error is one line of ours that names the setting."""
    text = str(error)
    kinds = (ValueError, FileNotFoundError)
    ours = isinstance(error, kinds) and not isinstance(error, HydraException) and "\n" not in text and len(text) < 600
    typed = name.lstrip("+~").partition("=")[0]
    parts = [typed, typed.rpartition(".")[2], *([typed.partition(".")[0]] if "+" in name else [])]  # or its section
    return ours and any(re.search(rf"(?<!\w){re.escape(part)}", text) for part in parts)


# ---- what may be accepted


def whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def number(least: float, most: float = 1e6, *, above: bool = False, below: bool = False) -> Callable[[Any], bool]:
    def legal(value: Any) -> bool:
        if type(value) not in (int, float) or not math.isfinite(value):
            return False
        return (value > least if above else value >= least) and (value < most if below else value <= most)

    return legal


def one_of(*names: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is name or (isinstance(name, str) and value == name) for name in names)


def text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value.strip()) <= 4096 and value != "???"


def null_or(legal: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or legal(value)


def list_of(legal: Callable[[Any], bool], least: int = 0, most: int = 1000) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(legal, value))


def any_of(*ways: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(way(value) for way in ways)


def ordered(legal: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: legal(value) and list(value) == sorted(value)


def first_process(value: Any) -> bool:
    return type(value) in (int, str, list) and value in ("all", 0, "0", "0-0", [0], ["0"], ["0-0"])


def matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: text(value) and re.fullmatch(pattern, value) is not None


flag, never, count = one_of(True, False), one_of(), whole(1, 1_000_000)
rate, share, positive = number(0, 1, above=True, below=True), number(0, 1), number(0, above=True)
below_one = number(0, 1, above=True, below=True)
ablation = one_of("blank_images", "do_nothing", "other_trial", "swapped_instructions")
LEGAL: Mapping[str, Callable[[Any], bool]] = {  # the first pattern that fits
    "recipe": never,
    "seed": whole(0, 2**32 - 1),
    "evaluate eval.seed": whole(0, 2**32 - 1),  # where nothing is trained
    "eval.seed": whole(2, 2**32 - 1),  # 0 and its neighbours are what is trained on
    "episode_order": one_of("random", "balanced", "learnable", "ordered", "fixed"),
    "resume": one_of("auto", "force", "never", "elastic"),
    "iterations": count,
    "sharding.shards": lambda value: value == "all" or count(value),
    "sharding.compute": one_of("bf16", None),
    "sharding.reshard_after_forward": flag,
    "sharding.cpu_offload": flag,
    "offload.optimizer": flag,
    "placement.env": lambda value: value == "same" or first_process(value),
    "placement.*": first_process,  # there is no other
    "train_videos.environments": whole(0, 1_000_000),  # of as many and more
    "train_videos.every": count,
    "timeline": flag,
    "sync.lag": whole(0, 1_000_000),
    "pipeline.stages": whole(1, 50_000),  # of as many environments and more
    "pipeline.overlap_resets": flag,
    "evaluate_every": whole(0, 1_000_000),
    "checkpoint_every": count,
    "group_size": whole(2, 1_000_000),
    "patience": count,
    "greedy": flag,
    "eval.mean_of": list_of(one_of("easy", "medium", "hard", "very_hard")),
    "ablation": any_of(null_or(ablation), lambda v: list_of(ablation, 1)(v) and len(set(v)) == len(v)),
    "eval.trials": null_or(whole(1, 1_000_000)),
    "eval.repeats": whole(1, 10_000),
    "eval.videos": whole(0, 1_000_000),
    "eval.sampled": flag,
    "eval.temperature": one_of(None),  # no policy here samples at one
    "eval.env": one_of(None),
    "demonstrations.episodes": whole(0, 1_000_000),
    "demonstrations.noise": any_of(share, list_of(share, 4, 4)),
    "demonstrations.folder": null_or(text),
    "demonstrations.heldout": number(0, 1, below=True),
    "demonstrations.statistics": one_of("checkpoint", "demonstrations"),
    "demonstrations.camera": null_or(text),
    "demonstrations.wrist_cameras": null_or(list_of(text)),
    "demonstrations.tasks": one_of("environment", "all"),
    "demonstrations.noise_correlation": number(0, 1, below=True),
    "demonstrations.*": count,
    "heldout_every": count,
    "cloning.lr": rate,
    "cloning.weight_decay": share,
    "cloning.label_sigma": rate,
    "cloning.state_noise": number(0, 1000),
    "cloning.auxiliary": number(0, 1000),
    "cloning.auxiliary_steps": list_of(count),
    "cloning.*": count,
    "collector.success_bounds": null_or(ordered(list_of(share, 2, 2))),
    "collector.*": count,
    "gae.gamma": share,
    "gae.lmbda": share,
    "gae.normalize": flag,
    "gae.reward_level": one_of("chunk", "action"),
    "gae.bootstrap": one_of("truncation", "none", "any_done"),
    "loss.*_level": one_of("token", "action", "chunk"),
    "loss.clip_epsilon": any_of(below_one, lambda v: list_of(number(0, 10, above=True), 2, 2)(v) and v[0] < 1),
    "loss.dual_clip": null_or(number(1, 100, above=True)),
    "loss.entropy_coeff": number(-1, 1),
    "loss.critic_coeff": null_or(number(0, 1000)),
    "loss.clip_value": null_or(positive),
    "loss.huber_delta": positive,
    "loss.max_behaviour_weight": one_of(None),  # without sync.lag
    "loss.reference_kl_coeff": number(0, 1000),
    "optim.lr": rate,
    "optim.value_lr": null_or(rate),
    "optim.betas": ordered(list_of(number(0, 1, below=True), 2, 2)),
    "optim.eps": rate,
    "optim.weight_decay": share,
    "optim.max_grad_norm": null_or(number(0, math.inf, above=True)),
    "optim.schedule": one_of("constant", "cosine"),
    "optim.warmup_updates": whole(0, 45),  # of a run of 46
    "optim.final_lr": share,
    "update.aggregation": one_of("token_mean", "trajectory_mean"),
    "update.epochs": count,
    "update.minibatch*": null_or(count),
    "update.micro_batch_size": null_or(count),
    "update.target_kl": null_or(positive),
    "update.critic_warmup_steps": whole(0, 1_000_000),
    "update.max_log_ratio": null_or(positive),
    "logger.*.videos": flag,
    "logger.*.mode": one_of("online", "offline"),
    "logger.wandb.project": matches(r"[^/\\#?%:]{1,128}"),
    "logger.swanlab.project": matches(r"[0-9a-zA-Z_.+-]{1,100}"),
    "logger.swanlab.workspace": null_or(matches(r"[0-9a-zA-Z_-]{1,25}")),
    "logger.csv.columns": list_of(text, 1),
    "logger.*": null_or(text),
    "launcher.name": never,
    "launcher.partition": null_or(any_of(text, whole(0, 10**20))),
    "launcher.account": null_or(any_of(text, whole(0, 10**20))),
    "launcher.qos": null_or(any_of(text, whole(0, 10**20))),
    "launcher.constraint": null_or(any_of(text, whole(0, 10**20))),
    "launcher.nodes": whole(1, 10_000),
    "launcher.tasks_per_node": whole(1, 1000),
    "launcher.setup": null_or(list_of(text)),
    "launcher.seeds": null_or(lambda v: list_of(whole(0, 2**32 - 1), 1)(v) and len(set(v)) == len(v)),
    "launcher.wait": flag,
    "launcher.check": flag,
    "launcher.extra": null_or(
        lambda v: isinstance(v, dict) and all(re.fullmatch(r"[a-z][a-z0-9_-]*", name) for name in v)
    ),
    "launcher.retries": whole(0, 1_000_000),
    "launcher.signal_delay_s": null_or(whole(0, 240 * 60 - 1)),
    "launcher.*": null_or(whole(0, 1_000_000)),
    "env.id": one_of("metaworld/MT50"),
    "env.num_envs": whole(1, 100_000),
    "env.num_workers": null_or(whole(1, 128)),
    "env.gpus": null_or(lambda v: list_of(whole(0, 1_000_000), 1)(v) and len(set(v)) == len(v)),
    "env.step_timeout": positive,
    "env.start_timeout": positive,
    "env.ignore_terminations": flag,
    "env.relative_reward": flag,
    "env.reward_coef": number(0, 1000, above=True),
    "env.step_penalty": number(0, 1000),
    "env.group_size": count,
    "env.protocol": one_of("openvla", "rlinf", "lerobot"),
    "env.max_episode_steps": null_or(count),
    "env.settle_steps": null_or(whole(0, 1_000_000)),
    "env.reset_gripper_open": flag,
    "env.fixtures": one_of("trial", "openvla", "openpi"),
    "env.task_ids": null_or(lambda v: list_of(whole(0, 129), 1)(v) and len(set(v)) == len(v)),
    "env.image_size": null_or(any_of(whole(16, 4096), list_of(whole(16, 4096), 2, 2))),
    "env.render_quality": one_of("benchmark", "fast", "minimal", "coarse"),
    "env.assets": null_or(text),
    "env.download_assets": flag,
    "env.allow_other_versions": flag,
    "env.cache_gigabytes": number(0, 1000),
    "env.camera": one_of(None),
    "env.reset_ranges": one_of(None),
    "env.only": null_or(lambda v: v == {"object": [0, 4]}),
    "env.hide_goals": flag,
    "env.reward_type": one_of(None, "sparse", "progress", "success", "staged", "dense"),
    "env.object_set": one_of("train", "test", "all"),
    "env.start": one_of("rlinf", "rl4vla"),
    "env.textures": one_of("rlinf", "rl4vla"),
    "env.backend": one_of("processes", "cuda"),
    "env.scene": one_of(None, "A", "B", "C", "D", "ABC", "ABCD"),
    "env.chains": one_of(None, "drawn", "published"),
    "env.chains_file": one_of(None),
    "env.sentences": one_of(None, "validation", "training"),
    "env.wrist_camera": flag,
    "env.scene_fixes": flag,
    "env.renderer": one_of("auto", "tiny", "egl"),
    "env.path": null_or(text),
    "env.assets_path": null_or(text),
    "env.task_config": one_of("demo_clean", "demo_randomized"),
    "env.embodiment": lambda v: v in (["aloha-agilex"], ["piper", "piper", 0.6]),
    "env.*_camera_type": one_of("D435", "L515", "Large_D435", "Large_L515"),
    "env.collect_wrist_camera": flag,
    "env.center_crop": flag,
    "env.step_lim": null_or(count),
    "env.instruction_type": one_of("seen", "unseen"),
    "env.seeds": one_of("solved", "range"),
    "env.shader": one_of("default", "rt"),
    "env.control_mode": one_of("pd_ee_delta_pose", "pd_ee_delta_pos"),
    "policy.family": never,
    "policy.checkpoint": null_or(text),
    "policy.device": null_or(lambda v: isinstance(v, str) and re.fullmatch(r"cpu|cuda(:\d+)?|mps", v) is not None),
    "policy.dtype": one_of(None, "float32", "bfloat16"),
    "policy.lora_targets": null_or(list_of(text, 1)),
    "policy.lora_adapter": null_or(text),
    "policy.lora_rank": null_or(whole(1, 16_384)),
    "policy.lora_alpha": null_or(count),
    "policy.num_bins": null_or(whole(2, 65_536)),
    "policy.text_buckets": null_or(whole(2, 1_000_000)),
    "policy.channels": null_or(lambda v: list_of(whole(1, 16_384), 3, 3)(v) and not (v[1] % 4 or v[2] % 4)),
    "policy.chunk_size": null_or(whole(1, 1000)),
    "policy.layers": null_or(whole(1, 100)),
    "policy.dim": null_or(whole(1, 16_384)),
    "policy.heads": null_or(whole(1, 16_384)),
    "policy.keypoints": null_or(whole(1, 16_384)),
    "policy.num_steps": null_or(whole(1, 1000)),
    "policy.noise_level": null_or(number(0, 10)),  # of which a method may refuse 0, when the checkpoint is there
    "policy.noise_anneal": one_of(None),
    "policy.noise_std_range": null_or(ordered(list_of(number(0, 10, above=True), 2, 2))),
    "policy.method": one_of(None, "flow_sde", "flow_noise", "flow_cps", "flow_ode"),
    "policy.statistics": one_of(None, "q99", "min_max"),
    "policy.image_resize": one_of(None, "bicubic", "lanczos3"),
    "policy.head": one_of(None, "tokens", "l1"),
    "policy.layout": one_of(None, "official", "rlinf"),
    "policy.value_after_vlm": one_of(None, "mean", "last", "first"),
    "policy.temperature": null_or(number(0, 100, above=True)),
    "policy.top_k": null_or(whole(0, 256)),
    "policy.prefix_cache_gb": null_or(number(0)),
    "policy.unnorm_key": null_or(text),
    "policy.norm_stats_id": null_or(text),
    "policy.config_name": null_or(text),
    "policy.max_prompt_length": null_or(whole(1, 8192)),
    "policy.num_images_in_input": null_or(whole(1, 3)),
    "policy.*dim": null_or(whole(1, 1000)),
    "policy.*horizon": null_or(whole(1, 1000)),
    "policy.num_action_chunks": null_or(whole(1, 1000)),
    "policy.*": null_or(flag),
}


def legal(name: str, value: Any, recipe: str = "ppo") -> bool:
    """Tell whether a setting of a recipe may have a value."""
    names = (f"{recipe} {name}", name)
    pattern = next(pattern for pattern in LEGAL if any(fnmatch.fnmatchcase(each, pattern) for each in names))
    return LEGAL[pattern](value)


# ---- the storm


def _settings(config: DictConfig) -> list[str]:
    """List the names of all settings as they are typed."""

    def names(section: Any, before: str = "") -> Iterator[str]:
        for name, value in section.items():
            if isinstance(value, dict) and before in ("", "logger."):  # which has a section for each
                yield from names(value, f"{before}{name}.")
            else:
                yield f"{before}{name}"

    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    del plain["hydra"]
    return list(names(plain))


def bases() -> list[tuple[str, list[str]]]:
    """List recipes with the arguments that a mutation is added to: defaults, other groups, every experiment."""
    found = list(BASES)
    for file in sorted((CONF / "experiment").glob("*.yaml")):
        recipe = (yaml.safe_load(file.read_text()) or {}).get("recipe") or re.findall(
            "_(ppo|grpo|evaluate)_", file.stem
        )[0]
        lacking = [] if "small" in file.stem else ["policy.checkpoint=/nowhere"]
        found.append((recipe, [f"experiment={file.stem}", *lacking]))
    return found


def _set(config: DictConfig, name: str, value: str) -> tuple[DictConfig, Any]:
    """Return a copy with a value that is read as Hydra reads what is typed, and that value."""
    config = copy.deepcopy(config)
    given = OverridesParser.create().parse_override(f"{name}={value}").value()
    section, _, last = name.rpartition(".")
    with open_dict(config):
        node = OmegaConf.select(config, section) if section else config
        assert isinstance(node, DictConfig)
        node[last] = given
    plain = OmegaConf.to_container(OmegaConf.create([given])) if isinstance(given, (dict, list)) else [given]
    return config, seed_of(config) if value == "${seed}" else plain[0]


def seed_of(config: DictConfig) -> Any:
    """Return what ``${seed}`` stands for."""
    return config.seed if "seed" in config else None


def mistakes(count: int, tally: Tally) -> None:
    """Type ``count`` of the known mistakes, in turn."""
    step = max(1, len(MISTAKES) // max(1, count))
    for recipe, *rest in MISTAKES[::step][:count]:
        error = typed(recipe, rest)
        if error is None:
            tally.note("wrong", "mistake", f"{recipe} {' '.join(rest)}: accepted")
        else:
            known = any(told(error, each) for each in rest)
            tally.note("survived" if known else "lost", "mistake", f"{recipe} {' '.join(rest)}: {_short(error)}")


def mutations(count: int, seed: int, tally: Tally, accepted: dict[str, set[str]]) -> None:
    """Give ``count`` drawn settings drawn values."""
    draw = random.Random(seed)
    sources = bases()
    composed: dict[int, tuple[DictConfig, list[str]]] = {}
    for _ in range(count):
        place = draw.randrange(len(sources))
        recipe, arguments = sources[place]
        if place not in composed:
            config = _compose(recipe, arguments)
            composed[place] = config, _settings(config)
        config, names = composed[place]
        name, value = draw.choice(names), draw.choice(VALUES)
        try:
            mutated, given = _set(config, name, value)
        except HydraException:  # no value at all: the command line says so, see the mistakes
            tally.note("survived", "mutation: no value")
            continue
        what = f"{recipe} {' '.join(arguments)} {name}={value[:60]}"
        error = attempt(recipe, lambda mutated=mutated: mutated)
        if error is None:
            given = OmegaConf.to_container(given) if isinstance(given, (DictConfig, ListConfig)) else given
            accepted[name].add(value[:60])
            if legal(name, given, recipe):
                tally.note("survived", "mutation: legal")
            else:
                tally.note("wrong", "mutation: accepted", what)
        elif told(explain(error, recipe, [*arguments, f"{name}={value}"], CONF), name):
            tally.note("survived", "mutation: refused")
        else:
            tally.note("lost", "mutation: not told", f"{what}: {_short(error)}")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' | '.join(str(error).splitlines())[:160]}"


def run(count: int = COUNT, seed: int = 0, accepted: dict[str, set[str]] | None = None) -> Tally:
    """Type mistakes, a third of all or all that there are, and mutate.

    Args:
        count: configurations.
        seed: of the drawn ones.
        accepted: filled with the accepted values by setting.
    """
    tally = Tally("wrong configurations")
    of_mistakes = min(len(MISTAKES), max(1, count // 3))
    mistakes(of_mistakes, tally)
    mutations(count - of_mistakes, seed, tally, defaultdict(set) if accepted is None else accepted)
    return tally


def main() -> int:
    """Print the tally, and the settings with the values that were accepted."""
    accepted: dict[str, set[str]] = defaultdict(set)
    count, seed = ([int(number) for number in sys.argv[1:]] + [COUNT, 0])[:2] if sys.argv[1:] else (COUNT, 0)
    tally = run(count, seed, accepted)
    print("\n".join(tally.failures))
    print("\naccepted:")
    for name in sorted(accepted):
        print(f"  {name}: {'  '.join(sorted(accepted[name]))}")
    print(
        f"\n{tally.tried} tried, {tally.survived} survived, {tally.lost} lost, {tally.wrong} wrong; {dict(tally.kinds)}"
    )
    return 0 if tally.clean else 1


if __name__ == "__main__":
    sys.exit(main())
