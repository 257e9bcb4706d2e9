"""Self-imitation: which decisions are kept, what is cloned of them, in one process and in two, and over a resume."""

import pytest
import torch
from decisions import decisions
from forked import together
from tensordict import TensorDict
from tiny_policies import small_flow
from toy import ToyActorCritic

from vla_algos import SelfImitation, distributed
from vla_algos.interventions import Interventions
from vla_algos.run.plain_state import from_json, to_json
from vla_algos.self_imitation import in_solved_episodes
from vla_common.keys import DENOISE_CHAIN, DONE, NEXT, STATES, STEP_MASK, SUCCESS, TASK_ID, TRIAL_ID
from vla_policies import SmallVLA, SmallVLAConfig
from vla_policies.sharding import shard

CASES = {  # success so far, and where episodes end, both by decision: what is kept
    "solved, then one that is not": ("0011000", "0001001", "1111000"),
    "not solved, then solved": ("0000011", "0010001", "0001111"),
    "solved, but not over": ("0000001", "0000000", "1111111"),
    "continues after it is solved": ("0111100", "0000100", "1111100"),
    "never solved": ("0000000", "0100100", "0000000"),
    "each decision is an episode": ("1010101", "1111111", "1010101"),
}


def bits(text):
    return torch.tensor([[character == "1"] for character in text])


@pytest.mark.parametrize("case", CASES)
def test_decisions_of_episodes_that_were_solved(case):
    success, done, expected = map(bits, CASES[case])
    assert torch.equal(in_solved_episodes(success[None], done[None])[0], expected)


def make_policy():
    torch.manual_seed(0)
    return SmallVLA(SmallVLAConfig((-1.0,) * 2, (1.0,) * 2, 3, chunk_size=2, num_bins=5))


def rollout(policy, rows=4, steps=5, seed=0):
    """``[rows, steps]`` decisions, of which the even rows are one solved episode each."""
    batch = decisions(policy, rows * steps, seed=seed).reshape(rows, steps)
    batch[NEXT, DONE] = torch.zeros(rows, steps, 1, dtype=torch.bool)
    batch[NEXT, DONE][:, -1] = True
    batch[NEXT, SUCCESS] = batch[NEXT, DONE].clone()
    batch[NEXT, SUCCESS][1::2] = False
    batch[TASK_ID] = batch[TRIAL_ID] = torch.arange(rows)[:, None].expand(rows, steps).clone()
    return batch


def gradients(policy):
    return {name: weight.grad.clone() for name, weight in policy.named_parameters() if weight.grad is not None}


def test_the_newest_solved_decisions_are_cloned():
    policy = make_policy()
    solved = SelfImitation(policy, coeff=0.5, capacity=25, batch_size=6)
    batches = [rollout(policy, seed=seed) for seed in range(3)]
    for number, batch in enumerate(batches):
        solved.extend(batch)
        solved.add_gradient()
        assert solved.metrics()["self_imitation/decisions"] == min(10 * (number + 1), 25)
        assert bool(gradients(policy)) == (number == 2)  # four batches of 6 are stored first
        policy.zero_grad()
    kept = torch.cat([batch[::2].reshape(-1) for batch in batches])[-25:]
    assert torch.equal(solved.state_dict()[STATES], kept[STATES])

    torch.manual_seed(5)
    solved.add_gradient()
    found = gradients(policy)
    torch.manual_seed(5)
    drawn = kept[torch.randint(25, (6,))]
    policy.zero_grad()
    loss = policy.imitation_loss(drawn, sigma=0.1)[drawn[NEXT, STEP_MASK]].mean()
    (0.5 * loss).backward()
    assert solved.metrics()["self_imitation/loss"] == pytest.approx(loss.item())
    for name, expected in gradients(policy).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("equal", "share"), [("decisions", 0.1), ("episodes", 0.25), ("tasks", 0.5)])
def test_what_is_drawn_equally_often(equal, share):
    """Of a task one episode of two decisions, of another two of eight and one of two."""
    solved = SelfImitation(make_policy(), coeff=1.0, batch_size=4000, equal=equal)
    task, trial = (
        torch.tensor(each).repeat_interleave(torch.tensor([2, 8, 8, 2])) for each in ([0, 1, 1, 1], [5, 5, 6, 7])
    )
    drawn = solved._draw(TensorDict({TASK_ID: task, TRIAL_ID: trial}, [20]))
    assert (task[drawn] == 0).float().mean().item() == pytest.approx(share, abs=0.03)
    assert drawn.unique().tolist() == list(range(20))


def test_a_checkpoint_keeps_them():
    policy = make_policy()
    solved, resumed = (SelfImitation(policy, coeff=1.0, capacity=8, batch_size=2) for _ in range(2))
    resumed.load_state_dict(solved.state_dict())  # empty, as at the first iteration
    solved.extend(rollout(policy))
    text, tensors = to_json(solved.state_dict())
    state, empty = from_json(text, "cpu")
    for name, tensor in empty.items():
        tensor.copy_(tensors[name])
    resumed.load_state_dict(state)
    found = []
    for each in (solved, resumed):
        each.extend(rollout(policy, seed=1))
        torch.manual_seed(0)
        each.add_gradient()
        found.append(gradients(policy))
        policy.zero_grad()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    other = SelfImitation(policy, coeff=1.0, capacity=8, batch_size=2, equal="tasks")  # a run resumed otherwise
    other.load_state_dict(solved.state_dict())
    other.add_gradient()
    assert gradients(policy)
    policy.zero_grad()
    without = SelfImitation(policy)
    without.load_state_dict(solved.state_dict())
    assert without.state_dict() == {}


def test_a_flow_may_sample_otherwise_after_a_resume():
    """With other denoising steps, of which no weight depends; what was drawn is not kept."""
    before, after = small_flow(None), small_flow(None, num_steps=3)
    solved, resumed = (SelfImitation(policy, coeff=1.0, batch_size=2) for policy in (before, after))
    solved.extend(rollout(before))
    assert DENOISE_CHAIN in before.loss_keys
    assert DENOISE_CHAIN not in solved.state_dict()
    resumed.load_state_dict(solved.state_dict() | {DENOISE_CHAIN: torch.zeros(10, 3)})  # of an older version
    resumed.extend(rollout(after, seed=1))
    resumed.add_gradient()
    assert resumed.metrics()["self_imitation/decisions"] == 20
    assert gradients(after)


def test_nothing_is_kept_without_a_coefficient():
    policy = make_policy()
    solved = SelfImitation(policy)
    solved.extend(rollout(policy))
    solved.add_gradient()
    assert [gradients(policy), solved.state_dict(), solved.metrics()] == [{}, {}, {}]


def test_a_policy_without_imitation_loss_is_refused():
    with pytest.raises(ValueError, match=r"ToyActorCritic has no imitation_loss: .* self_imitation\.coeff=0"):
        SelfImitation(ToyActorCritic(), coeff=1.0)
    with pytest.raises(ValueError, match=r"ToyActorCritic has no imitation_loss: .*demonstrations\.episodes=0"):
        Interventions(ToyActorCritic())


def imitate(rows, shards=None):
    """The gradient and the loss of one step, of what this process's rows and those of the others have solved."""
    policy = make_policy()
    batch = rollout(policy)[rows[distributed.rank()]]
    if shards is not None:
        shard(policy, distributed.device_mesh(shards))
    solved = SelfImitation(policy, coeff=1.0, capacity=10, batch_size=7)
    solved.extend(batch)
    torch.manual_seed(3 + distributed.rank())  # what is drawn, the first process says
    solved.add_gradient()
    found = gradients(policy)
    return {name: each.full_tensor() if shards else each for name, each in found.items()}, solved.metrics()


@pytest.mark.parametrize("shards", [1, 2])
def test_two_processes_clone_what_one_clones(shards, tmp_path):
    alone, logged = imitate([slice(0, 4)])
    rows = [slice(0, 3), slice(3, 4)]  # the second has solved nothing
    for found, metrics in together(imitate, tmp_path, rows, shards):
        assert metrics == pytest.approx(logged)
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-7)
