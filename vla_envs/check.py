"""``python -m vla_envs check NAME``: the same episode is the same bits anywhere, and a simulator does what it says."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any
from unittest import mock

import numpy as np
from gymnasium.utils.env_checker import check_env
from torchrl._utils import logger as torchrl_logger
from torchrl.envs.utils import check_env_specs

from vla_common.program import one_line
from vla_envs.gym import SimulatorEnv
from vla_envs.make import make_env
from vla_envs.registry import describe_error, get_benchmark, make_spec
from vla_envs.simulator import Episode, SimulatorSpec
from vla_envs.workers.pool import SimulatorCrash, WorkerPool

_CHUNK, _MOTION = 5, 25  # actions of a decision; where a decision is one motion
_SHOWN: tuple[str, ...] = ("images", "wrist_images", "states")
_DONE = ("rewards", "successes", "executed", "ended", "subtasks")
_CAUSES = {
    "in another process": "it depends on the process, such as its number, its clock or hash()",
    "after another episode": "reset leaves something of the episode before",
    "beside another simulator in one process": "they share something, such as a global variable",
}
_RANDOM = ("each time it is run", "something random is not drawn from the episode")
_Seen = dict[str, Any]  # one decision: what was shown, and what its actions did


def check_simulator(id: str | SimulatorSpec, *, say: Callable[[str], object] | None = None) -> tuple[str, ...]:
    """Check that a simulator keeps what the library rests on, with random actions, in worker processes.

    An episode is run to its horizon, and again in another process, after another episode, and beside another simulator:
    states, pixels, rewards and sentences have to be the same to the bit. What a simulator returns is checked against
    its description on the way. TorchRL's ``check_env_specs`` and Gymnasium's ``check_env`` come last, where all else is
    right. A simulator that raises has its traceback logged.

    Args:
        id: of :func:`~vla_envs.registry.list_envs`; a benchmark's name, for its first suite; or a ``SimulatorSpec``.
        say: called with a line for each check that is passed.

    Returns:
        What is wrong, a line each: what differs, in which episode and actions. Empty if all is well.

    Raises:
        ValueError: an unknown name, or worlds that are simulated all together (``SimulatorSpec.batched``).
        Exception: what the simulator's own ``check`` says that this machine lacks.
    """
    if isinstance(id, str) and "/" not in id:
        id = f"{id}/{next(iter(get_benchmark(id).suites()))}"
    spec, say = make_spec(id), say or (lambda _: None)
    if spec.batched:
        raise ValueError(f"{spec.id} simulates all worlds together, outside of worker processes; check it without that")
    most = max(1, spec.max_episode_steps // 2)  # two decisions: Gymnasium wants episodes of more than one
    chunk = min(_CHUNK if spec.control_frequency else _MOTION, most)
    try:
        problems = _run_episodes(spec, chunk, say)
    except SimulatorCrash as error:
        problems = [str(error)]
    checkers = {"TorchRL's check_env_specs": _check_torchrl, "Gymnasium's check_env": _check_gymnasium}
    for name, check in checkers.items() if not problems else ():
        try:
            check(spec, chunk)
            say(name)
        except Exception as error:
            problems.append(f"{spec.id}: {name}: {one_line(describe_error(error))}")
    return tuple(problems)


def _run_episodes(spec: SimulatorSpec, chunk: int, say: Callable[[str], object]) -> list[str]:
    """Run two episodes in two processes: the slots 0 and 2 are in one of them, 1 and 3 in the other."""
    episode = Episode(0, 0)
    other = Episode(len(spec.tasks) - 1, 0 if spec.initial_states == 1 else 1)
    with closing(WorkerPool(spec, 4, 2, chunk, ignore_terminations=True, step_timeout=300.0)) as pool:
        first = _play(pool, {0: episode, 1: episode})
        lengths = [_length(first[0])]
        say(f"{spec.describe(episode)}: {lengths[0]} actions, answers as described")
        _play(pool, {0: other}, decisions=1)
        again = _play(pool, {0: episode, 1: other, 3: episode})
        lengths.append(_length(again[1]))
    pairs = zip(_CAUSES, ((first[0], first[1]), (first[0], again[0]), (first[1], again[3])), strict=True)
    found = [(difference, where, _CAUSES[where]) for where, runs in pairs if (difference := _difference(*runs))]
    for where in sorted(_CAUSES.keys() - {where for _, where, _ in found}):
        say(f"the same {where}")
    if len(found) == len(_CAUSES):
        found = [(found[0][0], *_RANDOM)]
    problems = [f"{spec.describe(episode)}: {what} {where}: {cause}" for what, where, cause in found]
    if spec.chain_length == 1 and lengths[0] == lengths[1] < spec.max_episode_steps:
        ends = f"{spec.id}: episodes end by themselves after {lengths[0]} actions"
        if len(spec.tasks) > 2:  # others may be longer
            say(f"{ends}, those of other tasks have to go on to max_episode_steps={spec.max_episode_steps}")
        else:
            problems.append(f"{ends}, not {spec.max_episode_steps}; type max_episode_steps={lengths[0]}")
    return problems


def _play(pool: WorkerPool, episodes: Mapping[int, Episode], decisions: float = math.inf) -> dict[int, list[_Seen]]:
    """Run an episode in each of some slots, all with the same actions, to its end; returns what came of it by slot."""
    spec, size, random = pool.spec, pool.arrays.actions.shape[1], np.random.default_rng(0)
    seen: dict[int, list[_Seen]] = {slot: [] for slot in episodes}
    pool.reset(episodes)
    running, lost, names, when = list(episodes), list(pool.unstarted & episodes.keys()), _SHOWN, 0
    while True:
        for slot in lost:
            where = f"decision {when}, of {size} actions" if when else "reset"
            raise SimulatorCrash(f"{pool.errors[slot].partition(': ')[2]}, in {where}")
        for slot in running:
            now = {name: getattr(pool.arrays, name)[slot].copy() for name in names}
            seen[slot].append({**now, "sentence": pool.texts[slot]})
        over = {slot for slot in running if any(each["ended"].any() for each in seen[slot][1:])}
        running = [slot for slot in running if slot not in over and _length(seen[slot]) < spec.max_episode_steps]
        if not running or when == decisions:
            return seen
        pool.arrays.actions[:] = random.uniform(spec.action_low, spec.action_high, (size, spec.action_dim))
        lost, names, when = pool.step(running), (*_SHOWN, *_DONE), when + 1


def _length(seen: Sequence[_Seen]) -> int:
    return sum(int(each["executed"].sum()) for each in seen[1:])


def _difference(first: Sequence[_Seen], again: Sequence[_Seen]) -> str:
    """Say what differs in the first decision in which something does; nothing if all is the same to the bit."""
    for number, (one, other) in enumerate(zip(first, again, strict=False)):
        if differing := [text for name in one if (text := _unequal(name, one[name], other[name]))]:
            start, end = _length(first[:number]) + 1, _length(first[: number + 1])
            return f"{', '.join(differing)} differ " + (f"in actions {start} to {end}" if number else "after reset")
    return ""


def _unequal(name: str, one: Any, other: Any) -> str:
    one, other = np.atleast_1d(one), np.atleast_1d(other)
    if one.tobytes() == other.tobytes():
        return ""
    values = np.argwhere(one != other)
    first = tuple(values[0]) if len(values) else (0,) * one.ndim  # 0.0 is -0.0
    return f"{name} ({len(values)} of {one.size}, such as {one[first]} and {other[first]})"


def _check_torchrl(spec: SimulatorSpec, chunk: int) -> None:
    quiet = mock.patch.object(torchrl_logger, "disabled", True)  # it tells of success
    with closing(make_env(spec, 1, chunk, seed=0)) as env, quiet:
        check_env_specs(env)


def _check_gymnasium(spec: SimulatorSpec, chunk: int) -> None:
    env = SimulatorEnv(spec, chunk_size=None if spec.control_frequency else chunk)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env, skip_render_check=True)
        env.close()
    for said in (str(warning.message) for warning in caught if warning.category is UserWarning):
        if "WARN: " in said and "observation space m" not in said:  # states have no natural bounds
            raise ValueError(said)
