"""Weights from those that train to those that roll out, in processes of their own: bits, bytes, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from forked import together
from openvla_checkpoint import make_checkpoint as make_openvla
from tiny_policies import adapted, openvla, small, small_flow
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from toy import ToyActorCritic, ToyEnv

from vla_algos import distributed
from vla_algos.advantages import gae
from vla_algos.collectors import StepCollector
from vla_algos.disaggregated.weight_sync import WeightSync, trained_tensors
from vla_algos.learner import Learner
from vla_algos.losses import ChunkClipPPOLoss
from vla_policies.sharding import shard

pytestmark = pytest.mark.timeout(600)


class Odd(nn.Module):
    """Tensors of all kinds: in bfloat16, frozen, of no dimension, empty, strided, whole numbers, truth values."""

    def __init__(self, folder=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.rounded = nn.Parameter(torch.randn(4, 3).to(torch.bfloat16))
        self.strided = nn.Parameter(torch.randn(4, 3).T)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("count", torch.tensor(int(torch.randint(99, ()))))
        self.register_buffer("flags", torch.rand(7) < 0.5)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scratch", torch.randn(3), persistent=False)


def flow(folder):
    return small_flow(folder, method="flow_noise")


MADE = {
    "small": small,
    "small flow": flow,
    "openvla": openvla,
    "openvla with adapters": adapted(lambda folder: openvla(folder, dtype=torch.bfloat16)),
}
MESHES = {"one copy": [[0, 1]], "two copies": [[0], [1]]}


def changed(policy, seed):
    """The policy after training: all that is trained, and the statistics of some, are others."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in trained_tensors(policy).items():
            if tensor.is_floating_point() and not isinstance(tensor, DTensor):
                tensor += 0.1 * torch.randn(tensor.shape).to(tensor.dtype)
            elif tensor.is_floating_point():
                tensor.mul_(1.5 + len(name) % 3)
    return policy


def state(policy):
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in policy.state_dict().items()
    }
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def transfers(policy, group, receives):
    """Two transfers: of the beginning, and of what was trained; states after each."""
    seen, sync = [], WeightSync(policy, group, receives=receives)
    for number in range(2):
        if number and not receives:
            changed(policy, number)
        sync.transfer()
        seen.append(state(policy))
    return seen, (sync.seconds, sync.bytes)


def one_policy(make, ranks, folder, rollout_dtype=None):
    receives = dist.get_rank() == 2
    torch.manual_seed(0)
    policy = make(folder)
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("replicas", "shards"))
    group = dist.new_group([0, 2])
    if receives:
        policy.to(rollout_dtype)
    else:
        changed(policy, 9)
        shard(policy, mesh)
    return transfers(policy, group, receives)


def several(folder):
    torch.manual_seed(0)
    found = {
        (name, mesh): one_policy(make, ranks, folder) for name, make in MADE.items() for mesh, ranks in MESHES.items()
    }
    found |= {"odd": odd_tensors(), "collector": with_collectors(3), "refused": refused()}
    found["rounded"] = one_policy(small, [[0, 1]], folder, torch.bfloat16)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    make_openvla(root / "openvla")
    return root


@pytest.fixture(scope="module")
def found(folder, tmp_path_factory):
    return together(several, tmp_path_factory.mktemp("sharded"), folder, processes=3, ends=(0, 0, 0))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MADE)
def test_of_two_sharded_actors_to_a_rollout_bit_for_bit(found, name, mesh, folder):
    (sent, _), (_, _), (received, (seconds, size)) = (each[name, mesh] for each in found)
    torch.manual_seed(0)
    policy = MADE[name](folder)
    for before, after in zip(sent, received, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
    trained = trained_tensors(policy)
    assert all(not torch.equal(sent[0][key], sent[1][key]) for key in trained if sent[0][key].any())
    assert size == sum(tensor.numel() * tensor.itemsize for tensor in trained.values())
    if name == "openvla with adapters":
        assert size < 0.2 * sum(tensor.numel() * tensor.itemsize for tensor in sent[0].values())
        frozen = {key for key, parameter in policy.named_parameters() if not parameter.requires_grad}
        assert not frozen & trained.keys()
        assert all(torch.equal(sent[0][key], sent[1][key]) for key in frozen)
    assert 0 < seconds < 60


def test_weights_are_rounded_before_they_are_sent(found):
    (sent, (_, sending)), (_, _), (received, (_, size)) = (each["rounded"] for each in found)
    for before, after in zip(sent, received, strict=True):
        for key, tensor in before.items():
            assert torch.equal(tensor.to(after[key].dtype), after[key])
    floating = sum(tensor.numel() for tensor in sent[0].values() if tensor.is_floating_point())
    assert size == sending == 2 * floating


# ---- not sharded


def odd_tensors():
    """What one process has is not what the other has, until it was sent; process 1 has nothing to do with it."""
    torch.manual_seed(dist.get_rank())
    policy, group = Odd(), dist.new_group([0, 2])
    before = {**state(policy), "scratch": policy.scratch.clone()}
    WeightSync(policy, group, receives=dist.get_rank() == 2).transfer()
    return before, {**state(policy), "scratch": policy.scratch.clone()}


def test_tensors_of_every_kind(found):
    (sent, still), _, (before, after) = (each["odd"] for each in found)
    assert all(torch.equal(still[name], sent[name]) for name in sent)
    for name in ("weight", "rounded", "strided", "count", "flags", "empty"):
        assert torch.equal(after[name], sent[name])
    for name in ("frozen", "scratch"):
        assert torch.equal(after[name], before[name])


def with_collectors(iterations):
    """Process 0 learns from what process 2 collects, with the weights of the moment: PPO without a lag."""
    torch.manual_seed(0)
    policy, group = ToyActorCritic(), dist.new_group([0, 2])
    sync = WeightSync(policy, group, receives=dist.get_rank() == 2)
    if dist.get_rank() == 1:
        return None
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:  # the one that learns
            patch.setattr(distributed, "world_size", lambda: 1)
            learner = Learner(ChunkClipPPOLoss(policy), lr=3e-3, epochs=2, minibatch_size=16)
            random = torch.Generator().manual_seed(9).get_state()
            for _ in range(iterations):
                box = [None]
                dist.recv_object_list(box, src=2)
                torch.set_rng_state(random)
                learner.update(gae(box[0]))
                random = torch.get_rng_state()
                sync.transfer()
        return state(policy)
    collector = StepCollector(ToyEnv(6), policy, 7)
    torch.manual_seed(5)
    for _ in range(iterations):
        dist.send_object_list([collector.rollout()], dst=0)
        sync.transfer()
    return state(policy)


def alone(iterations):
    torch.manual_seed(0)
    policy = ToyActorCritic()
    learner = Learner(ChunkClipPPOLoss(policy), lr=3e-3, epochs=2, minibatch_size=16)
    collector = StepCollector(ToyEnv(6), policy, 7)
    acting, learning = (torch.Generator().manual_seed(seed).get_state() for seed in (5, 9))
    for _ in range(iterations):
        torch.set_rng_state(acting)
        batch = collector.rollout()
        acting = torch.get_rng_state()
        torch.set_rng_state(learning)
        learner.update(gae(batch))
        learning = torch.get_rng_state()
    return state(policy)


def test_a_collector_that_is_sent_weights_learns_what_one_process_does(found):
    expected = alone(3)
    for weights in (found[0]["collector"], found[2]["collector"]):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    torch.manual_seed(0)
    assert not torch.equal(expected["value_head.weight"], ToyActorCritic().value_head.weight)


def refused():
    torch.manual_seed(0)
    policy = ToyActorCritic(values=3) if dist.get_rank() == 2 else ToyActorCritic()
    with pytest.raises(ValueError, match="another policy") as raised:
        WeightSync(policy, dist.new_group([0, 2]), receives=dist.get_rank() == 2)
    return str(raised.value)


def test_another_policy_is_refused_in_all_processes(found):
    assert [each["refused"] for each in found] == 3 * [
        "process 2 rolls out another policy than process 0 trains: 2 of 6 tensors differ, such as: value_head.weight "
        "is [1, 16] and there [3, 16]; make both with the same policy settings"
    ]
