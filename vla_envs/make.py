"""Make an environment by name, and refuse before any work what cannot be made."""

import math
import os
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from annotated_types import Gt, MinLen

from vla_common.settings import Count, Factor, Length, Positive, Seed, Whole, checked, setting_types
from vla_envs.env import VLAEnv
from vla_envs.episodes import EpisodeQueue, EpisodeSampler
from vla_envs.registry import check_options, find_benchmark, make_spec, option_types
from vla_envs.rendering.gpus import check_gpus
from vla_envs.simulator import SimulatorSpec
from vla_envs.workers.chunks import check_chunk_size
from vla_envs.workers.pool import count_workers

_SIMULATOR_BYTES = 10_000_000  # no simulator is smaller
_CHUNK = 5  # actions of a step, unless the caller says otherwise


@checked
def make_env(
    id: str | SimulatorSpec,
    num_envs: Count,
    chunk_size: Length | None = None,
    *,
    episodes: EpisodeSampler | EpisodeQueue | None = None,
    seed: Seed | None = None,
    group_size: Count = 1,
    num_workers: Count | None = None,
    ignore_terminations: bool = False,
    reward_coef: Annotated[Factor, Gt(0)] = 1.0,
    relative_reward: bool = False,
    step_penalty: Factor = 0.0,
    step_timeout: Positive = 60.0,
    start_timeout: Positive = 120.0,
    gpus: Annotated[Sequence[Whole], MinLen(1)] | None = None,
    **options: Any,
) -> VLAEnv:
    """Make a batched environment.

    Args:
        id: such as ``"metaworld/MT50"`` or ``"metaworld/reach-v3"``, of ``list_envs()``; or a ``SimulatorSpec``: of
            ``make_spec``, or one of your own around a :class:`~vla_envs.simulator.Simulator`.
        num_envs: number of simulators, ``N``.
        chunk_size: primitive actions per step, ``C``; 5 if ``None``, which is refused where a chunk is one motion.
        episodes: which episodes to run; random ones from ``seed`` in groups of ``group_size`` if ``None``.
        seed: of the default ``episodes``; drawn if ``None``, so that the copies of a collector with several processes
            run different episodes (``env.episodes.seed`` has it).
        group_size: of the default ``episodes``; must divide ``num_envs``.
        num_workers: processes that share the simulators; one per available core if ``None``. Not used where the
            benchmark simulates all worlds together (``spec.batched``).
        ignore_terminations: continue after success until the horizon.
        reward_coef: factor of the benchmark's reward.
        relative_reward: pay each action the change of the reward since the one before it, from 0 at the start. Refused
            where rewards are paid once already (``SimulatorSpec.pays_once``).
        step_penalty: subtracted for each executed action, after the two above.
        step_timeout: seconds after which a worker that does not get to its next environment is replaced.
        start_timeout: seconds that the first answer of a new worker may take on top: it imports the simulator, and a
            first reset may compile shaders or build assets.
        gpus: that workers draw with in turn, as CUDA numbers them in this process; all if ``None``. Where the benchmark
            simulates all worlds together: the one to simulate on.
        **options: of the benchmark, as ``help(vla_envs.metaworld.make_spec)`` lists them, and ``stress``
            (:func:`~vla_envs.stress.stressed`); a ``SimulatorSpec`` has its own.

    Raises:
        ValueError: an unknown name or option, or an impossible number; the message says what would be right.

    Example:
        >>> env = make_env("metaworld/MT50", num_envs=8, image_size=224, render_quality="fast")
        >>> rollout = env.rollout(4)  # doctest: +SKIP
    """
    limits: dict[str, Any] = {"relative_reward": relative_reward, "group_size": group_size, "num_workers": num_workers}
    spec = check_env(id, num_envs, chunk_size, **limits, **options)
    check_machine(spec, num_envs, gpus)
    chunk_size = _CHUNK if chunk_size is None else chunk_size
    if episodes is None:
        episodes = EpisodeSampler(spec, secrets.randbelow(2**31) if seed is None else seed, group_size=group_size)
    return VLAEnv(
        spec,
        num_envs,
        chunk_size,
        episodes,
        num_workers=count_workers(num_envs, num_workers),
        ignore_terminations=ignore_terminations,
        reward_coef=reward_coef,
        relative_reward=relative_reward,
        step_penalty=step_penalty,
        step_timeout=step_timeout,
        start_timeout=start_timeout,
        gpus=gpus,
    )


def check_env(
    id: str | SimulatorSpec,
    num_envs: int,
    chunk_size: int | None = None,
    *,
    relative_reward: bool = False,
    group_size: int = 1,
    num_workers: int | None = None,
    **options: Any,
) -> SimulatorSpec:
    """Refuse what :func:`make_env` refuses on every machine, with a ``ValueError``; returns what would be simulated."""
    if isinstance(id, str):
        check_options(find_benchmark(id)[0], options, setting_types(make_env))
    spec = make_spec(id, **options)
    if relative_reward and spec.pays_once:
        raise ValueError(
            f"relative_reward=True: {spec.id} pays once for what is done, and would take it back with the next action; "
            "leave relative_reward out (false)"
        )
    check_chunk_size(spec, chunk_size)
    count_workers(num_envs, num_workers)
    if num_envs % group_size:
        raise ValueError(
            f"num_envs={num_envs} is not a multiple of group_size={group_size}; "
            f"try num_envs={group_size * -(-num_envs // group_size)}"
        )
    return spec


def check_machine(spec: SimulatorSpec, num_envs: int, gpus: Sequence[int] | None = None) -> None:
    """Refuse GPUs that are not here, and more environments than there is memory for their frames (``ValueError``).

    What else a benchmark needs of a machine, ``spec.check()`` says.
    """
    if gpus is not None:
        check_gpus(gpus, torch.cuda.device_count())
        spec.check_gpus(gpus)
    pixels = math.prod(spec.image_shape) + math.prod(spec.wrist_image_shape or (0,))
    needed = num_envs * (3 * pixels + (0 if spec.batched else _SIMULATOR_BYTES))
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise ValueError(
            f"num_envs={num_envs}: need at least {needed / 1e9:.0f} GB of memory, this machine has "
            f"{available / 1e9:.0f}; take fewer, at most {num_envs * available // needed}"
        )


def env_types(id: str) -> dict[str, Any]:
    """Return the annotations of what may be set of an environment: :func:`make_env`'s keywords and its options.

    Without ``episodes``, ``seed`` and ``chunk_size``, which say how it is used rather than what it is.
    """
    own = setting_types(make_env, without=("episodes", "seed", "chunk_size"))
    return {**own, "id": str, **option_types(find_benchmark(id)[0])}
