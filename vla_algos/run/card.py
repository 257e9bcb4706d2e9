"""``vla-recipe card FOLDER EVALUATION ...``: the model card of a policy, of what its folder and evaluations say.

Nothing in it is typed by hand, nothing is uploaded: ``hf upload`` does that.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from vla_algos.evaluation import EvaluationResult
from vla_algos.files import write_atomically
from vla_algos.run.folder import policy_folder, settings_of
from vla_algos.run.provenance import read_record
from vla_algos.run.training_env import EPISODES, differences, load_training_env
from vla_common.checksums import identity
from vla_common.experiments import as_typed
from vla_common.plain import read_json
from vla_common.settings import Fraction, NonNegative, check_settings
from vla_policies.registry import inspect_policy

NAME, REPLAY = "README.md", "replay.mp4"  # which the hub plays beside the card
_OURS = "<!-- written by vla-recipe card -->"
_OF_THE_MACHINE = ("checkpoint", "family", "device")  # settings of a policy that say nothing of a result
_METRICS = {  # that are read
    "greedy": bool,
    "policy_identity": str | None,
    "eval/num_episodes": NonNegative,
    "eval/success_once": Fraction | None,
    "protocol": str | None,
    "protocol_deviations": list[str] | None,
    "differs_from_training": dict[str, tuple[Any, Any]] | None,
}
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_TEMPLATE = Path(__file__).with_name("card.md.jinja")


def write_card(
    folder: Path,
    evaluations: Sequence[Path] = (),
    *,
    repository: str = "NAME/REPOSITORY",
    base_model: str | None = None,
    license_name: str | None = None,
    force: bool = False,
) -> list[str]:
    """Write ``README.md`` into the folder of a policy, and ``replay.mp4`` if an episode of it was filmed.

    The options are those of ``vla-recipe card``. Returns lines that say what was written and what to type now.
    FileNotFoundError: there is no such folder, or a folder has no finished evaluation. FileExistsError: the folder has
    a ``README.md`` that this did not write. ValueError: no folder of a recipe, another policy's evaluation, no hub id.
    """
    folder = policy_folder(folder)
    for flag, hub_id in (("--repository", repository), ("--base-model", base_model)):
        if hub_id is not None and not _REPOSITORY.fullmatch(hub_id):
            raise ValueError(f"{flag} {hub_id}: is no hub id; type one such as openvla/openvla-7b")
    origin = load_training_env(folder)
    if origin is None:
        raise ValueError(
            f"{folder} does not say what it was trained on (environment.json); type a folder that a recipe wrote, such "
            "as runs/ppo/latest/policy"
        )
    file = folder / NAME
    if file.exists() and _OURS not in file.read_text() and not force:
        raise FileExistsError(f"{file} is there and not written by vla-recipe card; --force replaces it")
    found = [_Evaluation(evaluation, folder, origin) for evaluation in evaluations]
    facts, name = inspect_policy(folder).facts, repository.partition("/")[2]
    family = facts["family"].partition(",")[0].rpartition("(")[2].rstrip(")")  # pi0.5 of "pi0 (pi0.5)"
    env, reported = origin["env"], [each.result for each in found if each.result.metric_value is not None]
    data = ModelCardData(
        library_name="vla-torchrl",
        pipeline_tag="robotics",
        license=license_name,
        base_model=base_model,
        tags=["vla-torchrl", "robotics", "reinforcement-learning", family, env["id"].partition("/")[0]],
        model_name=name if reported else None,
        eval_results=reported or None,
    )
    training = [*protocol_lines(origin), f"{origin['chunk_size']} actions per decision"]
    said = {"ours": _OURS, "repository": repository, "name": name, "family": family, "recipe": origin["recipe"]}
    said |= {"suite": env["id"], "env": {key: json.dumps(value) for key, value in env.items()}, "facts": facts}
    video = _filmed(folder, evaluations)
    said |= {"training": training, "replay": video and video.stem}
    card = ModelCard.from_template(data, template_path=str(_TEMPLATE), evaluations=found, **said)
    if video is not None:
        write_atomically(folder / REPLAY, video.read_bytes())
    write_atomically(file, str(card))
    wrote = f"{file} and {REPLAY}" if video else f"{file}"
    return [f"wrote {wrote}. Nothing was uploaded.", f"now type: hf upload {repository} {folder} . --private"]


def _filmed(folder: Path, evaluations: Sequence[Path]) -> Path | None:
    """Find a video of a policy: of its evaluations, or of the last one by the run whose folder it lies in."""
    last = sorted((folder.resolve().parent / "videos").glob("iteration_*"))[-1:]
    for place in [*(evaluation.resolve() / "videos" for evaluation in evaluations), *last]:
        videos = [path for path in place.glob("*.mp4") if path.resolve().parent == place]  # no link
        if videos:
            return min(videos, key=lambda path: (not path.stem.endswith("_success"), path.name))
    return None


class _Evaluation:
    """A finished evaluation of ``recipes/evaluate.py``, as the card shows it; one of another policy is refused."""

    def __init__(self, folder: Path, policy: Path, origin: Mapping[str, Any]):
        self._folder, self._settings, self._metrics = folder, settings_of(folder), _read_metrics(folder, policy)
        self._eval = self._settings.get("eval") or {}
        how, name = "greedy" if self._metrics["greedy"] else "sampled", str(self._settings["env"]["id"])
        how += f", {int(self._metrics['eval/num_episodes'])} episodes"
        chosen = {key: value for key, value in self._settings["policy"].items() if value is not None}
        self._policy = {key: value for key, value in chosen.items() if key not in _OF_THE_MACHINE}
        lengths = (re.fullmatch(r"eval/success_len_(\d+)", name) for name in self._metrics)
        chain = max((int(length[1]) for length in lengths if length), default=1)
        found = EvaluationResult.load(folder, chain_length=chain, mean_of=self._eval.get("mean_of") or ())
        self.title, self.lines, self.table = f"{name}, {how}", list(self._said()), found.table()
        self.again = "".join(f" {shlex.quote(each)}" for each in self._typed(origin))
        success, differs = self._metrics["eval/success_once"], self._metrics.get("protocol_deviations")
        self.result = EvalResult(
            task_type="robotics",
            dataset_type=name,
            dataset_name=name + (", deviating from its protocol" if differs else ""),
            metric_type="success_rate",
            metric_name=f"success in % ({how})",
            metric_value=None if success is None else round(100 * success, 1),
        )

    def _said(self) -> Iterator[str]:
        yield from protocol_lines(self._metrics)
        yield f"episodes of `eval.seed={self._eval.get('seed')}`"
        yield from (f"`policy.{name}={value}`" for name, value in self._policy.items())
        differs = self._metrics.get("differs_from_training") or {}
        shown = {name: map(as_typed, each) for name, each in differs.items()}
        yield from (f"`{name}` is `{now}`, was `{then}` in training" for name, (then, now) in shown.items())
        process = (read_record(self._folder).get("processes") or [{}])[-1]
        if versions := process.get("versions"):
            yield ", ".join(f"{name} {version}" for name, version in versions.items())
        if commit := (process.get("code") or {}).get("commit"):
            yield f"vla-torchrl at {commit[:12]}" + (" with changes" if process["code"].get("changes") else "")

    def _typed(self, origin: Mapping[str, Any]) -> Iterator[str]:
        """List what is typed to evaluate so again: all that is otherwise than in the policy's training."""
        if self._policy:
            yield f"policy={self._settings['policy']['family']}"  # a file that has these settings
            yield from (f"policy.{name}={as_typed(value)}" for name, value in self._policy.items())
        env = self._settings["env"]
        for name, (_, now) in differences(origin["env"], env).items():
            yield f"env.{name}={as_typed(now)}" if name in env else f"~env.{name}"
        noted = origin.get("evaluation") or {}
        for name in EPISODES:
            if name in self._eval and noted.get(name, ...) != self._eval[name]:
                yield f"eval.{name}={as_typed(self._eval[name])}"
        if not self._metrics["greedy"]:
            yield "greedy=false"


def _read_metrics(evaluation: Path, policy: Path) -> dict[str, Any]:
    settings, file = settings_of(evaluation), evaluation / "metrics.json"
    if settings.get("recipe") != "evaluate" or not file.is_file():
        raise FileNotFoundError(
            f"{evaluation} has no finished evaluation; type the folder that vla-recipe run evaluate "
            f"policy.checkpoint={policy} names as its results"
        )
    metrics = read_json(file)
    try:
        shown = [metrics, *(settings.get(section) for section in ("env", "policy", "eval"))]
        if re.search(r"\\[nru]|\$\{", json.dumps(shown, ensure_ascii=False)):
            raise ValueError("it has line breaks or ${...}, which commands of a card must not have")
        check_settings("", {name: metrics.get(name) for name in _METRICS}, _METRICS)
        for section, name in (("env", "id"), ("policy", "family")):
            check_settings(section, {name: settings.get(section, {}).get(name)}, {name: str})
    except ValueError as error:
        raise ValueError(f"{evaluation} has no evaluation of evaluate.py ({error}); take another folder") from error
    now = identity(policy)
    if now is None or metrics.get("policy_identity") != now:
        evaluated = (settings.get("policy") or {}).get("checkpoint")
        raise ValueError(
            f"{evaluation} is no evaluation of what {policy} has now, but of {evaluated} as it was then; type: "
            f"vla-recipe run evaluate policy.checkpoint={policy}"
        )
    return metrics


def protocol_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Say what ``protocol`` and ``protocol_deviations`` of a record are."""
    if protocol := record.get("protocol"):
        yield f"protocol: {protocol}"
    deviations = [f"not the benchmark's: {text}" for text in record.get("protocol_deviations") or ()]
    yield from deviations or ["nothing differs from the benchmark's protocol"]
