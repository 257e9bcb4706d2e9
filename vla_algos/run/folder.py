"""The folder of a run: which run it has, and what came of it."""

import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from filelock import FileLock
from omegaconf import OmegaConf
from tqdm import tqdm

from vla_algos import distributed, files
from vla_algos.run.checkpoints import checkpoints
from vla_algos.run.provenance import differences, read_record, record_result, record_start
from vla_common.plain import read_yaml
from vla_common.settings import check_settings

_OF_PROCESSES = ("sharding.shards", "sharding.reshard_after_forward", "sharding.cpu_offload", "offload.", "placement.")
_TYPES = {"recipe": str, "greedy": bool, **dict.fromkeys(("env", "policy", "eval"), dict[str, Any])}  # that are read
_EVAL = {"mean_of": list[str], "env": dict[str, Any] | None}
_FIXED = ("seed", "env.id", "env.group_size", "group_size", "episode_order")
_KEPT = ("policy.checkpoint", "policy.num_steps", "steering.", "replay.gamma", "replay.n_steps", "loss.")  # of a replay
_LEFTOVERS = (".unfinished_*", ".old_*", "videos/**/.unfinished_*")  # Saver has those of checkpoints


def open_folder(config: SimpleNamespace, folder: Path) -> FileLock | None:
    """Lock the run's folder; nothing of a run that it has already is changed yet. Of several processes the first locks.

    ``config.resume`` says what to do with a folder that has a run in it. ValueError: the folder has a run of other
    settings, or something else in it. FolderInUse: another process writes into the folder.
    """
    lock, refusal = None, None
    if distributed.is_main():
        try:
            files.check_links(folder)  # before the lock is written
            lock = files.lock_folder(folder)
            check_folder(config, folder)
        except (files.FolderInUse, ValueError) as error:
            refusal = error
    refusal = distributed.broadcast_object(refusal)
    if refusal is None:
        return lock
    if lock is not None:
        lock.release()
    raise refusal


def settle_auto(config: SimpleNamespace, folder: Path) -> None:
    """Replace a setting ``auto`` of the policy by what the run in the folder has, so that it resumes as it began.

    A checkpoint has its own: ``None``. In a new run it stays until
    :func:`~vla_algos.run.policies.make_run_policy` notes what it became.
    """
    began = settings_of(folder).get("policy")
    for name in [name for name, value in config.policy.items() if value == "auto"]:
        if config.policy.get("checkpoint"):
            config.policy[name] = None
        elif isinstance(began, dict):
            config.policy[name] = began.get(name, "auto")


def check_folder(config: SimpleNamespace, folder: Path) -> None:
    """Refuse (ValueError) a folder that a run of these settings cannot have; it is not changed."""
    files.check_links(folder)
    if above := next((each for each in folder.absolute().parents if (each / "run.json").is_file()), None):
        raise ValueError(
            f"{folder} is inside of the run {above}, which replaces its folders; take another: hydra.run.dir=..."
        )
    if (folder / "policy").is_dir() and not checkpoints(folder / "checkpoints"):
        raise ValueError(
            f"{folder} has the policy of a run whose checkpoints are gone: it would begin again and overwrite it; take "
            f"another folder (hydra.run.dir=...), or remove {folder / 'policy'}"
        )
    if not (folder / "config.yaml").is_file():
        return
    settle_auto(config, folder)
    before, now = flat(settings_of(folder)), flat(plain(config))
    advice = "take another folder: hydra.run.dir=..."
    if (recipe := before.get("recipe", config.recipe)) != config.recipe:
        raise ValueError(f"{folder} is of the recipe {recipe}, not {config.recipe}; take another: hydra.run.dir=...")
    if not hasattr(config, "resume"):
        if (folder / "metrics.json").exists():
            raise ValueError(f"{folder} has a finished evaluation in it; {advice}")
    else:
        steps = [int(path.name.removeprefix("step_")) for path in checkpoints(folder / "checkpoints")]
        setting, planned = _planned(config)
        if planned < max(steps, default=0):
            raise ValueError(
                f"{folder} has done {max(steps)}, more than {setting}={planned}: type {setting}={max(steps)} or more, "
                "or take another folder: hydra.run.dir=..."
            )
        if not steps:
            return
        if config.resume == "never":
            raise ValueError(f"{folder} has a run in it, and resume=never; {advice}")
    if not before:
        tqdm.write(f"{folder / 'config.yaml'} could not be read, so that nothing tells whether its settings were these")
        return
    other = _other(config, before, now)
    fixed = [name for name in other if name.startswith(_FIXED + (_KEPT if hasattr(config, "replay") else ()))]
    if getattr(config, "resume", None) == "force":
        other = fixed
    elif hasattr(config, "resume") and not fixed:
        advice = "take another folder (hydra.run.dir=...), or resume it with the new settings: resume=force"
    if other:
        shown = "\n".join(f"  {key}: {before.get(key)!r} there, {now.get(key)!r} now" for key in other)
        raise ValueError(f"{folder} has a run of other settings:\n{shown}\n  {advice}")


def note_start(config: SimpleNamespace, folder: Path, facts: Mapping[str, Any] | None = None) -> None:
    """Write ``config.yaml``, if it differs, and this process into ``run.json``.

    What a process left behind that was killed while writing is removed. ``facts`` are entries of ``run.json``.
    """
    if not distributed.is_main():
        return
    for pattern in _LEFTOVERS:
        for path in folder.glob(pattern):
            files.remove(path)
    files.write_atomically(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(plain(config))))
    record_start(folder, facts or {})


def say_what_differs(folder: Path) -> None:
    """Say in one line that a run is resumed by other code or versions than it had."""
    if not distributed.is_main():
        return
    with contextlib.suppress(OSError):
        if found := differences(folder):
            print(f"resumed with other code or versions, numbers may differ from here on: {'; '.join(found)}")


def finish_folder(folder: Path, metrics: Mapping[str, float], seconds: float, facts: Mapping[str, Any]) -> None:
    """Note what came of a run, and let ``latest`` beside its folder point to it: the newest that has finished."""
    if not distributed.is_main():
        return
    record_result(folder, {"seconds": seconds, **facts, "metrics": files.finite_or_none(metrics)})
    latest = folder.parent / "latest"
    try:
        files.link_atomically(latest, folder.name)
    except OSError as error:  # the run itself is complete
        print(f"warning: the link {latest} stays as it is: {error}")


def new_folder(path: str) -> str:
    """Make a folder that was not there: ``path``, or with ``_2``, ``_3``, ... behind it. The default names are such."""
    for number in itertools.count(1):
        name = path if number == 1 else f"{path}_{number}"
        try:
            Path(name).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:  # writing into it fails with a better message
            pass
        return name
    raise AssertionError


# For hydra.run.dir in conf/: asked once per run. Two that start in one second get a folder each.
OmegaConf.register_new_resolver("new_folder", new_folder, use_cache=True, replace=True)


def _other(config: SimpleNamespace, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the settings that differ and decide what a run computes."""
    free = ["resume", "launcher.", "logger.", "train_videos."]
    free += _OF_PROCESSES if getattr(config, "resume", None) == "elastic" else ()
    keys = [key for key in before.keys() | now.keys() if not key.startswith(tuple(free))]
    return sorted(key for key in keys if before.get(key) != now.get(key))


def _planned(config: SimpleNamespace) -> tuple[str, int]:
    """Return how long a run is to be, and the setting that says it."""
    if hasattr(config, "iterations"):
        return "iterations", config.iterations
    return "cloning.steps", getattr(config, "cloning", {"steps": 1_000_000})["steps"]


def what_finished(config: SimpleNamespace, folder: Path) -> str:
    """Say what a folder has where this very run is complete in it; otherwise nothing."""
    record = read_record(folder)
    if not hasattr(config, "resume") or "finished" not in record or not (folder / "policy").is_dir():
        return ""
    other = _other(config, flat(settings_of(folder)), flat(plain(config)))
    if other or (config.resume == "force" and "ended" in record):
        return ""  # resume=force: it is to continue
    success = record.get("metrics", {}).get("eval/success_once")
    result = "" if success is None else f" with eval/success_once {success:.3f}"
    setting, planned = _planned(config)
    return (
        f"{folder} has this run already: it finished {record['finished']}{result}, and its policy is "
        f"{folder / 'policy'}. To train it further type {setting}=..., more than {planned}, and resume=force"
    )


def policy_folder(folder: Path) -> Path:
    """Return the folder of a run's policy, or ``folder`` itself, which is one; ``FileNotFoundError`` if not there."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; type that of a run or a policy, such as runs/ppo/latest")
    return folder / "policy" if (folder / "policy").is_dir() else folder


def settings_of(folder: Path) -> dict[str, Any]:
    """Read ``config.yaml``, which may be a stranger's; nothing where it is empty, broken, or of no run."""
    try:
        found = {str(name): value for name, value in read_yaml(folder / "config.yaml").items()}
        check_settings("", {name: found[name] for name in _TYPES if name in found}, _TYPES)
        evaluation = found.get("eval", {})
        check_settings("eval", {name: evaluation[name] for name in _EVAL if name in evaluation}, _EVAL)
    except (OSError, ValueError, AttributeError):
        return {}
    return found


def plain(config: SimpleNamespace) -> dict[str, Any]:
    """Return settings and sections as dictionaries."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(config).items()}


def flat(node: Any, path: str = "") -> dict[str, Any]:
    """List settings by dotted name."""
    if not isinstance(node, dict):
        return {path: node}
    parts = (flat(part, f"{path}.{name}" if path else str(name)) for name, part in node.items())
    return {key: value for part in parts for key, value in part.items()}
