"""Stages that take turns: overlap changes no bit, whatever fails; nothing is lost, and what cannot be is one line."""

import dataclasses
import logging
from collections import OrderedDict
from contextlib import closing

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import StepCounter, TransformedEnv
from toy import CHUNK, DIM, ToyActorCritic, ToyEnv
from walker import walker_spec

from tests.storm.toy import make_toy_env, tiny_policy, toy_spec
from vla_algos import EpisodeCollector, StepCollector, collect_groups, evaluate
from vla_common import keys
from vla_common.keys import ACTION, DONE, EPISODE_LEN, NEXT, STATES, TRIAL_ID
from vla_envs import Episode, EpisodeQueue, EpisodeSampler, SimulatorCrash, make_env
from vla_envs.stages import check_stages, divide

N, WORKERS = 8, 2
FAULTS = {3: ("raise", 2, 1), 7: ("exit", 1, 1), 11: ("exit", 0, 1), 19: ("raise", 0, 0), 23: ("exit", 2, 0)}


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="vla_envs.workers.pool")


def walkers(overlap=True, num_envs=N, **fields):
    env = make_env(walker_spec(horizon=11, action_dim=DIM, **fields), num_envs, CHUNK, seed=0, num_workers=WORKERS)
    return env if overlap else answered_at_once(env)


def answered_at_once(env):
    """The same environment, in which what is sent is waited for at once, and seen where it is received."""
    pool, post = env.pool, env.pool._post

    def post_and_wait(command, items):
        pool._finish(exchange := post(command, items))
        return exchange

    pool._post = post_and_wait
    return env


def actor_critic():
    torch.manual_seed(0)
    return ToyActorCritic()


def tiny(env):
    torch.manual_seed(0)
    return tiny_policy(env.simulator_spec)


def episodes(number, first=0):
    return [Episode(trial % 2, trial, 3, group_id=trial) for trial in range(first, first + number)]


def assert_same(first, second):
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key in first.keys(True, True):
        torch.testing.assert_close(first[key], second[key], rtol=0, atol=0, equal_nan=True, msg=str(key))


# ---- the halves


def test_halves_are_what_whole_steps_are():
    with closing(walkers()) as env, closing(walkers()) as whole:
        td, expected = env.reset(), whole.reset()
        stages = env.stage_slots(2)
        for number in range(6):
            actions = torch.full((N, CHUNK, DIM), 0.2 * number)
            outcome, expected = whole.step_and_maybe_reset(expected.set(ACTION, actions))
            for slots in stages:
                env.async_step_send(td[slots].set(ACTION, actions[slots]), slots)
            parts = [env.async_step_recv(slots) for slots in stages]
            order = torch.cat([part["env_index"] for part in parts]).argsort()
            for key in (*whole.reward_spec.keys(), *whole.observation_spec.keys(), DONE):
                if key != keys.TASK_DESCRIPTIONS:
                    assert torch.equal(torch.cat([part[NEXT, key] for part in parts])[order], outcome[NEXT, key]), key
            td = env.observe().select(STATES)
            if not outcome[NEXT, DONE].any():  # otherwise stages take episodes in another order than slots
                assert torch.equal(td[STATES], expected[STATES])
            else:
                break
        assert number


def test_halves_of_other_slots_are_received_in_any_order():
    with closing(walkers()) as env:
        td = env.reset().set(ACTION, torch.zeros(N, CHUNK, DIM))
        env.async_step_send(td[2:4], [2, 3])
        env.async_step_send(td[:2], [0, 1])
        assert env.async_step_recv([0, 1])["env_index"].tolist() == [0, 1]
        assert env.async_step_recv([2, 3])["env_index"].tolist() == [2, 3]
        env.async_reset_send([5, 4])
        fresh = env.async_reset_recv([5, 4])
        assert fresh["env_index"].tolist() == [5, 4]
        assert fresh[TRIAL_ID].tolist() == env.observe()[TRIAL_ID][[5, 4]].tolist() != td[TRIAL_ID][[5, 4]].tolist()


def test_halves_that_do_not_fit_are_one_clear_error():
    with closing(walkers()) as env:
        td = env.reset().set(ACTION, torch.zeros(N, CHUNK, DIM))
        env.async_step_send(td[:2], [0, 1])
        for call in (
            lambda: env.async_step_send(td[:1], [1]),
            lambda: env.async_reset_send([1, 2]),
            lambda: env.step(td),
            lambda: env.observe(),
            lambda: env.state_dict(),
            lambda: env.reset(TensorDict({"_reset": torch.ones(N, 1, dtype=torch.bool), DONE: td[DONE]}, [N])),
        ):
            with pytest.raises(RuntimeError, match="still processing what was sent"):
                call()
        with pytest.raises(RuntimeError, match=r"exactly the slots \[0\]; under way are \['a step of \[0, 1\]'\]"):
            env.async_step_recv([0])
        with pytest.raises(RuntimeError, match=r"no reset is under way for exactly the slots \[0, 1\]"):
            env.async_reset_recv([0, 1])
        with pytest.raises(RuntimeError, match="under way"):
            env.pool.map("os:getpid", [1])
        with pytest.raises(ValueError, match="different slots from 0 to 7"):
            env.async_step_send(td[:2], [5, 5])
        with pytest.raises(ValueError, match=r"float32 \[3, 3, 5\].*got torch.float32 \[2, 3, 5\]"):
            env.async_step_send(td[:2], [4, 5, 6])
        with pytest.raises(ValueError, match=r"not finite in environments \[6\]"):
            env.async_step_send(
                td[:2].set(ACTION, torch.tensor([0.0, torch.nan]).view(2, 1, 1).expand(2, CHUNK, DIM)), [4, 6]
            )
        assert torch.equal(env.reset()[STATES][:, 1], torch.zeros(N))  # drops what is under way
        assert env.step(td)[NEXT, EPISODE_LEN].eq(CHUNK).all()


# ---- collectors


def steps(overlap, stages=2, env=walkers, batches=3):
    with closing(env(overlap)) as simulators:
        collector = StepCollector(simulators, actor_critic(), 5, stages=stages)
        torch.manual_seed(1)
        found = torch.cat([collector.rollout() for _ in range(batches)], 1)
        assert collector.stats()["frames"] == found.numel()
    return found


def test_overlap_changes_no_bit_of_a_batch_with_resets():
    first, second = steps(True), steps(False)
    assert first[NEXT, DONE].any()
    assert_same(first, second)


@pytest.mark.parametrize("stages", [4])
def test_rows_follow_each_other_in_time(stages):
    batch = steps(True, stages)
    done = batch[NEXT, DONE].squeeze(-1)[:, :-1]
    assert done.any()
    assert torch.equal(batch[TRIAL_ID][:, 1:] == batch[TRIAL_ID][:, :-1], ~done)  # each by its slot
    elapsed = batch[STATES][..., 1].long()
    length = batch[NEXT, EPISODE_LEN].squeeze(-1)
    assert torch.equal(elapsed[:, 1:], torch.where(done, 0, length[:, :-1]))
    values = batch[keys.STATE_VALUE].squeeze(-1)[:, 1:5]
    assert torch.equal(batch[NEXT, keys.STATE_VALUE].squeeze(-1)[:, :4][~done[:, :4]], values[~done[:, :4]])


def test_a_run_that_was_stopped_in_the_middle_of_episodes_goes_on_to_the_bit():
    expected = steps(True, batches=4)
    with closing(walkers()) as env:
        collector = StepCollector(env, actor_critic(), 5, stages=2)
        torch.manual_seed(1)
        begun = [collector.rollout() for _ in range(2)]
        state, random = collector.state_dict(), torch.get_rng_state()
    assert (begun[-1][NEXT, DONE][:, -1] == 0).any()
    with closing(walkers()) as env:
        collector = StepCollector(env, actor_critic(), 5, stages=2)
        collector.load_state_dict(OrderedDict(state))
        torch.set_rng_state(random)
        assert_same(torch.cat([*begun, collector.rollout(), collector.rollout()], 1), expected)


def test_no_pass_has_more_decisions_than_a_stage():
    policy = actor_critic()
    with closing(walkers()) as env:
        StepCollector(env, policy, 5, stages=2).rollout()
    assert set(policy.passes) == {N // 2}


def test_a_policy_that_fails_leaves_an_environment_that_can_be_used():
    class Fails(ToyActorCritic):
        def forward(self, td):
            if len(self.passes) == 5:
                raise ZeroDivisionError
            return super().forward(td)

    with closing(walkers()) as env:
        collector = StepCollector(env, Fails(), 5, stages=2)
        with pytest.raises(ZeroDivisionError):
            collector.rollout()
        collector.policy.passes.extend(range(9))
        batch = collector.rollout()
        assert batch[STATES][:, 0, 1].eq(0).all()  # fresh episodes
        queue = EpisodeCollector(env, Fails(), episodes(9), stages=2, overlap_resets=True)
        with pytest.raises(ZeroDivisionError):
            list(queue.iterator())
        queue.policy.passes.extend(range(9))
        assert [int(episode[TRIAL_ID][0]) for episode in queue.iterator()] == list(range(9))


WAYS = [{"stages": 2}, {"stages": 2, "overlap_resets": True}, {"stages": 1, "overlap_resets": True}]


def faulty(tmp_path, name, overlap, faults):
    folder = tmp_path / name
    folder.mkdir()
    env = make_toy_env(toy_spec(faults, folder), N, WORKERS)
    return env if overlap else answered_at_once(env)


def worked_off(env, number, **options):
    policy = tiny(env)
    torch.manual_seed(1)
    order = []
    with closing(env):
        collector = EpisodeCollector(env, policy, episodes(number), on_episode=lambda i, _: order.append(i), **options)
        found = list(collector.iterator())
        stats = collector.stats()
    return found, order, dict(collector.attempts), stats["env/worker_restarts"], stats["time/idle_fraction"]


@pytest.mark.parametrize("options", WAYS[1:])
def test_overlap_changes_no_bit_of_a_queue_whose_simulators_raise_and_die(options, tmp_path):
    first, *about = worked_off(faulty(tmp_path, "on", True, FAULTS), 40, **options)
    second, *of_second = worked_off(faulty(tmp_path, "off", False, FAULTS), 40, **options)
    assert about == of_second
    for one, other in zip(first, second, strict=True):
        assert_same(one, other)
    assert [int(episode[TRIAL_ID][0]) for episode in first] == list(range(40))
    assert [bool(episode[NEXT, keys.CRASHED][-1]) for episode in first] == [trial in (19, 23) for trial in range(40)]
    assert about[1][7] == 2


def test_overlap_changes_no_bit_of_steps_whose_simulators_raise_and_die(tmp_path):
    def run(name, overlap):
        env = faulty(tmp_path, name, overlap, FAULTS)
        env.set_episodes(EpisodeQueue(episodes(40)))
        policy = tiny(env)
        torch.manual_seed(1)
        with closing(env):
            return StepCollector(env, policy, 9, stages=2).rollout(), env.worker_restarts

    (first, restarts), (second, others) = run("on", True), run("off", False)
    assert restarts == others > 1
    assert first[NEXT, keys.CRASHED].any()
    assert_same(first, second)


def test_overlap_changes_no_bit_where_simulators_hang_in_mid_step(tmp_path):
    def run(name, overlap):
        (folder := tmp_path / name).mkdir()
        spec = toy_spec({7: ("raise", 1, 1), 23: ("raise", 2, 0)}, folder)
        spec = dataclasses.replace(spec, entry_point="hanging:HangsInStep")
        env = make_env(spec, N, 2, num_workers=WORKERS, step_timeout=2.0)
        env = env if overlap else answered_at_once(env)
        return worked_off(env, 30, stages=2, overlap_resets=True, max_attempts=2)

    (first, *about), (second, *others) = run("on", True), run("off", False)
    assert about == others
    assert about[2] == 3  # one for each hang
    assert [index for index, episode in enumerate(first) if episode[NEXT, keys.CRASHED][-1]] == [23]
    for one, other in zip(first, second, strict=True):
        assert_same(one, other)


def test_groups_are_the_same(tmp_path):
    def run(name, overlap):
        env = faulty(tmp_path, name, overlap, {4: ("exit", 1, 2), 9: ("raise", 1, 1)})
        policy = tiny(env)
        torch.manual_seed(1)
        with closing(env):
            sampler = EpisodeSampler(env.simulator_spec, 5, group_size=3)
            collector = EpisodeCollector(env, policy, stages=2, overlap_resets=True)
            return [group for _ in range(2) for group in collect_groups(collector, sampler, 4, 9)]

    first, second = run("on", True), run("off", False)
    assert [len(group.episodes) + group.crashed for group in first] == [3] * len(first)
    for one, other in zip(first, second, strict=True):
        assert one.crashed == other.crashed
        for episode, same in zip(one.episodes, other.episodes, strict=True):
            assert_same(episode, same)


def test_a_greedy_evaluation_has_the_same_results_in_stages():
    with closing(walkers(goal=0.9)) as env:
        policy = actor_critic()
        plain = evaluate(env, policy, episodes(30), record=3)
        for options in WAYS:
            staged = evaluate(env, policy, episodes(30), record=3, **options)
            assert staged.episodes == plain.episodes
            assert staged.videos.keys() == plain.videos.keys()
            for index, video in plain.videos.items():
                assert (staged.videos[index] == video).all()
                assert staged.captions[index] == plain.captions[index]


def test_a_slot_sits_out_one_decision_while_its_next_episode_begins():
    decisions = []

    def note(outcome):
        done = outcome[NEXT, DONE].squeeze(-1).tolist()
        of_slots = zip(outcome[TRIAL_ID].tolist(), done, strict=True)
        decisions.append(dict(zip(outcome["env_index"].tolist(), of_slots, strict=True)))

    with closing(walkers(goal=0.4)) as env:  # some begin behind it, so that lengths differ
        collector = EpisodeCollector(env, actor_critic(), episodes(60), overlap_resets=True, step_hook=note)
        list(collector.iterator())
    tail = next(place for place, row in enumerate(decisions) if any(trial >= 50 for trial, _ in row.values()))
    ended = 0
    for now, following, after in zip(decisions[:tail], decisions[1:], decisions[2:], strict=False):
        for slot, (trial, done) in now.items():
            ended += done
            assert done == (slot not in following)
            assert (after if done else following)[slot][0] > trial if done else following[slot][0] == trial
    assert ended > 30
    assert 0 < collector.stats()["time/idle_fraction"] < 0.5


def test_slots_without_an_episode_are_counted_in_stages_that_have_none_as_well():
    with closing(walkers()) as env:
        collector = EpisodeCollector(env, actor_critic(), episodes(12), stages=2, overlap_resets=True)
        list(collector.iterator())
    stats = collector.stats()
    assert (
        stats["frames"] == 48
    )  # 4 decisions each: one stage has 8 and sits out once, the other has 4 and nothing to do
    assert 0.25 < stats["time/idle_fraction"] < 0.4


def test_the_queue_may_grow_and_be_stopped():
    with closing(walkers()) as env:
        collector = EpisodeCollector(env, actor_critic(), episodes(6), stages=2, overlap_resets=True)
        trials = []
        for episode in collector.iterator():
            trials.append(int(episode[TRIAL_ID][0]))
            if len(trials) == 2:
                collector.extend(episodes(7, first=6))
                break
        own = env.episodes
        trials += [int(episode[TRIAL_ID][0]) for episode in collector.iterator()]
        assert trials == list(range(13))
        assert env.episodes is own
        collector.extend(episodes(30, first=50))
        collector.step_hook = lambda _: env.set_episodes(EpisodeQueue())
        with pytest.raises(RuntimeError, match="no slot of the environment takes one"):
            list(collector.iterator())


def test_a_broken_simulator_is_said_to_be(tmp_path):
    env = faulty(tmp_path, "broken", True, {trial: ("raise", 0, 0) for trial in range(60)})
    with closing(env):
        with pytest.raises(SimulatorCrash, match="in a row without a step that worked"):
            evaluate(env, tiny(env), episodes(40), stages=2, overlap_resets=True)
        env.state_dict()  # as a run that is saved then: nothing is under way


# ---- what cannot be


def test_every_worker_has_slots_of_every_stage():
    for num_envs, workers, stages in [(8, 2, 2), (6, 2, 2), (9, 2, 3), (10, 4, 2), (12, 3, 4), (5, 2, 1)]:
        check_stages(stages, num_envs, workers)
        found = divide(num_envs, workers, stages)
        assert sorted(slot for stage in found for slot in stage) == list(range(num_envs))
        assert {len(stage) for stage in found} == {num_envs // stages}
        assert all({slot % workers for slot in stage} == set(range(workers)) for stage in found)


@pytest.mark.parametrize(
    ("stages", "num_envs", "workers", "batched", "message"),
    [
        (0, 4, 2, "", "stages is 0, must be at least 1"),
        (3, 4, 1, "", r"num_envs=4 cannot be divided .* such as num_envs=6"),
        (8, 4, 1, "", r"such as num_envs=8"),
        (2, 4, 4, "", r"take num_workers=2 or fewer, or num_envs=8 or more"),
        (2, 4, 1, "maniskill/x", "maniskill/x simulates all worlds together.* env.backend=processes"),
    ],
)
def test_stages_that_cannot_be_are_one_line(stages, num_envs, workers, batched, message):
    with pytest.raises(ValueError, match=message) as error:
        check_stages(stages, num_envs, workers, batched)
    assert "\n" not in str(error.value)


def test_collectors_refuse_transforms_and_what_has_no_halves():
    with closing(walkers()) as env:
        for collector in (StepCollector, EpisodeCollector):
            with pytest.raises(ValueError, match="VLAEnv without transforms, not TransformedEnv"):
                collector(
                    TransformedEnv(env, StepCounter()),
                    actor_critic(),
                    4 if collector is StepCollector else (),
                    stages=2,
                )
        with pytest.raises(ValueError, match="not ToyEnv"):
            EpisodeCollector(ToyEnv(4), actor_critic(), overlap_resets=True)
        with pytest.raises(ValueError, match="cannot be divided"):
            StepCollector(env, actor_critic(), 4, stages=3)
