"""Weights from those that train to those that roll out, in processes of their own: bits, bytes, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from openvla_checkpoint import make_checkpoint as make_openvla
from tiny_policies import adapted, openvla, small, small_flow
from together import together
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from toy import ToyActorCritic, ToyEnv

from vla_algos import parallel
from vla_algos.advantages import gae
from vla_algos.collectors import StepCollector
from vla_algos.learner import Learner
from vla_algos.losses import ChunkClipPPOLoss
from vla_algos.weight_sync import TrainedWeightSyncScheme, trained_tensors
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


def sync(policy, scheme, receives, change=changed):
    """Three transfers: of the beginning, of what was trained, and of what was kept before that; states after each."""
    seen = []
    init = scheme.init_on_receiver if receives else scheme.init_on_sender
    init(model_id="policy", model=policy)
    scheme.connect()
    seen.append(state(policy) if receives or dist.get_rank() < 2 else None)
    kept = {name: tensor.clone() for name, tensor in trained_tensors(policy).items()}
    for given in (None, kept):
        if receives:
            assert scheme.receive() is policy
        else:
            change(policy, len(seen))
            scheme.send(given)
        seen.append(state(policy))
    return seen, scheme.transfer


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
    return sync(policy, TrainedWeightSyncScheme(group), receives)


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
    (sent, _), (_, _), (received, transfer) = (each[name, mesh] for each in found)
    torch.manual_seed(0)
    policy = MADE[name](folder)
    for before, after in ((sent[0], received[0]), (sent[1], received[1]), (sent[0], received[2])):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
    trained = trained_tensors(policy)
    assert all(not torch.equal(sent[0][key], sent[1][key]) for key in trained if sent[0][key].any())
    assert transfer.bytes == sum(tensor.numel() * tensor.itemsize for tensor in trained.values())
    if name == "openvla with adapters":
        assert transfer.bytes < 0.2 * sum(tensor.numel() * tensor.itemsize for tensor in sent[0].values())
        frozen = {key for key, parameter in policy.named_parameters() if not parameter.requires_grad}
        assert not frozen & trained.keys()
        assert all(torch.equal(sent[0][key], sent[1][key]) for key in frozen)
    assert 0 < transfer.seconds == transfer.metrics()["time/weight_sync"] < 60


def test_weights_are_rounded_before_they_are_sent(found):
    (sent, sending), (_, _), (received, transfer) = (each["rounded"] for each in found)
    for before, after in zip((sent[0], sent[1], sent[0]), received, strict=True):
        for key, tensor in before.items():
            assert torch.equal(tensor.to(after[key].dtype), after[key])
    floating = sum(tensor.numel() for tensor in sent[0].values() if tensor.is_floating_point())
    assert transfer.bytes == sending.bytes == 2 * floating


# ---- not sharded


def odd_tensors():
    """What one process has is not what the other has, until it was sent; process 0 has nothing to do with it."""
    torch.manual_seed(dist.get_rank())
    policy, group, everyone = Odd(), dist.new_group([1, 2]), dist.new_group([1, 2])
    before = {**state(policy), "scratch": policy.scratch.clone()}
    if dist.get_rank() > 0:
        scheme = TrainedWeightSyncScheme(group, sender=2, everyone=everyone)
        (scheme.init_on_sender if dist.get_rank() == 2 else scheme.init_on_receiver)(model_id="policy", model=policy)
        scheme.connect()
    return before, {**state(policy), "scratch": policy.scratch.clone()}


def test_tensors_of_every_kind_and_another_sender(found):
    _, (before, after), (sent, still) = (each["odd"] for each in found)
    assert all(torch.equal(still[name], sent[name]) for name in sent)
    for name in ("weight", "rounded", "strided", "count", "flags", "empty"):
        assert torch.equal(after[name], sent[name])
    for name in ("frozen", "scratch"):
        assert torch.equal(after[name], before[name])


def with_collectors(iterations):
    """Process 0 learns from what process 2 collects, with the weights of the moment: PPO without a lag."""
    torch.manual_seed(0)
    policy, group, everyone = ToyActorCritic(), dist.new_group([0, 2]), dist.new_group([0, 2])
    scheme = TrainedWeightSyncScheme(group, everyone=everyone)
    if dist.get_rank() == 1:
        return None
    if dist.get_rank() == 0:
        scheme.init_on_sender(model_id="policy", model=policy)
        scheme.connect()
        with pytest.MonkeyPatch.context() as patch:  # the one that learns
            patch.setattr(parallel, "world_size", lambda: 1)
            learner = Learner(ChunkClipPPOLoss(policy), lr=3e-3, epochs=2, minibatch_size=16)
            random = torch.Generator().manual_seed(9).get_state()
            for _ in range(iterations):
                box = [None]
                dist.recv_object_list(box, src=2)
                torch.set_rng_state(random)
                learner.update(gae(box[0]))
                random = torch.get_rng_state()
                scheme.send()
        return state(policy)
    collector = StepCollector(ToyEnv(6), policy, 7)
    torch.manual_seed(5)
    collector.worker_idx = 0
    collector.register_scheme_receiver({"policy": scheme})
    for _ in range(iterations):
        dist.send_object_list([collector.rollout()], dst=0)
        collector.receive_weights()
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
    """Messages of what cannot be, in every process."""
    rank, found = dist.get_rank(), {}
    group = dist.new_group([0, 2])

    def attempt(name, work, error=ValueError):
        with pytest.raises(error) as raised:
            work()
        found[name] = str(raised.value)

    def scheme_of(policy, receives, **options):
        scheme = TrainedWeightSyncScheme(group, **options)
        (scheme.init_on_receiver if receives else scheme.init_on_sender)(model_id="policy", model=policy)
        return scheme

    torch.manual_seed(0)
    mine, other = ToyActorCritic(), ToyActorCritic(values=3)
    attempt("another policy", scheme_of(other if rank == 2 else mine, rank == 2).connect)
    attempt("nobody receives", scheme_of(mine, False).connect)
    attempt("the sender rolls out", scheme_of(mine, rank == 2, sender=2).connect)
    scheme = scheme_of(mine, rank == 2)
    scheme.connect()
    if rank == 2:
        attempt("a time-out", lambda: scheme.receive(timeout=1.0))
    else:
        attempt("workers", lambda: scheme.send(worker_ids=[0]))
        attempt("other weights", lambda: scheme.send(other))
        attempt("not all", lambda: scheme.send({}))
    attempt("no policy", lambda: TrainedWeightSyncScheme(group).init_on_sender(model_id="policy"))
    with pytest.raises(RuntimeError):
        TrainedWeightSyncScheme(group).send()
    return found


def test_what_cannot_be_is_refused_in_all_processes(found):
    everybodys = [each["refused"] for each in found]
    for name in ("another policy", "nobody receives", "the sender rolls out"):
        assert len({found[name] for found in everybodys}) == 1
        assert "\n" not in everybodys[0][name]
    assert everybodys[0]["another policy"] == (
        "process 2 rolls out another policy than process 0 trains: 2 of 6 tensors differ, such as: value_head.weight "
        "is [1, 16] and there [3, 16]; make both with the same policy settings"
    )
    assert "of [0, 1, 2] that train, to []" in everybodys[0]["nobody receives"]
    assert "process 2 is to send weights, of [0, 1] that train, to [2]" in everybodys[0]["the sender rolls out"]
    assert "time-out of the group" in everybodys[2]["a time-out"]
    assert "leave worker_ids out" in everybodys[1]["workers"]
    assert "2 are missing or have another shape, such as value_head.weight" in everybodys[0]["other weights"]
    assert "6 are missing" in everybodys[0]["not all"]
    assert "pass model=policy" in everybodys[0]["no policy"]
