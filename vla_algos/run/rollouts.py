"""``vla-recipe rollouts``: what a policy did in an evaluation as a data set of LeRobot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vla_algos.files import write_folder_atomically
from vla_algos.lerobot.dataset import PARQUET, needs
from vla_algos.lerobot.writer import LeRobotWriter
from vla_algos.results import NAME, EpisodeResult, read_episodes
from vla_algos.run.folder import settings_of
from vla_algos.run.merging import check_free
from vla_common.keys import TASK_ID, TRIAL_ID
from vla_envs import EpisodeQueue, VLAEnv, make_env
from vla_envs.replay import Visit

CAMERA, WRIST = "observation.images.image", "observation.images.wrist_image{}"


def write_rollouts(evaluation: Path, to: Path, *, only_success: bool = False) -> Iterator[str]:
    """Write the episodes of a folder of ``evaluate.py`` into a new folder, drawn before each action.

    They are simulated once more; an episode that went another way than in the evaluation is a RuntimeError. Those that
    crashed are left out. Yields lines that say what was written.

    Raises:
        FileExistsError: ``to`` is there.
        ValueError: the folder has no actions, or the benchmark executes chunks as one motion.
        ModuleNotFoundError: pyarrow is not installed.
    """
    check_free(to)
    settings = settings_of(evaluation)
    if "env" not in settings or not (evaluation / NAME).is_file():
        raise FileNotFoundError(
            f"{evaluation}: no evaluation is here; type the folder of one, such as runs/evaluate/latest"
        )
    results = [each for each in read_episodes(evaluation / NAME) if not each.crashed]
    wanted = [each for each in results if each.success_once or not only_success]
    if not wanted:
        raise ValueError(f"{evaluation}: {'none of its episodes was solved' if results else 'it has no episodes'}")
    if any(each.actions is None for each in wanted):
        raise ValueError(
            f"{evaluation} has no actions: its episodes are chunks that are one motion, or of an older version"
        )
    needs(to, *PARQUET)
    env = make_env(**settings["env"], chunk_size=1, episodes=EpisodeQueue())
    to.parent.mkdir(parents=True, exist_ok=True)
    write_folder_atomically(to, lambda folder: _write(env, wanted, folder, settings))
    env.close()
    frames, solved = sum(each.episode_len for each in wanted), sum(each.success_once for each in wanted)
    yield f"wrote {len(wanted):,} episodes with {frames:,} frames, {solved:,} of them solved, to {to}"
    yield f"now type: vla-recipe run sft env=NAME demonstrations.folder={to}, with the environment of the evaluation"


def _write(env: VLAEnv, results: list[EpisodeResult], folder: Path, settings: dict[str, Any]) -> None:
    spec, waiting, due = env.simulator_spec, dict[int, dict[str, Any]](), 0
    count, *size = spec.wrist_image_shape or (0, 0, 0)
    cameras = {CAMERA: spec.image_shape, **{WRIST.format(number): (size[0], size[1]) for number in range(count)}}
    assert spec.control_frequency is not None  # otherwise no actions were kept
    writer = LeRobotWriter(folder, spec.control_frequency, cameras, spec.id)
    visits = [Visit(n, each.episode, [np.array(each.actions, np.float32)]) for n, each in enumerate(results)]
    with tqdm(total=len(visits), desc="rollouts", unit="episode") as bar:

        def write(answer: tuple[int, dict[str, Any]]) -> None:
            nonlocal due
            waiting[answer[0]] = dict(answer[1])
            answer[1].clear()  # the pool keeps all results to the end
            while due in waiting:
                result, episode = results[due], waiting.pop(due)
                if bool(episode["success"].any()) != result.success_once:
                    raise RuntimeError(f"{result.name} went another way than in the evaluation; nothing is written")
                identity = {name: getattr(result.episode, name) for name in (TASK_ID, TRIAL_ID, "seed")}
                facts = {**identity, "success": result.success_once, "policy": settings["policy"]["checkpoint"]}
                writer.append(episode, visits[due].chunks[0], facts)
                due += 1
            bar.update()

        env.pool.map("vla_envs.replay:replay", visits, on_result=write)
    writer.finish()
