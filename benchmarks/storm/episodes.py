"""Initial states that cannot be simulated, and simulators that fail often: in evaluation, GRPO and PPO, and resumed.

Every episode is accounted for exactly once, and those that the faults do not concern are to the bit what they are
without any fault.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.storm.tally import Tally
from benchmarks.storm.toy import HORIZON, TRIALS, Faults, digest, make_toy_env, straight, tiny_policy, toy_spec
from vla_algos import ChunkClipPPOLoss, EpisodeCollector, Learner, StepCollector, collect_groups, evaluate, gae, grpo
from vla_algos.groups import concatenate
from vla_algos.metrics import env_metrics
from vla_common.keys import CRASHED, DONE, NEXT, STEP_MASK, TRIAL_ID
from vla_envs import Episode, EpisodeSampler, SimulatorCrash
from vla_envs.simulator import SimulatorSpec

COUNT = 1000
ATTEMPTS = 3
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 1.0)
_BROKEN = 0.3  # from this share on ten in a row may be lost, so that a simulator may be said to be broken
_PATIENCE = 120  # seconds for one scenario


class Hung(BaseException):
    """A scenario did not end; not an ``Exception``, so that nothing on the way takes it for a failure."""


def run(count: int = COUNT, seed: int = 0) -> Tally:
    """Try at least so many faults."""
    logger = logging.getLogger("vla_envs.workers.pool")
    before = logger.level
    logger.setLevel(logging.CRITICAL)  # each fault is a line
    try:
        return _run(count, seed)
    finally:
        logger.setLevel(before)


def _run(count: int, seed: int) -> Tally:
    tally, chance = Tally("bad initial states, simulators that fail often"), random.Random(seed)
    torch.manual_seed(seed)
    scenarios = [_evaluation, _grpo, _ppo]
    while tally.tried < count:
        scenario = scenarios[0]
        scenarios.append(scenarios.pop(0))
        share = chance.choice(_SHARES)
        with tempfile.TemporaryDirectory() as folder:
            faults = _faults(chance, share)
            what = f"{scenario.__name__[1:]} with {len(faults)} of {TRIALS} trials, seed {seed} fault {tally.tried}"
            outcome = _ended(lambda: scenario(faults, Path(folder), chance, share))  # noqa: B023, called at once
        for trial in faults or {-1: ("none", 0, 0)}:
            kind, when, how_often = faults.get(trial, ("none", 0, 0))
            kind = f"{kind} in {'a step' if when else 'reset'}, {f'{how_often} times' if how_often else 'always'}"
            tally.note(outcome.split(":")[0], kind, f"{what}: {outcome}")
    tally.failures = list(dict.fromkeys(tally.failures))
    return tally


def _faults(chance: random.Random, share: float) -> Faults:
    def fault() -> tuple[str, int, int]:
        return chance.choice(["raise", "raise", "exit"]), chance.choice([0, 0, 1, 2, 3]), chance.choice([0, 0, 1, 2, 4])

    bad = chance.sample(range(TRIALS), max(1, round(share * TRIALS)))
    return {trial: fault() for trial in bad}


def _ended(scenario: Callable[[], str]) -> str:
    def ring(*_: Any) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(_PATIENCE)
    try:
        return scenario()
    except Hung:
        return "hung"
    except Exception as error:
        return f"lost: {type(error).__name__} {str(error).strip().splitlines()[0][:200]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _env(spec: SimulatorSpec, chance: random.Random, **settings: Any) -> Iterator[Any]:
    num_envs = chance.choice([1, 3, 4])
    env = make_toy_env(spec, num_envs, min(num_envs, chance.choice([1, 2])), **settings)
    try:
        yield env
    finally:
        env.close(raise_if_closed=False)


_UNDISTURBED: dict[Episode, tuple[bool, float, int]] = {}


def _undisturbed(episodes: list[Episode], folder: Path) -> None:
    if not _UNDISTURBED:
        env = make_toy_env(toy_spec({}, folder), 4, 2)
        for result in evaluate(env, straight, episodes).episodes:
            _UNDISTURBED[result.episode] = (result.success_once, result.episode_return, result.episode_len)
        env.close()


def _evaluation(faults: Faults, folder: Path, chance: random.Random, share: float) -> str:
    """Every episode has the result of a run without faults, or is crashed; where all ends early, it can be gone on."""
    spec = toy_spec(faults, folder)
    episodes = [Episode(trial % 2, trial, 3) for trial in range(TRIALS)]
    _undisturbed(episodes, folder)
    results: dict[Episode, Any] = {}
    seen: list[Episode] = []

    def note(result: Any) -> None:
        seen.append(result.episode)
        results[result.episode] = result

    crashes = 0
    with _env(spec, chance) as env:
        while left := [episode for episode in episodes if episode not in results]:
            try:
                evaluate(env, straight, left, on_episode=note, max_attempts=ATTEMPTS)
            except SimulatorCrash:
                crashes += 1
                if crashes > len(episodes) or share < _BROKEN:
                    return f"lost: {len(results)} of {len(episodes)} episodes, SimulatorCrash"
    if len(seen) != len(set(seen)):
        return "wrong: an episode has two results"
    for episode, result in results.items():
        _, when, how_often = faults.get(episode.trial_id, ("", HORIZON + 1, 0))
        there = when <= _UNDISTURBED[episode][2]
        if result.crashed:
            if not there or 0 < how_often < (1 if when else ATTEMPTS):
                return f"wrong: {episode} crashed without a fault"
            continue
        if there and not how_often:
            return f"wrong: {episode} has a result, which cannot be"
        if (result.success_once, result.episode_return, result.episode_len) != _UNDISTURBED[episode]:
            return f"wrong: {episode} has another result than without faults"
    return "survived"


def _grpo(faults: Faults, folder: Path, chance: random.Random, share: float) -> str:
    """Groups are complete, their runs whole, and iterations without any run go by."""
    spec, size = toy_spec(faults, folder), 3
    policy = tiny_policy(spec)
    learner = Learner(ChunkClipPPOLoss(policy, critic_coeff=None), lr=1e-3, updates=3, minibatch_size=32, epochs=1)
    episodes = EpisodeSampler(spec, chance.randrange(1000), group_size=size)
    with _env(spec, chance) as env:
        collector = EpisodeCollector(env, policy, max_attempts=ATTEMPTS)
        for _ in range(3):
            try:
                groups = collect_groups(collector, episodes, 4, 4)
            except SimulatorCrash:
                if share < _BROKEN:
                    return "lost: a training run, SimulatorCrash"
                continue
            if [len(group.episodes) + group.crashed for group in groups] != [size] * 4:
                return f"wrong: groups of {[len(group.episodes) + group.crashed for group in groups]} runs"
            for group in groups:
                for episode in group.episodes:
                    trial = int(episode[TRIAL_ID][0])
                    if not (episode[TRIAL_ID] == trial).all() or not episode[NEXT, DONE][-1]:
                        return "wrong: a run is not whole"
                    if faults.get(trial, ("", 1, 0))[1:] == (0, 0):
                        return "wrong: a run of a state that cannot be simulated"
            metrics = env_metrics(concatenate(groups))
            if metrics["env/num_episodes"] != sum(len(group.episodes) for group in groups):
                return "wrong: episodes are not counted"
            if (batch := grpo(groups)) is not None:
                learner.update(batch)
    finite = all(parameter.isfinite().all() for parameter in policy.parameters())
    return "survived" if finite else "wrong: weights are not finite"


def _ppo(faults: Faults, folder: Path, chance: random.Random, share: float) -> str:
    """Training gets past what fails; one that is resumed in between ends in the same weights."""
    always = {trial: (kind, when, 0) for trial, (kind, when, _) in faults.items()}  # a resumed run meets the same
    spec, iterations, seed = toy_spec(always, folder), 3, chance.randrange(1000)
    num_envs, num_workers = chance.choice([(1, 1), (3, 1), (4, 2)])

    def train(state: Any = None, keep: int = -1) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        policy = tiny_policy(spec)
        learner = Learner(ChunkClipPPOLoss(policy), lr=1e-3, updates=iterations, minibatch_size=16, epochs=1)
        env = make_toy_env(spec, num_envs, num_workers, episodes=EpisodeSampler(spec, seed))
        kept, first = None, 0
        try:
            collector = StepCollector(env, policy, 7)
            if state is not None:
                first, weights, of_learner, of_collector, of_random = state
                policy.load_state_dict(weights)
                learner.load_state_dict(of_learner)
                collector.load_state_dict(of_collector)
                torch.set_rng_state(of_random)
            for iteration in range(first, iterations):
                batch = collector.rollout()
                crashed = batch[NEXT, CRASHED].squeeze(-1)
                if batch[NEXT, STEP_MASK][crashed].any() or not batch[NEXT, DONE].squeeze(-1)[crashed].all():
                    raise AssertionError("a crashed decision counts")
                unable = torch.tensor([trial for trial, (_, when, _) in always.items() if not when])
                if not torch.equal(crashed | ~torch.isin(batch[TRIAL_ID], unable), torch.ones_like(crashed)):
                    raise AssertionError("a state that cannot be simulated has decisions")
                gae(batch)
                if batch[NEXT, STEP_MASK].any():
                    learner.update(batch)
                if iteration == keep:
                    parts = (policy.state_dict(), learner.state_dict(), collector.state_dict(), torch.get_rng_state())
                    kept = (iteration + 1, *copy.deepcopy(parts))
        finally:
            env.close(raise_if_closed=False)
        if not all(parameter.isfinite().all() for parameter in policy.parameters()):
            raise AssertionError("weights are not finite")
        return digest(policy.state_dict()), kept

    try:
        weights, state = train(keep=0)
        again, _ = train(state)
    except SimulatorCrash:
        return "survived" if share >= _BROKEN else "lost: a training run, SimulatorCrash"
    except AssertionError as error:
        return f"wrong: {error}"
    return "survived" if weights == again else "wrong: a resumed run has other weights"
