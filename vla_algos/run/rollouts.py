"""``vla-recipe rollouts``: what a policy did, in an evaluation or in training, as a data set of LeRobot."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import DatasetCardData
from tqdm import tqdm

from vla_algos.files import write_folder_atomically
from vla_algos.lerobot.dataset import PARQUET, needs
from vla_algos.lerobot.writer import LeRobotWriter
from vla_algos.results import NAME, TRAINED, EpisodeResult, files_of, read_episodes, read_training
from vla_algos.run.card import NAME as CARD
from vla_algos.run.card import protocol_lines
from vla_algos.run.folder import settings_of
from vla_algos.run.merging import check_free
from vla_common.keys import SUCCESS, TASK_ID, TRIAL_ID
from vla_common.settings import check_settings
from vla_envs import EpisodeQueue, SimulatorSpec, VLAEnv, make_env
from vla_envs.actions import refuse_actions
from vla_envs.make import env_types
from vla_envs.registry import find_benchmark
from vla_envs.replay import Visit

CAMERA, WRIST = "observation.images.image", "observation.images.wrist_image{}"


def write_rollouts(evaluation: Path, to: Path, *, only_success: bool = False) -> Iterator[str]:
    """Write the episodes of a folder of ``evaluate.py``, or of a training run, into a new folder.

    They are simulated once more and drawn before each action; those that crashed are left out. Yields lines that say
    what was written. The folder, which may be a stranger's, is read as data. FileExistsError: ``to`` is there.
    FileNotFoundError: no episodes are there. ValueError: it has no actions, or an episode goes another way than it did:
    nothing is written. ModuleNotFoundError: pyarrow is not installed.
    """
    check_free(to)
    settings = settings_of(evaluation)
    trained = files_of(evaluation / TRAINED)
    if "env" not in settings or not (trained or (evaluation / NAME).is_file()):
        raise FileNotFoundError(
            f"{evaluation}: no evaluation is here; type the folder of one, such as runs/evaluate/latest, or of a "
            "training with train_videos.keep_actions=true"
        )
    results = read_training(evaluation / TRAINED) if trained else read_episodes(evaluation / NAME)
    results = [each for each in results if not each.crashed]
    wanted = [each for each in results if each.success_once or not only_success]
    if not wanted:
        raise ValueError(f"{evaluation}: {'none of its episodes was solved' if results else 'it has no episodes'}")
    if any(each.actions is None for each in wanted):
        raise ValueError(
            f"{evaluation} has no actions: its episodes are chunks that are one motion, or of an older version"
        )
    needs(to, *PARQUET)
    env_settings, types = settings["env"], env_types(settings["env"].get("id", ""))
    check_settings("env", env_settings, types)
    for name in (each for each in find_benchmark(env_settings["id"])[0].unseen if types[each] == str | None):
        if env_settings.get(name):
            raise ValueError(
                f"{evaluation / 'config.yaml'}: env.{name}={env_settings[name]} may be code of a stranger; if it is "
                "yours write null there, and name it by the variable of docs/environments.md"
            )
    to.parent.mkdir(parents=True, exist_ok=True)
    own = settings.get("policy", {})
    policy = str(evaluation if trained else own.get("checkpoint") or own.get("url") or "")
    with contextlib.closing(make_env(**env_settings, chunk_size=1, episodes=EpisodeQueue())) as env:
        write_folder_atomically(to, lambda folder: _write(env, wanted, folder, policy))
    frames, solved = sum(each.episode_len for each in wanted), sum(each.success_once for each in wanted)
    yield f"wrote {len(wanted):,} episodes with {frames:,} frames, {solved:,} of them solved, to {to}"
    yield f"now type: vla-recipe run sft env=NAME demonstrations.folder={to}, with the environment of {evaluation}"
    yield f"or: hf upload NAME/SET {to} . --repo-type dataset --private"


def _write(env: VLAEnv, results: list[EpisodeResult], folder: Path, policy: str) -> None:
    spec, waiting, due = env.simulator_spec, dict[int, dict[str, Any]](), 0
    count, *size = spec.wrist_image_shape or (0, 0, 0)
    cameras = {CAMERA: spec.image_shape, **{WRIST.format(number): (size[0], size[1]) for number in range(count)}}
    assert spec.control_frequency is not None  # otherwise no actions were kept
    visits = [Visit(number, each.episode, [_actions(each, spec)]) for number, each in enumerate(results)]
    writer = LeRobotWriter(folder, spec.control_frequency, cameras, spec.id)
    with tqdm(total=len(visits), desc="rollouts", unit="episode") as bar:

        def write(answer: tuple[int, dict[str, Any]]) -> None:
            nonlocal due
            waiting[answer[0]] = answer[1]
            while due in waiting:
                result, episode = results[due], waiting.pop(due)
                if bool(episode[SUCCESS].any()) != result.success_once:
                    raise ValueError(f"{result.name} goes another way than it did: nothing is written")
                identity = {name: getattr(result.episode, name) for name in (TASK_ID, TRIAL_ID, "seed")}
                facts = {**identity, "success": result.success_once, "policy": policy}
                writer.append(episode, visits[due].chunks[0], facts)
                due += 1
            bar.update()

        env.pool.map("vla_envs.replay:replay", visits, on_result=write)
    writer.finish()
    (folder / CARD).write_text(_card(spec, results, policy))


def _card(spec: SimulatorSpec, results: list[EpisodeResult], policy: str) -> str:
    """Return the hub's card of a data set."""
    data = DatasetCardData(
        task_categories=["robotics"],
        tags=["LeRobot", "vla-torchrl", spec.id.partition("/")[0]],
        configs=[{"config_name": "default", "data_files": "data/*/*.parquet"}],
    )
    tasks = Counter((each.task, each.success_once) for each in results)
    author = f"`{policy}`" if policy else "a scripted expert"
    lines = [f"# {spec.id}", "", f"What {author} has done, written by `vla-recipe rollouts`.", ""]
    lines += [f"- {text}" for text in protocol_lines(vars(spec))]
    lines += ["", "| task | solved | of episodes |", "|---|---|---|"]
    for name in dict.fromkeys(each.task for each in results):
        lines.append(f"| {name} | {tasks[name, True]} | {tasks[name, True] + tasks[name, False]} |")
    return "\n".join(["---", data.to_yaml(), "---", "", *lines, ""])


def _actions(result: EpisodeResult, spec: SimulatorSpec) -> np.ndarray:
    """Return what was executed, float32 ``[L, A]``; a ValueError if it is nothing of that kind."""
    try:
        actions = np.array(result.actions, np.float32)
        if actions.shape != (result.episode_len, spec.action_dim):
            raise ValueError(f"{result.episode_len} of {spec.action_dim} numbers are wanted, not {actions.shape}")
        refuse_actions(spec, actions)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{result.name}: its actions are none of {spec.id}: {error}") from None
    return actions
