"""Several processes that learn together learn what one would learn alone."""

import functools
import itertools
import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from decisions import collected, decisions
from forked import together
from tensordict.nn import TensorDictModuleBase
from tiny_policies import clipped, small
from torch import nn
from torchrl.objectives import ClipPPOLoss
from toy import ToyActorCritic
from walker import Walker, walker_spec

from vla_algos import distributed
from vla_algos.advantages import gae
from vla_algos.distributed import assign_rows
from vla_algos.learner import Learner
from vla_algos.losses import ChunkClipPPOLoss
from vla_algos.run.environments import own_share
from vla_common.keys import ACTION_LOG_PROB, ACTION_TOKENS, ADVANTAGE, NEXT, STATE_VALUE, STATES, VALUE_TARGET
from vla_policies.sharding import ShardGroup, gathered, reshard, shard

pytestmark = pytest.mark.timeout(600)
UPDATES = {
    "every token": {},
    "every trajectory": {"aggregation": "trajectory_mean"},
    "until the KL is too large": {"target_kl": 0.003, "epochs": 20},
    "so many steps": {"minibatch_size": None, "minibatches": 3},
    "the critic first": {"critic_warmup_steps": 3},
    "in passes of three": {"micro_batch_size": 3, "recompute_log_prob": True},
    "computed before": {"policy": "ComputesBefore"},
    "adapters": {"policy": "Adapted", "micro_batch_size": 3},
    "a gradient that is not finite": {"advantage": torch.inf},
    "a loss of TorchRL's": {"loss": "torchrl", "micro_batch_size": 3},
    "fewer than processes": {"minibatch_size": 1, "epochs": 1, "updates": 1},
}
SHARDS = {"sharded (2, 1)": 1, "sharded (1, 2)": 2}  # (replicas, shards)
NO_MEANS = {"train/max_ratio", "train/explained_variance"}  # TorchRL's: of parts of a minibatch they are others
SPLITS = {
    "halves": [slice(0, 3), slice(3, 6)],
    "a part and the rest": [slice(0, 1), slice(1, 6)],
    "all and nothing": [slice(0, 6), slice(6, 6)],
}
CASES = [(name, "halves") for name in UPDATES]
CASES += [
    (name, split) for name in ("every token", "computed before", "in passes of three") for split in list(SPLITS)[1:]
]
# Where each process has all weights, what averages gradients in a way of its own.
AVERAGED = {"every token", "in passes of three", "adapters", "a gradient that is not finite", "fewer than processes"}
CASES_OF = {"sharded (2, 1)": [case for case in CASES if case[0] in AVERAGED], "sharded (1, 2)": CASES}


class ComputesBefore(ToyActorCritic):
    """With an offset of its logits that it computes before an update, filled up to the longest of its decisions."""

    def precompute(self, td):
        counts = td[STATES][:, 0].long()  # no two processes have the same longest
        td["offsets"] = (torch.arange(1 + int(counts.max())) < counts.unsqueeze(-1)).float()
        td["trial"] = td[STATES][:, 2]
        return td

    def _run(self, td):
        dist, value = super()._run(td)
        if td.get("offsets", None) is not None:  # as they were computed for these very rows, wherever they are now
            assert torch.equal(td["offsets"].sum(1), td[STATES][:, 0])
            assert torch.equal(td["trial"], td[STATES][:, 2])
        return dist, value


class Adapted(ToyActorCritic):
    """With frozen blocks in its middle, of which little is trained: its gradients are summed after the last pass."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*self.body[:-1], Block(), Block(), self.body[-1])

    def shard_groups(self):
        return [ShardGroup(block) for block in self.body if isinstance(block, Block)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)).requires_grad_(False)
        self.adapter = nn.Linear(16, 16)

    def forward(self, features):
        return features + self.frozen(features) + self.adapter(features)


class Critic(TensorDictModuleBase):
    """The values of a policy, for a loss of TorchRL's."""

    out_keys = [STATE_VALUE]

    def __init__(self, policy):
        super().__init__()
        self.policy, self.in_keys = policy, list(policy.loss_keys)

    def forward(self, td):
        return td.set(STATE_VALUE, self.policy.evaluate_actions(td)[2])


def torchrl_loss(policy):
    loss = ClipPPOLoss(policy, Critic(policy), critic_coeff=0.5, functional=False)
    entries = {"advantage": ADVANTAGE, "value": STATE_VALUE, "value_target": VALUE_TARGET}
    loss.set_keys(action=ACTION_TOKENS, sample_log_prob=ACTION_LOG_PROB, **entries)
    return loss


def learn(settings, rows, shards=None):
    """Three updates of this process's rows: weights, metrics and advantages."""
    settings = {"epochs": 2, "minibatch_size": 16, "max_log_ratio": 10.0, **settings}
    policy, batch = collected(globals()[settings.pop("policy", "ToyActorCritic")])
    batch = batch[rows[distributed.rank()]]
    outcomes = distributed.all_gather(batch.select(NEXT, STATE_VALUE))
    gae(outcomes)
    outcomes[ADVANTAGE][2, 3] = settings.pop("advantage", outcomes[ADVANTAGE][2, 3])
    batch.update(distributed.local_rows(outcomes, len(batch)).select(ADVANTAGE, VALUE_TARGET))
    if shards is not None:
        shard(policy, distributed.device_mesh(shards))
    if settings.pop("loss", None):
        loss = torchrl_loss(policy)
    else:
        loss = ChunkClipPPOLoss(policy, entropy_coeff=0.01, reference_kl_coeff=0.1)
    learner = Learner(loss, lr=3e-3, **settings)
    torch.manual_seed(1 + distributed.rank())  # the order of decisions is the first process's
    seen = [learner.update(batch.clone() if len(batch) else None) for _ in range(settings.get("updates", 3))]
    weights = {
        name: weight.full_tensor() if shards is not None else weight for name, weight in policy.state_dict().items()
    }
    return weights, seen, outcomes[ADVANTAGE]


@functools.cache
def learn_alone(name):
    """What one process learns of all rows."""
    return learn(UPDATES[name], [slice(0, 6)])


def act_while_gathered(shards):
    """Log-probabilities of a policy that acts as often as each process likes, before and after an update."""
    policy, batch = collected(Adapted)
    gae(batch)
    shard(policy, distributed.device_mesh(shards))
    learner = Learner(ChunkClipPPOLoss(policy), lr=3e-3, max_log_ratio=10.0)
    samples, seen = batch.reshape(-1), []
    for _ in range(2):
        with gathered(policy):
            for _ in range(3 * distributed.rank()):
                policy(samples.clone())
            seen.append(policy.evaluate_actions(samples)[0])
        with torch.no_grad():
            seen.append(policy.evaluate_actions(samples)[0])  # all together
        reshard(policy)  # the root is kept for a backward pass
        kept = sum(distributed.all_gather_object(sum(weight.to_local().numel() for weight in policy.parameters())))
        assert kept == sum(weight.numel() for weight in policy.parameters()) * 2 // shards
        learner.update(batch.clone() if distributed.rank() == 0 else None)
    return seen


@pytest.mark.parametrize("shards", [1, 2])
def test_a_sharded_policy_acts_while_it_is_gathered(shards, tmp_path):
    found = together(act_while_gathered, tmp_path, shards)
    for gathered_before, before, gathered_after, after in found:
        assert torch.equal(gathered_before, before)
        assert torch.equal(gathered_after, after)
        assert not torch.equal(before, after)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_shards_divide_the_processes():
    with pytest.raises(ValueError, match="shards=2 does not divide the number of processes, 1: take 1 or all"):
        distributed.device_mesh(2)


def listening():
    """Addresses on which this process listens, as Linux writes them."""
    mine = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    lines = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine}


def exchange():
    return {
        "objects": distributed.all_gather_object(f"of {distributed.rank()}"),
        "largest": max(distributed.all_gather_object(distributed.rank() * 7)),
        "main": distributed.broadcast_object(distributed.rank()),
        "share": distributed.per_rank(6, "env.num_envs"),
        "for each": distributed.all_to_all([(distributed.rank(), other) for other in range(distributed.world_size())]),
    }


def exchange_and_listen():
    return exchange(), listening()


def learn_everything(mesh):
    return {(name, split): learn(UPDATES[name], SPLITS[split], SHARDS[mesh]) for name, split in CASES_OF[mesh]}


@functools.cache
def learn_together(mesh):
    """What was learnt, by rank; one start of the processes for all cases of a mesh."""
    with tempfile.TemporaryDirectory() as folder:
        return together(learn_everything, Path(folder), mesh, patience=580)


@pytest.mark.parametrize(("mesh", "name", "split"), [(mesh, *case) for mesh in SHARDS for case in CASES_OF[mesh]])
def test_two_processes_learn_what_one_learns(mesh, name, split):
    alone = learn_alone(name)
    found = [learnt[name, split] for learnt in learn_together(mesh)]
    for weights, seen, advantages in found:
        torch.testing.assert_close(advantages, alone[2], rtol=0, atol=0)
        for key, value in alone[0].items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6)
        for one, other in zip(seen, alone[1], strict=True):
            left, moved = one["train/imbalance"], one["train/moved"]  # at most one row of a minibatch is too many
            assert left == 2.0 if name == "fewer than processes" else 1.0 <= left <= 42 / 41
            assert (moved >= 0.4) == (split == "all and nothing" and name != "fewer than processes")
            expected = {**other, "train/imbalance": left, "train/moved": moved}
            expected |= {key: one[key] for key in NO_MEANS & one.keys()}
            assert one == {key: pytest.approx(value, abs=1e-5, nan_ok=True) for key, value in expected.items()}
    assert repr(found[0][1]) == repr(found[1][1])
    assert all(torch.equal(found[0][0][key], found[1][0][key]) for key in alone[0])


def test_what_is_exchanged_and_that_nothing_listens_beyond_the_machine(tmp_path):
    expected = {"objects": ["of 0", "of 1"], "largest": 7, "main": 0, "share": 3}
    expected_of = [{**expected, "for each": [(0, rank), (1, rank)]} for rank in (0, 1)]
    assert together(exchange_and_listen, tmp_path) == [(each, {"0100007F"}) for each in expected_of]  # 127.0.0.1
    alone = {"objects": ["of 0"], "largest": 0, "main": 0, "share": 6, "for each": [(0, 0)]}
    assert exchange() == alone


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_minibatches_are_dealt_evenly_and_only_the_surplus_moves(processes):
    generator = torch.Generator().manual_seed(processes)
    for rows in (1, 2, 7, 32, 128):
        owners = torch.randint(processes, (rows,), generator=generator)
        workers = assign_rows(owners, processes)
        had, have = (torch.bincount(each, minlength=processes) for each in (owners, workers))
        assert have.sum() == rows
        assert have.max() - have.min() <= 1
        fewest = [int((had - torch.tensor(shares)).clamp(min=0).sum()) for shares in even_shares(rows, processes)]
        assert (owners != workers).sum() == min(fewest)


def even_shares(rows, processes):
    larger = rows % processes
    for chosen in itertools.combinations(range(processes), larger):
        yield [rows // processes + (rank in chosen) for rank in range(processes)]


def test_who_stands_by_outlives_the_signals_of_a_job(monkeypatch):
    """It may have the store, which members need until they have saved."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        distributed._stand_by(store)
        os._exit(0)
    port = int(os.read(reading, 10))
    time.sleep(0.5)  # until it waits
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        os.kill(child, number)
    time.sleep(0.5)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set(distributed._ENDED, "")
    assert os.waitpid(child, 0) == (child, 0)


def test_a_process_dies_with_its_parent():
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            distributed._die_with_parent()
            os.write(writing, f"{os.getpid()}\n".encode())
        time.sleep(60)
        os._exit(0)
    child = int(os.read(reading, 100))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_is_alone_shards_too():
    """It has a group of one while it works, and none before and afterwards."""
    for _ in range(2):
        with distributed.process_group():
            assert not dist.is_initialized()
            mesh = distributed.device_mesh(1)
            assert mesh.shape == (1, 1)
            assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (0, 1, True)
            assert distributed.all_gather_object("mine") == ["mine"]
            torch.manual_seed(0)
            policy = small(None)
            batch = decisions(policy, 4)
            wanted = clipped(policy, batch, batch)
            shard(policy, mesh)
            assert torch.equal(clipped(policy, batch, batch), wanted)
        assert not dist.is_initialized()
    with pytest.raises(ValueError, match="shards=2 does not divide"), distributed.process_group():
        distributed.device_mesh(distributed.device_mesh(1).size() + 1)
    assert not dist.is_initialized()


def timeouts():
    data = {group._get_backend(torch.device("cpu")).options._timeout for group in (dist.group.WORLD, *groups())}
    return data, distributed._groups["control", ()]._get_backend(torch.device("cpu")).options._timeout


def groups():
    return distributed.device_mesh(1).get_all_groups()


def test_a_stopped_process_is_waited_for_so_long(tmp_path):
    assert together(timeouts, tmp_path) == [({timedelta(minutes=10)}, timedelta(hours=2))] * 2


@pytest.mark.parametrize(("gpus", "chosen"), [(1, []), (2, [1]), (8, [1])])
def test_each_process_has_a_gpu(gpus, chosen, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    distributed._choose_gpu(1, gpus)
    assert seen == chosen
    with pytest.raises(ValueError, match="process 9 of this machine has no GPU, there are 8: start as many processes"):
        distributed._choose_gpu(9, 8)


@pytest.mark.parametrize("can_choose", [True, False])
def test_each_process_draws_with_its_own_gpu_where_that_can_be_chosen(can_choose, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(distributed, "processes_started", lambda: 8)
    if can_choose:
        monkeypatch.setattr(Walker, "check_gpus", lambda spec, gpus: None, raising=False)
    assert own_share({"num_envs": 4, "gpus": None}, walker_spec(), processes=1)["gpus"] == (
        (3,) if can_choose else None
    )
