"""Initial states that cannot be simulated, and simulators that fail often: in evaluation, GRPO and PPO.

Every episode is accounted for exactly once, and those that the faults do not concern are to the bit what they are
without any fault.
"""

import contextlib
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.storm.tally import Tally
from tests.storm.toy import HORIZON, TRIALS, Faults, make_toy_env, straight, tiny_policy, toy_spec
from vla_algos import ChunkClipPPOLoss, EpisodeCollector, Learner, StepCollector, collect_groups, evaluate, gae, grpo
from vla_algos.groups import concatenate
from vla_algos.metrics import env_metrics
from vla_common.keys import CRASHED, DONE, NEXT, STEP_MASK, TRIAL_ID
from vla_envs import Episode, EpisodeSampler, SimulatorCrash
from vla_envs.simulator import SimulatorSpec

ATTEMPTS = 3  # the usual number
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 1.0)
_BROKEN = 0.3  # from this share on ten in a row may be lost, so that a simulator may be said to be broken


def run(count: int, seed: int) -> Tally:
    """Try ``count`` scenarios, each with several faults."""
    tally, chance = Tally(), random.Random(seed)
    torch.manual_seed(seed)
    scenarios = (_evaluation, _grpo, _ppo)
    while tally.tried < count:
        scenario, share = scenarios[tally.tried % 3], chance.choice(_SHARES)
        with tempfile.TemporaryDirectory() as folder:
            faults = _faults(chance, share)
            what = f"{scenario.__name__[1:]} with {len(faults)} of {TRIALS} trials, seed {seed} scenario {tally.tried}"
            try:
                outcome = scenario(faults, Path(folder), chance, share)
            except Exception as error:
                outcome = f"lost: {type(error).__name__} {str(error).strip()[:200]}"
        tally.note(outcome.split(":")[0], scenario.__name__[1:], f"{what}: {outcome}")
    return tally


def _faults(chance: random.Random, share: float) -> Faults:
    def fault() -> tuple[str, int, int]:
        return chance.choice(["raise", "raise", "exit"]), chance.choice([0, 0, 1, 2, 3]), chance.choice([0, 0, 1, 2, 4])

    bad = chance.sample(range(TRIALS), max(1, round(share * TRIALS)))
    return {trial: fault() for trial in bad}


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
    """Every episode has the result of a run without faults, or is crashed; what ends early can be continued."""
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
                evaluate(env, straight, left, on_episode=note)
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
    """Training gets past what fails, and no crashed decision counts."""
    spec, seed = toy_spec(faults, folder), chance.randrange(1000)
    policy = tiny_policy(spec)
    learner = Learner(ChunkClipPPOLoss(policy), lr=1e-3, updates=3, minibatch_size=16, epochs=1)
    unable = torch.tensor([trial for trial, (_, when, often) in faults.items() if not when and not often])
    with _env(spec, chance, episodes=EpisodeSampler(spec, seed)) as env:
        collector = StepCollector(env, policy, 7)
        for _ in range(3):
            try:
                batch = collector.rollout()
            except SimulatorCrash:
                return "lost: a training run, SimulatorCrash" if share < _BROKEN else "survived"
            crashed = batch[NEXT, CRASHED].squeeze(-1)
            if batch[NEXT, STEP_MASK][crashed].any() or not batch[NEXT, DONE].squeeze(-1)[crashed].all():
                return "wrong: a crashed decision counts"
            if (~crashed & torch.isin(batch[TRIAL_ID], unable)).any():
                return "wrong: a state that cannot be simulated has decisions"
            gae(batch)
            if batch[NEXT, STEP_MASK].any():
                learner.update(batch)
    finite = all(parameter.isfinite().all() for parameter in policy.parameters())
    return "survived" if finite else "wrong: weights are not finite"
