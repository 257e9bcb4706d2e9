"""``vla-recipe from-rlinf FILE.yaml``: the command of ours that means the same, and what was not translated."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vla_algos.placement import Placement
from vla_algos.run.arguments import as_typed, compose_settings
from vla_algos.run.evaluated import make_env_spec
from vla_algos.run.rlinf.keys import Keys, NotGiven
from vla_algos.run.rlinf.learning import read_algorithm, recipe
from vla_algos.run.rlinf.models import FAMILIES, MODEL, read_policy
from vla_algos.run.rlinf.reading import Configuration, read_configuration
from vla_algos.run.rlinf.running import read_loggers, read_optim, read_processes, read_run
from vla_algos.run.rlinf.untranslated import DIFFERS, NONE, NOTHING, SAME, UNKNOWN, account_for_the_rest
from vla_algos.run.rlinf.worlds import PLATE25, benchmark, check_suite, read_env
from vla_common.program import one_line
from vla_policies.registry import get_policy_class

Check = Callable[[str, DictConfig], object]  # of a recipe's name and its configuration
_TASKS = ("embodied",)
_EVALUATIONS = "embodied_eval"
_TITLES = {
    DIFFERS: "Different here",
    NONE: "No counterpart here",
    NOTHING: "Does nothing in RLinf",
    SAME: "The same here, with nothing to set",
    UNKNOWN: "Not known",
}
_TRAINING = {"pi0": "openpi", "openvla": "openvlaoft", "openvla_oft": "openvlaoft"}  # algo=ppo_openpi, optim=openpi


@dataclass(frozen=True)
class Translation:
    """What a file of RLinf's comes to.

    Attributes:
        configuration: the file.
        recipe: ``"ppo"`` or ``"grpo"``.
        overrides: what is typed after the recipe.
        processes: how many the roles of ``placement`` need on how many nodes; ``(1, 1)`` where each process has all.
        keys: what became of each key.
    """

    configuration: Configuration
    recipe: str
    overrides: tuple[str, ...]
    processes: tuple[int, int]
    keys: Keys

    @property
    def command(self) -> list[str]:
        """The command line, word by word."""
        each, nodes = self.processes
        if each * nodes == 1:
            program = ["python"]
        else:
            program = ["torchrun", *([f"--nnodes={nodes}"] if nodes > 1 else []), f"--nproc-per-node={each}"]
        return [*program, f"recipes/{self.recipe}.py", *self.overrides]

    def lines(self) -> Iterator[str]:
        """Yield the command as a shell reads it, and all else as its comments."""
        yield " \\\n    ".join(_in_lines(self.command))
        yield ""
        yield from (f"# {_printable(line)}".rstrip() for line in self._remarks())

    def _remarks(self) -> Iterator[str]:
        keys = self.keys.configuration.values
        counted = f"{sum(key in self.keys.used for key in keys)} of {len(keys)} keys are translated"
        yield f"{self.configuration.path.name}: {counted}. Nothing was run."
        if self.processes == (1, 1):
            yield (
                "This is one process on one GPU. On all 8 of a node: torchrun --nproc-per-node 8 in place of python, "
                "or launcher=slurm_8gpus at the end; outside a checkout "
                f"vla-recipe run {self.recipe} in place of python recipes/{self.recipe}.py"
            )
        if self.configuration.missing:
            yield self._missing()
        for kind, title in _TITLES.items():
            rows: dict[str, list[str]] = {}
            for remark in self.keys.remarks:
                if remark.kind == kind:
                    rows.setdefault(remark.text, []).append(remark.shown or ", ".join(remark.keys))
            if rows:
                yield from ("", f"{title}:")
                yield from (f"  {', '.join(shown)}: {text}" for text, shown in rows.items())
        yield from ("", "Translated:")
        for key, settings in self.keys.used.items():
            if key in keys:
                yield f"  {key}={_shown(keys[key])} -> {', '.join(self._typed(each) for each in settings)}"

    def _missing(self) -> str:
        files: dict[str, list[str]] = {}
        for package, group in self.configuration.missing.items():
            files.setdefault(f"{group}.yaml", []).append(package)
        named = ", ".join(f"{name} ({', '.join(packages)})" for name, packages in files.items())
        kept = ", ".join(sorted({setting for settings in self.keys.not_given.values() for setting in settings}))
        base = self.overrides[0] if self.overrides[0].startswith("experiment=") else "our groups"
        stay = f"these settings are as in {base}: {kept}" if kept else "no setting needs them"
        return f"Missing beside it: {named}; {stay}"

    def _typed(self, setting: str) -> str:
        if setting in self.keys.settings:
            return f"{setting}={as_typed(self.keys.settings[setting])}"
        return setting


def translate(path: Path, conf: Path, check: Check | None = None) -> Translation:
    """Translate a file of RLinf's.

    Args:
        path: the file; groups of its ``defaults`` are looked for in its folder.
        conf: folder of the recipes' configuration.
        check: refuses, with a ``ValueError``, a configuration that a recipe would refuse.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no embodied training of RLinf's, or of a benchmark, a model or an algorithm that there is not.
    """
    keys = Keys(_with_names_of_missing_groups(read_configuration(path)))
    try:
        return _translated(keys, conf, check)
    except NotGiven as error:
        package = next(each for each in keys.configuration.missing if f"{error.key}.".startswith(f"{each}."))
        group = keys.configuration.missing[package]
        raise ValueError(
            f"{path}: {error.key} is needed, and {group}.yaml, which has it, is not beside it; copy the file into "
            "RLinf's examples/embodiment/config, or write the key into it"
        ) from error
    except ArithmeticError as error:
        raise ValueError(f"{path}: has a number that is far too large or small: {error}") from error


def _translated(keys: Keys, conf: Path, check: Check | None) -> Translation:
    _check_kind(keys)
    kind = benchmark(keys)
    family = keys.choice(f"{MODEL}model_type", FAMILIES)
    name = recipe(keys)
    read_env(keys, groups=name == "grpo")
    if "env.id" not in keys.settings:
        raise NotGiven(next(key for key, settings in keys.not_given.items() if "env.id" in settings))
    check_suite(keys)
    read_policy(keys, critic=name == "ppo")
    read_run(keys)
    read_algorithm(keys, name)
    read_optim(keys)
    placement = read_processes(keys)
    loggers = read_loggers(keys)  # whose packages may be installed elsewhere
    keys.settings["recipe"] = name
    processes = _place(keys, placement)
    account_for_the_rest(keys)

    base, overrides = _shortest(keys, name, kind, family, conf)
    chosen = [*base, *overrides]
    if check is not None:
        try:
            check(name, compose_settings(name, chosen, conf))
        except (ValueError, HydraException, OmegaConfBaseException) as error:
            path = keys.configuration.path
            raise ValueError(f"{path}: comes to what the recipe refuses: {one_line(str(error))}") from error
    placed = [f"{name}={as_typed(value)}" for name, value in keys.settings.items() if name.startswith("placement.")]
    return Translation(keys.configuration, name, (*chosen, *loggers, *placed), processes, keys)


def _check_kind(keys: Keys) -> None:
    values, path = keys.configuration.values, keys.configuration.path
    task = values.get("runner.task_type")
    if task == _EVALUATIONS or values.get("runner.only_eval") is True:
        raise ValueError(
            f"{path}: is an evaluation of RLinf's, and from-rlinf translates trainings; type python "
            "recipes/evaluate.py "
            "with an experiment that vla-recipe list has, such as experiment=libero_evaluate_openpi "
            "policy.checkpoint=FOLDER"
        )
    if task not in _TASKS:
        said = f"runner.task_type is {task!r}" if task is not None else "it has no runner.task_type"
        raise ValueError(
            f"{path}: is no embodied configuration of RLinf: {said}; from-rlinf translates task_type: embodied"
        )
    for section in ("env", "actor", "algorithm"):
        if not any(key.startswith(f"{section}.") for key in values):
            raise ValueError(f"{path}: is no embodied training of RLinf: it has no section {section}")


def _with_names_of_missing_groups(configuration: Configuration) -> Configuration:
    """Add what the names of groups say whose files are not there: which environment, and which model."""
    said: dict[str, Any] = {}
    for package, group in configuration.missing.items():
        name = group.rpartition("/")[2]
        if package in ("env.train", "env.eval") and group.startswith("env/"):
            kind = name.partition("_")[0]
            said[f"{package}.env_type"] = kind
            if kind == "robotwin":
                said[f"{package}.task_config.task_name"] = name.partition("_")[2]
            elif kind != "maniskill":
                said[f"{package}.task_suite_name"] = name
            elif name == "maniskill_put_on_plate_in_scene_25_main":
                said[f"{package}.init_params.id"] = PLATE25
    if configuration.missing.get("actor.model") in ("model/pi0", "model/pi0_5"):
        benchmark_of = {**said, **configuration.values}.get("env.train.env_type")
        pi = {"model/pi0": "pi0", "model/pi0_5": "pi05"}[configuration.missing["actor.model"]]
        said["actor.model.model_type"] = "openpi"
        said["actor.model.openpi.config_name"] = (
            f"{pi}_{'aloha_robotwin' if benchmark_of == 'robotwin' else benchmark_of}"
        )
    elif configuration.missing.get("actor.model") in ("model/openvla", "model/openvla_oft"):
        said["actor.model.model_type"] = configuration.missing["actor.model"].rpartition("/")[2]
    return dataclasses.replace(configuration, values={**said, **configuration.values})


def _place(keys: Keys, placement: Mapping[str, Any]) -> tuple[int, int]:
    """Return processes per node and nodes that the roles need, where they are not the same for all."""
    if not placement:
        return 1, 1
    numbers = [int(number) for value in placement.values() for number in re.findall(r"\d+", value)]
    nodes = keys.configuration.values.get("cluster.num_nodes", 1)
    nodes = nodes if isinstance(nodes, int) and nodes > 0 else 1
    each = math.ceil((max(numbers, default=0) + 1) / nodes)
    mentioned = [key for key in keys.configuration.values if key.startswith("cluster.component_placement.")]
    try:
        Placement.read(dict(placement), each * nodes, each)
    except ValueError as error:
        for key in mentioned:
            keys.used.pop(key, None)
        keys.remark(NONE, mentioned, f"{error}")
        return 1, 1
    parts = {role: value.split(",") for role, value in placement.items()}
    keys.settings.update({f"placement.{role}": part if len(part) > 1 else part[0] for role, part in parts.items()})
    return each, nodes


def _shortest(keys: Keys, name: str, kind: str, family: str, conf: Path) -> tuple[list[str], list[str]]:
    """Return what is chosen, an experiment or groups, and what is typed after it, so that the least is typed."""
    algorithm = _TRAINING[family]
    groups = [f"policy={family}", "sft=none", f"algo={name}_{algorithm}", f"optim={algorithm}"]
    tails = [f"eval={'heldout' if kind == 'robotwin' else 'benchmark'}"]
    worlds = [kind, "robotwin_piper"] if kind == "robotwin" else [kind]
    plain = [[f"env={world}", *groups, *tails] for world in worlds]
    same = {keys.configuration.path.stem, keys.configuration.values.get("runner.logger.experiment_name")}
    experiments = [
        experiment
        for experiment in _experiments(conf, name, worlds, family)
        if not keys.configuration.missing or _is_of(keys, _effective(name, (f"experiment={experiment}",), conf))
    ]
    candidates = [[f"experiment={experiment}"] for experiment in sorted(experiments, key=lambda each: each not in same)]
    best: tuple[int, list[str], list[str]] | None = None
    for base in [*candidates, *plain]:
        overrides = _differences(keys.settings, _effective(name, tuple(base), conf))
        typed_words = len(base) + len(overrides)
        if best is None or typed_words < best[0]:
            best = typed_words, base, overrides
    assert best is not None
    return best[1], best[2]


def _is_of(keys: Keys, found: Mapping[str, Any]) -> bool:
    """Tell whether an experiment has the task and the model that are wanted, so that it says what is not given."""
    return all(found.get(each) == keys.settings.get(each) for each in ("env.id", "policy.config_name"))


def _experiments(conf: Path, name: str, worlds: Sequence[str], family: str) -> Iterator[str]:
    """Yield the experiments of a recipe with that environment and that policy."""
    for path in sorted((conf / "experiment").glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        defaults = {key: value for entry in content.get("defaults", []) for key, value in entry.items()}
        env, policy = defaults.get("override /env"), defaults.get("override /policy")
        if content.get("recipe") == name and env in worlds and policy == family:
            yield path.stem


@functools.cache
def _effective(name: str, chosen: tuple[str, ...], conf: Path) -> dict[str, Any]:
    """Return each setting, with ``null`` replaced by what it stands for where that does not hang on the checkpoint."""
    content: Any = OmegaConf.to_container(compose_settings(name, chosen, conf), resolve=True)
    policy = content["policy"]
    fields = dataclasses.fields(get_policy_class(policy["family"]).config_class)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    policy.update({name: default for name, default in defaults.items() if name in policy and policy[name] is None})
    policy["dtype"] = policy.get("dtype") or "float32"
    if policy.get("joint_log_prob", False) is None:
        policy["joint_log_prob"] = policy["method"] == "flow_noise"
    if content["env"].get("max_episode_steps", 0) is None:
        content["env"]["max_episode_steps"] = make_env_spec(content["env"]).max_episode_steps
    found: dict[str, Any] = {f"eval.env.{name}": value for name, value in (content["eval"]["env"] or {}).items()}
    content["eval"]["env"] = content["eval"]["env"] or None
    for name, value in content.items():
        found.update(
            {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        )
    return found


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """List what has to be typed for the settings that are wanted."""
    chosen = ("recipe", "policy.family")
    if "eval.env" in wanted:
        of_evaluation = {name for name in found if name.startswith("eval.env.")}
        if of_evaluation <= wanted.keys():
            found = {**found, "eval.env": None}
        else:  # nothing stays of what an experiment has there
            found = {name: value for name, value in found.items() if name not in of_evaluation}
    names = [name for name in wanted if name not in chosen and not name.startswith("placement.")]
    names.sort(key=lambda name: name != "policy.checkpoint")
    return [f"{name}={as_typed(wanted[name])}" for name in names if not _same(wanted[name], found.get(name))]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if any(isinstance(value, (bool, str, type(None), list, tuple)) for value in (one, other)):
        return type(one) is type(other) and bool(one == other)
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


def _printable(text: str) -> str:
    """Replace what would end a comment, or hide some of it, in a file that somebody else wrote."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _shown(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:80]}..."


def _in_lines(command: Sequence[str]) -> Iterator[str]:
    """Quote words for the shell, and join the program with its first one."""
    words = [shlex.quote(word) for word in command]
    first = next(index for index, word in enumerate(words) if word.startswith("recipes/")) + 1
    yield " ".join(words[: first + 1])
    yield from words[first + 1 :]
