"""What every recipe does around its loop: the run's folder and seeds, environment and policy, progress bars."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torchrl.collectors import BaseCollector
from tqdm import tqdm

from vla_algos import parallel
from vla_algos.evaluation import EpisodeResult, EvaluationResult, evaluate
from vla_algos.imitation import BehaviourCloning, check_state_noise, record_demonstrations
from vla_algos.run.config import group, parameters_of, take
from vla_algos.run.logging import write_video
from vla_algos.run.provenance import record_result, record_start
from vla_common.errors import unknown_name
from vla_envs import Episode, EpisodeSampler, SimulatorSpec, VLAEnv, evaluation_grid, make_env, make_spec
from vla_policies import VLAPolicy

OPTIM = ("lr", "value_lr", "betas", "weight_decay", "max_grad_norm", "schedule", "warmup_updates", "final_lr")
RESUME = ("auto", "force", "never")
_DEMONSTRATIONS = 1_000_000  # added to the run's seed for the initial states of demonstrations
_PROCESSES = 1_000_003  # added to it for the random numbers of each further process


def start_run(config: DictConfig, known: Iterable[str], folder: Path) -> None:
    """Check the configuration's top level, seed everything, and write ``config.yaml`` into the run's folder.

    Keys within a group are checked by :func:`vla_algos.run.config.group`. A folder that has a run in it already is gone
    on with, if it is the same run.

    Args:
        config: the composed configuration; ``resume`` says what to do with a folder that has a run in it.
        known: the top-level keys that the recipe reads.
        folder: of the run.

    Raises:
        ValueError: an unknown key, or the folder has a run of other settings.
    """
    known = list(known)
    for key in config:
        if key not in known:
            raise unknown_name("configuration key", str(key), known)
    seed_everything(config.seed)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(parallel.cores())
    if "resume" in config:
        _check_same_run(config, folder)
    parallel.wait_for_all()  # they have read what is written now
    if parallel.is_main():
        OmegaConf.save(config, folder / "config.yaml")
        record_start(folder)


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _check_same_run(config: DictConfig, folder: Path) -> None:
    if config.resume not in RESUME:
        raise unknown_name("resume", str(config.resume), RESUME, example="auto")
    started = (folder / "config.yaml").is_file() and any((folder / "checkpoints").glob("step_*"))
    if not started or config.resume == "force":
        return
    if config.resume == "never":
        raise ValueError(f"{folder} has a run in it, and resume=never; take another folder: hydra.run.dir=...")
    before, now = (_flat(OmegaConf.to_container(c)) for c in (OmegaConf.load(folder / "config.yaml"), config))
    keys = [key for key in before.keys() | now.keys() if key != "resume" and not key.startswith("launcher.")]
    other = sorted(key for key in keys if before.get(key) != now.get(key))
    if other:
        shown = "\n".join(f"  {key}: {before.get(key)!r} there, {now.get(key)!r} now" for key in other)
        raise ValueError(
            f"{folder} has a run of other settings:\n{shown}\n  Take another folder (hydra.run.dir=...), or go on with "
            "the new settings: resume=force"
        )


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    if not isinstance(node, dict):
        return {path: node}
    return {
        key: value
        for name, part in node.items()
        for key, value in _flat(part, f"{path}.{name}" if path else str(name)).items()
    }


def finish_run(folder: Path, metrics: Mapping[str, float], seconds: float) -> None:
    """Note what came of a run, and let ``latest`` beside its folder point to it: the newest that has finished."""
    if not parallel.is_main():
        return
    record_result(folder, {"seconds": seconds, "metrics": dict(metrics)})
    link = folder.parent / f".latest_{folder.name}"  # renamed into place, so that runs may finish together
    link.symlink_to(folder.name)
    link.replace(folder.parent / "latest")


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


def env_spec(config: DictConfig) -> SimulatorSpec:
    """What ``config.env`` describes; nothing is started.

    Raises:
        ValueError: an unknown name or option.
    """
    starting = parameters_of(make_env)
    return make_spec(**{key: value for key, value in config.env.items() if key == "id" or key not in starting})


def start_env(config: DictConfig, policy: VLAPolicy) -> VLAEnv:
    """The environment of ``config.env``, with the chunk length of the policy: this process's share of it.

    Raises:
        ValueError: ``env.num_envs`` cannot be shared by the processes.
    """
    settings = {**config.env, "num_envs": parallel.share(config.env.num_envs, "env.num_envs")}
    if settings.get("num_workers") is None:
        settings["num_workers"] = min(settings["num_envs"], parallel.cores())
    episodes = training_episodes(config, env_spec(config), settings.get("group_size", 1))
    return make_env(**settings, chunk_size=policy.chunk_size, episodes=episodes)


def training_episodes(config: DictConfig, spec: SimulatorSpec, group_size: int) -> EpisodeSampler:
    """This process's share of the training episodes of ``config.seed``, in the order ``config.episode_order``."""
    return EpisodeSampler(
        spec,
        config.seed,
        mode=config.get("episode_order", "random"),
        group_size=group_size,
        rank=parallel.rank(),
        world_size=parallel.world_size(),
    )


def begin_together(policy: VLAPolicy, seed: int) -> None:
    """Give all processes the weights of the first one, and each its own random numbers from here on."""
    parallel.broadcast(parameter.data for parameter in policy.parameters() if parameter.requires_grad)
    for buffer, value in zip(policy.buffers(), parallel.from_main([b.cpu() for b in policy.buffers()]), strict=True):
        buffer.copy_(value)
    own_random_numbers(seed)


def own_random_numbers(seed: int) -> None:
    """From here on each process draws its own; alone, a process goes on with those that it has."""
    if not parallel.is_main():
        seed_everything(seed + _PROCESSES * parallel.rank())


def progress_bar(title: str, total: int, unit: str, initial: int = 0) -> tqdm:
    """A progress bar, shown by the first process."""
    return tqdm(total=total, initial=initial, desc=title, unit=unit, disable=not parallel.is_main())


def demonstrate(env: VLAEnv, policy: VLAPolicy, seed: int, recording: dict) -> TensorDict:
    """:func:`~vla_algos.imitation.record_demonstrations` of ``env``'s tasks in turn, with a progress bar.

    Args:
        env: whoever was collecting in it has to reset first.
        policy: whose instructions and chunks they are for.
        seed: family of the demonstrations' initial states.
        recording: ``episodes``, their number, and further settings of it.
    """
    tasks = len(env.simulator_spec.tasks)
    episodes = [Episode(n % tasks, n // tasks, seed) for n in range(recording["episodes"])]
    with progress_bar("demonstrations", len(episodes), "episode") as bar:
        return record_demonstrations(
            env, policy, **{**recording, "episodes": episodes}, on_episode=lambda solved: bar.update()
        )


def warm_start(env: VLAEnv, policy: VLAPolicy, seed: int, recording: dict, cloning: dict) -> None:
    """:func:`demonstrate` and clone the demonstrations into ``policy``: ``recipes/sft.py`` within another recipe.

    Args:
        env, seed, recording: see :func:`demonstrate`.
        policy: trained in place.
        cloning: settings of :class:`~vla_algos.imitation.BehaviourCloning`.
    """
    learner = BehaviourCloning(policy, demonstrate(env, policy, seed, recording), **cloning)
    with progress_bar("behaviour cloning", cloning["steps"], "step") as bar:
        for _ in range(cloning["steps"]):
            bar.set_postfix(loss=f"{learner.step():.3f}", refresh=False)
            bar.update()


def warm_start_settings(config: DictConfig, spec: SimulatorSpec) -> tuple[dict, dict]:
    """The two halves of ``config.sft`` for :func:`warm_start` on ``spec``.

    Raises:
        ValueError: a setting that nobody reads, or noise for other states.
    """
    cloning = group(config, "sft", record_demonstrations, BehaviourCloning)
    if "state_noise" in cloning:
        check_state_noise(cloning["state_noise"], spec.state_dim)
    return take(cloning, record_demonstrations), cloning


def evaluation_settings(config: DictConfig, spec: SimulatorSpec, *also: str) -> tuple[list[Episode], dict]:
    """The grid of ``config.eval``, and its other settings.

    Args:
        config: ``eval`` has ``trials``, ``repeats`` and ``seed`` of the grid and ``videos``, episodes to film.
        spec: what is evaluated on.
        *also: further settings that the recipe reads.
    """
    settings = group(config, "eval", also=["trials", "repeats", "seed", "videos", *also])
    grid = evaluation_grid(spec, *(settings.pop(name) for name in ("trials", "seed", "repeats")))
    return grid, settings


def evaluate_share(
    title: str, env: VLAEnv, policy: VLAPolicy, episodes: list[Episode], *, record: int = 0, **options: Any
) -> EvaluationResult:
    """:func:`~vla_algos.evaluation.evaluate` this process's share of a grid, with a bar that shows the success so far.

    :func:`whole_evaluation` puts the shares together.
    """
    rank, processes = parallel.rank(), parallel.world_size()
    own = episodes[rank::processes]
    solved = 0
    with progress_bar(title, len(own), "episode") as bar:

        def show(result: EpisodeResult) -> None:
            nonlocal solved
            solved += result.success_once
            bar.update()
            bar.set_postfix(success=f"{100 * solved / max(1, bar.n):.1f}%", refresh=False)

        filmed = len(range(rank, record, processes))
        return evaluate(env, policy, own, on_episode=show, record=filmed, **options)


def whole_evaluation(share: EvaluationResult) -> EvaluationResult:
    """The result of an evaluation that each process has done its :func:`evaluate_share` of."""
    return EvaluationResult.interleaved(parallel.gather_objects(share))


def share_of_test(
    title: str, env: VLAEnv, policy: VLAPolicy, episodes: list[Episode], settings: dict
) -> dict[str, EvaluationResult]:
    """Evaluate while training: the greedy policy, filmed, and the sampled one if ``settings`` ask for it.

    Returns:
        This process's share of the results, by the prefix of their metrics.
    """
    results = {"eval": evaluate_share(title, env, policy, episodes, record=settings["videos"])}
    if settings["sampled"]:
        results["eval_sampled"] = evaluate_share(f"{title}, sampled", env, policy, episodes, greedy=False)
    return results


def whole_test(shares: dict[str, EvaluationResult], videos: Path) -> tuple[str, dict[str, float]]:
    """Put the shares of :func:`share_of_test` together, and write the videos.

    Returns:
        The table of the greedy result, and the metrics of both under ``eval/`` and ``eval_sampled/``.
    """
    results = {prefix: whole_evaluation(share) for prefix, share in shares.items()}
    save_videos(videos, results["eval"])
    metrics = {name: value for prefix, result in results.items() for name, value in result.metrics(prefix).items()}
    return results["eval"].table(), metrics


def summarise(
    algorithm: str,
    folder: Path,
    setting: str,
    tests: Sequence[tuple[str, dict[str, float]]],
    speed: float,
    seconds: float,
) -> None:
    """Print what a training run did and where everything is.

    Args:
        algorithm: its name.
        folder: of the run.
        setting: see :func:`describe`.
        tests: what :func:`whole_test` returned, first and last of them.
        speed: environment steps per second in training.
        seconds: the run took.
    """
    print(f"\n{setting}")
    for when, (table, metrics) in zip(("before", "after"), (tests[0], tests[-1]), strict=True):
        print(f"\n{when} {algorithm}\n{table}")
        if "eval_sampled/success_once" in metrics:
            print(f"sampled: {100 * metrics['eval_sampled/success_once']:.1f}%")
    rows = {
        "time": f"{seconds / 60:.1f} minutes, {speed:.0f} env steps/s in training (median)",
        "policy": folder / "policy",
        "checkpoints": folder / "checkpoints",
        "curves": f"tensorboard --logdir {folder}   (and {folder / 'metrics.jsonl'})",
        "videos": folder / "videos",
    }
    print()
    for name, value in rows.items():
        print(f"{name:<12} {value}")


def collector_stats(collector: BaseCollector) -> dict[str, float]:
    """The counters of a collector over all processes: frames and restarts add up, of the rest the largest counts."""
    everybodys = parallel.gather_objects(collector.stats())
    return {
        name: sum(stats[name] for stats in everybodys)
        if name in ("frames", "requested_frames_per_batch", "env/worker_restarts")
        else max(stats[name] for stats in everybodys)
        for name in everybodys[0]
    }


def show_iteration(bar: tqdm, iteration: int, metrics: Mapping[str, float]) -> None:
    """Success and speed beside the progress bar, and as a line in the log of a SLURM job."""
    success = 100 * metrics.get("env/success_once", float("nan"))
    text = f"success {success:.0f}%, {metrics['env_steps_per_s']:.0f} env steps/s"
    bar.set_postfix_str(text)
    if "SLURM_JOB_ID" in os.environ:
        print(f"iteration {iteration} of {bar.total}: {text}", flush=True)


def describe(spec: SimulatorSpec) -> str:
    """Name of a suite and whatever departs from the benchmark's own protocol, for printing beside a result."""
    return "\n".join([spec.id, *(f"  not the benchmark's: {departure}" for departure in spec.departures)])


def describe_policy(policy: VLAPolicy) -> str:
    """How large a policy is and how much of it learns, for printing."""
    total = sum(parameter.numel() for parameter in policy.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    return f"policy of {total:,} parameters" + (f", {trained:,} of them trained" if trained < total else "")


def save_videos(folder: Path, result: EvaluationResult, fps: float = 8.0) -> list[Path]:
    """Write the recorded episodes of an evaluation as mp4, named after task, trial and outcome."""
    paths = []
    if not parallel.is_main():
        return paths
    for place, frames in result.videos.items():
        episode = result.episodes[place]
        outcome = "success" if episode.success_once else "failure"
        name = f"{place:03d}_{episode.task}_trial{episode.episode.trial_id}_{outcome}.mp4"
        paths.append(write_video(folder / name, frames, fps))
    return paths
