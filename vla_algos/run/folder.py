"""The folder of a run: which run it has, and what came of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf

from vla_algos import parallel
from vla_algos.run.provenance import record_result, record_start
from vla_algos.run.seeds import seed_everything


def begin_folder(config: SimpleNamespace, folder: Path) -> None:
    """Seed everything, and write ``config.yaml`` and ``run.json`` into the run's folder.

    A folder that has a run in it already is resumed, if it is the same run.

    Args:
        config: the settings; ``resume`` says what to do with a folder that has a run in it.
        folder: of the run.

    Raises:
        ValueError: the folder has a run of other settings.
    """
    seed_everything(config.seed)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(parallel.cores())
    if hasattr(config, "resume"):
        _check_same_run(config, folder)
    parallel.barrier()  # they have read what is written now
    if parallel.is_main():
        OmegaConf.save(OmegaConf.create(_plain(config)), folder / "config.yaml")
        record_start(folder)


def finish_folder(folder: Path, metrics: Mapping[str, float], seconds: float) -> None:
    """Note what came of a run, and let ``latest`` beside its folder point to it: the newest that has finished."""
    if not parallel.is_main():
        return
    record_result(folder, {"seconds": seconds, "metrics": dict(metrics)})
    link = folder.parent / f".latest_{folder.name}"  # renamed into place, so that runs may finish together
    link.symlink_to(folder.name)
    link.replace(folder.parent / "latest")


def _check_same_run(config: SimpleNamespace, folder: Path) -> None:
    started = (folder / "config.yaml").is_file() and any((folder / "checkpoints").glob("step_*"))
    if not started or config.resume == "force":
        return
    if config.resume == "never":
        raise ValueError(f"{folder} has a run in it, and resume=never; take another folder: hydra.run.dir=...")
    before, now = _flat(OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))), flat_settings(config)
    keys = [key for key in before.keys() | now.keys() if key != "resume" and not key.startswith("launcher.")]
    other = sorted(key for key in keys if before.get(key) != now.get(key))
    if other:
        shown = "\n".join(f"  {key}: {before.get(key)!r} there, {now.get(key)!r} now" for key in other)
        raise ValueError(
            f"{folder} has a run of other settings:\n{shown}\n  Take another folder (hydra.run.dir=...), or resume it "
            "with the new settings: resume=force"
        )


def flat_settings(config: SimpleNamespace) -> dict[str, Any]:
    """List settings by dotted name."""
    return _flat(_plain(config))


def _plain(config: SimpleNamespace) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(config).items()}


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    """List settings by dotted name."""
    if not isinstance(node, dict):
        return {path: node}
    return {
        key: value
        for name, part in node.items()
        for key, value in _flat(part, f"{path}.{name}" if path else str(name)).items()
    }
