"""``vla-recipe card FOLDER EVALUATION ...``: the model card of a policy, of what its folder and evaluations say.

Nothing in it is typed by hand, nothing is uploaded: ``hf upload`` does that.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vla_algos import results
from vla_algos.evaluation import EvaluationResult
from vla_algos.run.arguments import as_typed
from vla_algos.run.files import write_atomically
from vla_algos.run.folder import settings_of
from vla_algos.run.origin import EPISODES, differences, origin_of
from vla_common.checksums import identity
from vla_policies.registry import inspect_policy

NAME = "README.md"
_EVALUATE = ("vla-recipe", "run", "evaluate")
_OURS = "<!-- written by vla-recipe card -->"
_OF_THE_MACHINE = ("checkpoint", "family", "device")  # settings of a policy that say nothing of a result
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True)
class _Evaluation:
    """A finished evaluation of ``recipes/evaluate.py``, from the files of its folder."""

    folder: Path
    settings: Mapping[str, Any]
    metrics: Mapping[str, Any]
    record: Mapping[str, Any]

    @property
    def deviations(self) -> list[str]:
        return list(self.metrics.get("protocol_deviations") or [])

    @property
    def how(self) -> str:
        how = "greedy" if self.metrics["greedy"] else "sampled"
        return f"{how}, {_counted(int(self.metrics['eval/num_episodes']), 'episode')}"

    @property
    def policy(self) -> dict[str, Any]:
        """Settings of the policy that were typed and say something of the result."""
        chosen = {name: value for name, value in self.settings["policy"].items() if value is not None}
        return {name: value for name, value in chosen.items() if name not in _OF_THE_MACHINE}

    def result(self) -> EvaluationResult:
        """Read the episodes."""
        lengths = (re.fullmatch(r"eval/success_len_(\d+)", name) for name in self.metrics)
        chain = max((int(length[1]) for length in lengths if length), default=1)
        groups = (self.settings.get("eval") or {}).get("mean_of") or ()
        episodes = results.read_episodes(self.folder / results.NAME)
        return EvaluationResult(episodes, chain_length=chain, mean_of=tuple(groups))


def write_card(
    folder: Path,
    evaluations: Sequence[Path] = (),
    *,
    repository: str = "NAME/REPOSITORY",
    base_model: str | None = None,
    license_name: str | None = None,
    force: bool = False,
) -> list[str]:
    """Write ``README.md`` into the folder of a policy.

    Args:
        folder: of a policy that a recipe wrote.
        evaluations: folders of ``recipes/evaluate.py``, of this policy.
        repository: hub id that it is going to have.
        base_model: hub id of the checkpoint that training began with.
        license_name: by the hub's names, such as ``mit``.
        force: replace a ``README.md`` that is somebody else's.

    Returns:
        Lines that say what was written and what to type now.

    Raises:
        FileNotFoundError: there is no such folder, or a folder has no finished evaluation.
        FileExistsError: the folder has a ``README.md`` that this did not write.
        ValueError: not a folder of a recipe, an evaluation of another policy, or a hub id that is none.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; type that of a policy, such as runs/ppo/latest/policy")
    for flag, name in (("--repository", repository), ("--base-model", base_model)):
        if name is not None and not _REPOSITORY.fullmatch(name):
            raise ValueError(f"{flag} {name}: is no hub id; type one such as openvla/openvla-7b")
    origin = origin_of(folder)
    if origin is None:
        raise ValueError(
            f"{folder} does not say what it was trained on (environment.json); type a folder that a recipe wrote, such "
            "as runs/ppo/latest/policy"
        )
    file = folder / NAME
    if file.exists() and _OURS not in file.read_text() and not force:
        raise FileExistsError(f"{file} is there and not written by vla-recipe card; --force replaces it")
    found = [_read(evaluation, folder) for evaluation in evaluations]
    facts = inspect_policy(folder).facts
    lines = ["---", *_metadata(repository, facts, origin, found, base_model, license_name), "---", _OURS, ""]
    lines += [*_introduction(repository, facts, origin), *_training(origin), *_results(found)]
    lines += _usage(repository, origin, found)
    write_atomically(file, "\n".join(lines) + "\n")
    said = [f"wrote {file}: {_counted(len(found), 'evaluation')}. Nothing was uploaded."]
    return [*said, f"now type: hf upload {repository} {folder} . --private"]


def _read(evaluation: Path, policy: Path) -> _Evaluation:
    """Read an evaluation, and refuse one of another policy."""
    settings = settings_of(evaluation)
    file = evaluation / "metrics.json"
    if settings.get("recipe") != "evaluate" or not file.is_file():
        raise FileNotFoundError(
            f"{evaluation} has no finished evaluation; type the folder that vla-recipe run evaluate "
            f"policy.checkpoint={policy} names as its results"
        )
    metrics = json.loads(file.read_text())
    now = identity(policy)
    if now is None or metrics.get("policy_identity") != now:
        evaluated = (settings.get("policy") or {}).get("checkpoint")
        raise ValueError(
            f"{evaluation} is no evaluation of what {policy} has now, but of {evaluated} as it was then; type: "
            f"vla-recipe run evaluate policy.checkpoint={policy}"
        )
    try:
        record = json.loads((evaluation / "run.json").read_text())
    except (OSError, ValueError):
        record = {}
    return _Evaluation(evaluation, settings, metrics, record)


def _metadata(
    repository: str,
    facts: Mapping[str, str],
    origin: Mapping[str, Any],
    evaluations: Sequence[_Evaluation],
    base_model: str | None,
    license_name: str | None,
) -> list[str]:
    """Return what the hub reads."""
    benchmark = origin["env"]["id"].partition("/")[0]
    family = _family(facts)
    metadata: dict[str, Any] = {"library_name": "vla-torchrl", "pipeline_tag": "robotics"}
    metadata |= {"license": license_name} if license_name else {}
    metadata |= {"base_model": base_model} if base_model else {}
    metadata["tags"] = ["vla-torchrl", "robotics", "reinforcement-learning", family, benchmark]
    results = []
    for each in evaluations:
        value, name = each.metrics["eval/success_once"], str(each.settings["env"]["id"])
        if value is not None:
            differs = ", deviating from its protocol" if each.deviations else ""
            metric = {"type": "success_rate", "name": f"success in % ({each.how})", "value": round(100 * value, 1)}
            data = {"name": f"{name}{differs}", "type": name}
            results.append({"task": {"type": "robotics"}, "dataset": data, "metrics": [metric]})
    if results:
        metadata["model-index"] = [{"name": repository.partition("/")[2], "results": results}]
    return str(yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=1000)).splitlines()


def _introduction(repository: str, facts: Mapping[str, str], origin: Mapping[str, Any]) -> Iterator[str]:
    where = f"`{origin['env']['id']}`"
    yield from (f"# {repository.partition('/')[2]}", "")
    yield f"A policy of the family {_family(facts)} for {where}, trained by `{origin['recipe']}` of vla-torchrl."
    yield from ("", "| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in facts.items()))


def _training(origin: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## What it was trained on", "")
    yield from _protocol(origin.get("protocol"), origin.get("protocol_deviations") or [])
    yield f"- {_counted(origin['chunk_size'], 'action')} per decision"
    yield from ("", "| setting of the environment | |", "|---|---|")
    yield from (f"| `{name}` | `{json.dumps(value)}` |" for name, value in origin["env"].items())


def _results(evaluations: Sequence[_Evaluation]) -> Iterator[str]:
    yield from ("", "## Results", "")
    if not evaluations:
        yield "It was not evaluated."
    for number, each in enumerate(evaluations):
        yield from ([""] * bool(number))
        yield from (f"### {each.settings['env']['id']}, {each.how}", "")
        yield from _protocol(each.metrics.get("protocol"), each.deviations)
        yield f"- episodes of `eval.seed={(each.settings.get('eval') or {}).get('seed')}`"
        yield from (f"- `policy.{name}={value}`" for name, value in each.policy.items())
        differs = each.metrics.get("differs_from_training") or {}
        yield from (f"- `{name}` is `{now}`, was `{then}` in training" for name, (then, now) in differs.items())
        yield from (f"- {text}" for text in _software(each.record))
        yield from ("", "```text", each.result().table(), "```")


def _usage(repository: str, origin: Mapping[str, Any], evaluations: Sequence[_Evaluation]) -> Iterator[str]:
    """Say how to repeat the evaluations; without any, how to evaluate as it was trained."""
    name = repository.partition("/")[2]
    yield from ("", "## Evaluate it", "", "```bash", f"hf download {repository} --local-dir {name}")
    for each in evaluations:
        yield f"# {each.settings['env']['id']}, {each.how}"
        yield shlex.join([*_EVALUATE, f"policy.checkpoint={name}", *_again(origin, each)])
    if not evaluations:
        yield shlex.join([*_EVALUATE, f"policy.checkpoint={name}"])
    yield "```"


def _again(origin: Mapping[str, Any], evaluation: _Evaluation) -> Iterator[str]:
    """List what is typed to evaluate so again: all that is otherwise than in the policy's training."""
    settings = evaluation.settings
    if policy := evaluation.policy:
        yield f"policy={settings['policy']['family']}"  # a file that has these settings
        yield from (f"policy.{name}={as_typed(value)}" for name, value in policy.items())
    for name, (_, now) in differences(origin["env"], settings["env"]).items():
        yield f"env.{name}={as_typed(now)}" if name in settings["env"] else f"~env.{name}"
    noted = origin.get("evaluation") or {}
    for name in EPISODES:
        if name in (settings.get("eval") or {}) and noted.get(name, ...) != settings["eval"][name]:
            yield f"eval.{name}={as_typed(settings['eval'][name])}"
    if not evaluation.metrics["greedy"]:
        yield "greedy=false"


def _protocol(protocol: str | None, deviations: Sequence[str]) -> Iterator[str]:
    if protocol:
        yield f"- protocol: {protocol}"
    yield from (f"- not the benchmark's: {text}" for text in deviations)
    if not deviations:
        yield "- nothing differs from the benchmark's protocol"


def _software(record: Mapping[str, Any]) -> Iterator[str]:
    processes = record.get("processes") or [{}]
    versions, code = processes[-1].get("versions") or {}, processes[-1].get("code") or {}
    if versions:
        yield ", ".join(f"{name} {version}" for name, version in versions.items())
    if code.get("commit"):
        yield f"vla-torchrl at {code['commit'][:12]}" + (" with changes" if code.get("changes") else "")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _family(facts: Mapping[str, str]) -> str:
    """Return ``pi0.5`` of ``pi0 (pi0.5)``."""
    return facts["family"].partition(",")[0].rpartition("(")[2].rstrip(")")
