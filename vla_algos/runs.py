"""What every recipe does around its loop: the run's folder and seeds, environment and policy, progress bars."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from vla_algos.evaluation import EpisodeResult, EvaluationResult, evaluate
from vla_algos.imitation import clone_behaviour, record_demonstrations
from vla_algos.loggers import write_video
from vla_envs import Episode, VLAEnv, make_env
from vla_envs.errors import unknown_name
from vla_policies import SmallVLA, SmallVLAConfig, VLAPolicy, load_policy

_DEMONSTRATIONS = 1_000_000  # added to the run's seed for the initial states of demonstrations


def start_run(config: DictConfig, known: Iterable[str]) -> Path:
    """Check the configuration's top level, seed everything, and make the run's folder.

    Keys within a group are checked where they are used: each group is the keyword arguments of one function.

    Args:
        config: the composed configuration.
        known: the top-level keys that the recipe reads.

    Returns:
        The folder, which ``latest`` beside it points to, with ``config.yaml`` in it.

    Raises:
        ValueError: an unknown key.
    """
    known = list(known)
    for key in config:
        if key not in known:
            raise unknown_name("configuration key", str(key), known)
    random.seed(config.seed)
    np.random.seed(config.seed)
    torch.manual_seed(config.seed)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    folder = Path(HydraConfig.get().runtime.output_dir)
    OmegaConf.save(config, folder / "config.yaml")
    latest = folder.parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(folder.name)
    return folder


def group(config: DictConfig) -> dict:
    """A group of the configuration as keyword arguments."""
    return OmegaConf.to_container(config, resolve=True)


def demonstration_seed(seed: int, evaluation_seed: int) -> int:
    """Seed of the demonstrations' initial states: neither the training episodes' (``seed``) nor the evaluation's.

    Raises:
        ValueError: the evaluation would repeat episodes that were trained on.
    """
    demonstrations = seed + _DEMONSTRATIONS
    if evaluation_seed in (seed, demonstrations):
        raise ValueError(
            f"eval.seed={evaluation_seed} is the family of initial states that this run trains on; "
            "take another one, such as eval.seed=9000000"
        )
    return demonstrations


def make_env_and_policy(config: DictConfig) -> tuple[VLAEnv, VLAPolicy]:
    """The environment of ``config.env`` with the policy of ``config.policy``: loaded, or new for this environment."""
    settings = group(config.policy)
    checkpoint = settings.pop("checkpoint")
    policy = load_policy(checkpoint) if checkpoint else None
    chunk_size = policy.chunk_size if policy else settings["chunk_size"]
    env = make_env(**group(config.env), chunk_size=chunk_size, seed=config.seed)
    if policy is None:
        spec = env.simulator_spec
        shape = {"action_low": spec.action_low, "action_high": spec.action_high, "state_dim": spec.state_dim}
        policy = SmallVLA(SmallVLAConfig(**shape, **settings))
    return env, policy


def warm_start(env: VLAEnv, policy: SmallVLA, settings: dict, seed: int) -> None:
    """Record demonstrations in ``env`` and clone them into ``policy``, with progress bars.

    Args:
        env: whoever was collecting in it has to reset first.
        policy: trained in place.
        settings: ``episodes``, and the keyword arguments of
            :func:`~vla_algos.imitation.record_demonstrations` and :func:`~vla_algos.imitation.clone_behaviour`.
        seed: family of the demonstrations' initial states.
    """
    recording = {name: settings.pop(name) for name in ("stride", "noise", "noise_correlation", "max_steps")}
    tasks = len(env.simulator_spec.tasks)
    episodes = [Episode(n % tasks, n // tasks, seed) for n in range(settings.pop("episodes"))]
    with tqdm(total=len(episodes), desc="demonstrations", unit="episode") as bar:
        demonstrations = record_demonstrations(
            env, policy, episodes, **recording, on_episode=lambda solved: bar.update()
        )
    with tqdm(total=settings["steps"], desc="behaviour cloning", unit="step") as bar:

        def show(loss: float) -> None:
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)

        clone_behaviour(policy, demonstrations, **settings, on_step=show)


def evaluate_with_bar(
    title: str, env: VLAEnv, policy: VLAPolicy, episodes: list[Episode], **options: Any
) -> EvaluationResult:
    """:func:`~vla_algos.evaluation.evaluate` with a progress bar that shows the success so far."""
    solved = 0
    with tqdm(total=len(episodes), desc=title, unit="episode") as bar:

        def show(result: EpisodeResult) -> None:
            nonlocal solved
            solved += result.success_once
            bar.update()
            bar.set_postfix(success=f"{100 * solved / bar.n:.1f}%", refresh=False)

        return evaluate(env, policy, episodes, on_episode=show, **options)


def save_videos(folder: Path, result: EvaluationResult, fps: float = 8.0) -> list[Path]:
    """Write the recorded episodes of an evaluation as mp4, named after task, trial and outcome."""
    paths = []
    for place, frames in result.videos.items():
        episode = result.episodes[place]
        outcome = "success" if episode.success_once else "failure"
        name = f"{place:03d}_{episode.task}_trial{episode.episode.trial_id}_{outcome}.mp4"
        paths.append(write_video(folder / name, frames, fps))
    return paths
