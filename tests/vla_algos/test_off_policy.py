"""Transitions of chunks, the buffer that outlives its process, and TorchRL's loss of them."""

import copy

import pytest
import torch
from tensordict import TensorDict
from tiny_policies import SIZES, small, small_flow
from torchrl.objectives import SACLoss, SoftUpdate, ValueEstimators
from toy import ToyEnv

from vla_algos import EpisodeCollector, Replay, demonstrated, make_sac_loss, paid_by_success, transitions
from vla_algos.off_policy import STEPS
from vla_algos.run.sharding import say_room
from vla_algos.samples import Samples
from vla_common import keys
from vla_envs import Episode
from vla_policies import SmallFlow, SmallFlowConfig
from vla_policies.steered import SteeredConfig, SteeredPolicy

GAMMA = 0.9


def episode(count, ended=keys.TERMINATED, features=24, noise=4, seed=0):
    """Decisions of three actions, of which the last one executes two."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(count, 3, dtype=torch.bool)
    mask[-1, 2] = False
    flags = {key: torch.zeros(count, 1, dtype=torch.bool) for key in (keys.TERMINATED, keys.TRUNCATED, keys.CRASHED)}
    if ended == keys.CRASHED:
        flags[keys.TERMINATED][-1] = True
    flags[ended][-1] = True
    rewards = torch.rand(count, 3, generator=generator)
    after = {keys.STEP_REWARDS: rewards, keys.STEP_MASK: mask, **flags}
    seen = torch.randn(count, features, generator=generator).half()
    return TensorDict(
        {keys.FEATURES: seen, keys.STEERING: torch.randn(count, noise, generator=generator), keys.NEXT: after}, [count]
    )


def steered():
    torch.manual_seed(0)
    return SteeredPolicy(small_flow(None), SteeredConfig(width=8))


@pytest.mark.parametrize("n_steps", [1, 2, 10])
@pytest.mark.parametrize("ended", [keys.TERMINATED, keys.TRUNCATED])
def test_rewards_are_discounted_by_executed_actions_and_truncation_bootstraps(n_steps, ended):
    whole = episode(5, ended)
    rows = transitions(whole, GAMMA, n_steps)
    last = 5 if ended == keys.TERMINATED else 4  # the last observation of a time limit is none of a decision
    assert len(rows) == last
    for time in range(last):
        stop, total, steps = min(time + n_steps, last), 0.0, 0
        for at in range(time, stop):
            for reward, done in zip(
                *(whole[keys.NEXT, k][at] for k in (keys.STEP_REWARDS, keys.STEP_MASK)), strict=True
            ):
                if done:
                    total, steps = total + GAMMA**steps * float(reward), steps + 1
        assert rows[keys.NEXT, keys.REWARD][time].item() == pytest.approx(total, rel=1e-5)
        assert rows[STEPS][time].item() == steps
        terminated = ended == keys.TERMINATED and stop == last
        assert rows[keys.NEXT, keys.TERMINATED][time].item() == terminated
        if not terminated:
            assert torch.equal(rows[keys.NEXT, keys.FEATURES][time], whole[keys.FEATURES][stop])


def test_time_limits_bootstrap_in_the_targets_and_successes_do_not(tmp_path):
    policy = steered()
    loss = make_sac_loss(policy, GAMMA, width=8)
    for ended, bootstraps in ((keys.TRUNCATED, True), (keys.TERMINATED, False)):
        replay = Replay(tmp_path / ended, 100, gamma=GAMMA, n_steps=1, batch_size=64)
        replay.extend([episode(2, ended)])
        batch = replay.sample()
        batch = batch[batch[keys.NEXT, keys.TERMINATED].squeeze(-1) != bootstraps]
        torch.manual_seed(1)
        target = loss._compute_target_v2(batch)
        assert torch.equal(target, batch[keys.NEXT, keys.REWARD].squeeze(-1)) != bootstraps


def test_a_crashed_episode_is_left_out(tmp_path):
    replay = Replay(tmp_path / "replay", 100)
    assert replay.extend([episode(4, keys.CRASHED)]) == 0
    assert replay.extend([episode(4, keys.CRASHED), episode(3)]) == 3
    assert replay.decisions == 3


@pytest.mark.parametrize("capacity", [7, None])
def test_more_decisions_than_there_is_room_for_are_refused(capacity, tmp_path):
    replay = Replay(str(tmp_path / "a" / "b"), capacity)
    assert replay.extend([episode(4)]) == 4
    with pytest.raises(ValueError, match=f"capacity={capacity or 4}: there would be 8; give it all decisions"):
        replay.extend([episode(4)])
    assert replay.decisions == 4


def shown(steps, length):
    """One demonstration, with a row at each of ``steps`` of its ``length`` actions; chunks of the tiny policy."""
    policy = SteeredPolicy(small(None), SteeredConfig(by="residual", width=8))
    rows, at = len(steps), torch.tensor(steps)
    mask = at.unsqueeze(1) + torch.arange(policy.chunk_size) < length
    seen = {
        keys.IMAGES: torch.zeros(rows, 32, 32, 3, dtype=torch.uint8),
        keys.STATES: torch.rand(rows, policy.state_dim),
    }
    seen[keys.PROMPT_TOKENS] = policy.base.prompt_tokens(["push"] * rows)
    acted = {keys.ACTION: torch.rand(rows, policy.chunk_size, policy.action_dim), keys.STEP_MASK: mask}
    number = {keys.STEP: at, keys.EPISODE: torch.full((rows,), 3), keys.EPISODE_LEN: torch.full((rows, 1), length)}
    return policy, Samples(TensorDict({**seen, **acted, **number}, [rows]))


def test_a_demonstration_earns_1_where_it_ends_and_every_chunk_counts_once(tmp_path):
    chunk = SIZES["chunk_size"]
    policy, samples = shown(range(2 * chunk + 1), 2 * chunk + 1)
    (episode,) = map(paid_by_success, demonstrated(samples, policy))
    assert len(episode) == 3
    rewards, mask = episode[keys.NEXT, keys.STEP_REWARDS], episode[keys.NEXT, keys.STEP_MASK]
    assert mask.sum(1).tolist() == [chunk, chunk, 1]
    assert rewards.nonzero().tolist() == [[2, 0]]
    prior = Replay(tmp_path / "prior", gamma=GAMMA, n_steps=3, batch_size=8)
    assert prior.decisions == 0
    assert prior.extend([episode]) == 3
    first = prior.sample()
    worth = {round(GAMMA**steps, 5) for steps in (2 * chunk, chunk, 0)}
    assert {round(reward, 5) for reward in first[keys.NEXT, keys.REWARD].flatten().tolist()} <= worth
    assert first[keys.NEXT, keys.TERMINATED].all()  # three decisions lead to the end
    again = Replay(tmp_path / "prior", gamma=GAMMA, n_steps=3, batch_size=8)
    again.load_state_dict(prior.state_dict())
    assert again.decisions == 3


def test_the_action_that_solves_it_is_paid_whatever_the_environment_pays():
    whole = episode(3, keys.TRUNCATED)
    whole[keys.NEXT, keys.SUCCESS] = torch.tensor([[False], [True], [True]])  # and it was not ended then
    assert paid_by_success(whole)[keys.NEXT, keys.STEP_REWARDS].nonzero().tolist() == [[1, 2]]
    whole[keys.NEXT, keys.SUCCESS] = torch.tensor([[False], [False], [True]])
    assert paid_by_success(whole)[keys.NEXT, keys.STEP_REWARDS].nonzero().tolist() == [[2, 1]]  # two were executed
    assert whole[keys.NEXT, keys.STEP_REWARDS].count_nonzero() == 9


def test_demonstrations_without_a_row_for_each_chunk_are_refused():
    policy, samples = shown([0, 1], 2 * SIZES["chunk_size"])
    with pytest.raises(ValueError, match=r"type demonstrations\.stride=1"):
        demonstrated(samples, policy)


def test_a_stored_decision_was_looked_at_once(tmp_path):
    sizes = {"action_low": (-1,) * 5, "action_high": (1,) * 5, "state_dim": 3, "chunk_size": 3, "channels": (4, 8, 8)}
    policy = SteeredPolicy(SmallFlow(SmallFlowConfig(**{**SIZES, **sizes})), SteeredConfig(width=8))
    looks, observe = [], policy.base.observe
    policy.base.observe = lambda tensordict: looks.append(len(tensordict)) or observe(tensordict)
    env = ToyEnv(1, crashes={2: 9})
    collector = EpisodeCollector(env, policy, [Episode(n % 2, n, n) for n in range(4)], max_attempts=1)
    episodes = list(collector.iterator())
    stored = sum(len(each) for each in episodes)
    assert sum(looks) == stored
    replay = Replay(tmp_path / "replay", 100, gamma=GAMMA)
    kept = replay.extend(episodes)
    ends = [
        (len(each), bool(each[keys.NEXT, keys.TERMINATED][-1])) for number, each in enumerate(episodes) if number != 2
    ]
    assert kept == sum(count if terminated else count - 1 for count, terminated in ends)
    make_sac_loss(policy, GAMMA, width=8)(replay.sample())
    assert sum(looks) == stored


def test_an_episode_of_one_decision_that_time_ended_teaches_nothing(tmp_path):
    replay = Replay(tmp_path / "replay", 100)
    assert replay.extend([episode(1, keys.TRUNCATED)]) == 0
    assert replay.extend([episode(1)]) == 1


def test_the_loss_is_torchrls_to_the_bit(tmp_path):
    policy = steered()
    loss = make_sac_loss(policy, GAMMA, width=8, target_entropy=-1.0, alpha=0.2)
    by_hand = SACLoss(
        policy.actor,
        loss.qvalue_network,
        num_qvalue_nets=4,
        target_entropy=4 * (-1 + torch.tensor(2.0).log().item()),
        alpha_init=0.2,
    )
    by_hand.make_value_estimator(ValueEstimators.TD0, gamma=GAMMA)
    by_hand.load_state_dict(loss.state_dict())
    replay = Replay(tmp_path / "replay", 100, gamma=GAMMA)
    replay.extend([episode(5), episode(6, keys.TRUNCATED)])
    batch, results = replay.sample(), []
    for each in (loss, by_hand):
        torch.manual_seed(3)
        results.append(each(batch.clone()))
    assert {*results[0].keys()} == {*results[1].keys()} >= {"loss_actor", "loss_qvalue", "loss_alpha"}
    assert all(torch.equal(results[0][name], results[1][name]) for name in [*results[0].keys()])


def test_what_was_saved_continues_bit_by_bit(tmp_path):
    def learn(steps, loss, optimizer, replay):
        soft = SoftUpdate(loss, tau=0.1)
        for _ in range(steps):
            losses = loss(replay.sample())
            optimizer.zero_grad()
            (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
            optimizer.step()
            soft.step()

    def parts():
        loss = make_sac_loss(steered(), GAMMA, width=8)
        return loss, torch.optim.Adam(loss.parameters(), lr=1e-2), Replay(tmp_path / "replay", 100, batch_size=8)

    first = parts()
    first[2].extend([episode(5)])
    first[2].extend([episode(6, keys.TRUNCATED)])
    learn(3, *first)
    states = [copy.deepcopy(each.state_dict()) for each in first]
    random = torch.get_rng_state()
    learn(3, *first)
    again = parts()
    for part, state in zip(again, states, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(random)
    learn(3, *again)
    expected, found = first[0].state_dict(), again[0].state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_segment_that_was_changed_is_refused(tmp_path):
    replay = Replay(tmp_path / "replay", 100)
    replay.extend([episode(5)])
    before = replay.state_dict()
    replay.extend([episode(6)])
    file = tmp_path / "replay" / "segment_00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = Replay(tmp_path / "replay", 100)
    with pytest.raises(ValueError, match=r"segment_00002\.safetensors is not what the run wrote"):
        again.load_state_dict(replay.state_dict())
    again.load_state_dict(before)  # of the checkpoint before it
    assert again.capacity == 100 + again.decisions == 100 + before["decisions"]


def test_nothing_is_forgotten_where_a_run_resumes_with_fewer_episodes(tmp_path):
    replay = Replay(tmp_path / "replay", 100)
    for seed in range(3):
        replay.extend([episode(5, seed=seed)])
    again = Replay(tmp_path / "replay", 10)
    again.load_state_dict(replay.state_dict())
    assert again.decisions == 15
    again.extend([episode(5, seed=3)])
    assert again.decisions == 20


def test_what_decisions_take_is_said_and_refused_where_it_is_not_there(tmp_path):
    policy, row = steered(), transitions(episode(2), GAMMA)[0]
    replay = Replay(tmp_path / "replay", 100)
    assert replay.bytes_of(policy) == 100 * sum(tensor.nbytes for tensor in row.values(True, True))
    assert say_room(10**6, tmp_path) == "decisions take up to 0.001 GB of host memory and of the disk"
    with pytest.raises(ValueError, match="GB of host memory are free; type fewer iterations"):
        say_room(10**18, tmp_path)
