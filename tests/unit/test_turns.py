"""What goes from processes that collect to those that learn, and what of it waits in a checkpoint."""

import pickle

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from vla_algos import parallel
from vla_algos.groups import Group
from vla_algos.run.checkpoints import CheckpointError
from vla_algos.run.resume import ResumableRun
from vla_algos.run.roles import Roles
from vla_algos.run.turns import Turns, _plain, _sent, _unplain
from vla_common.texts import decode
from vla_envs.instructions import Instructions
from vla_policies.sharding import shard


def rows():
    """Eight slots ``[8, 5]`` with 4 kB in each."""
    texts = torch.stack([Instructions.of([f"task {slot}, {time}" for slot in range(8)]) for time in range(5)], dim=1)
    return TensorDict({"a": torch.rand(8, 5, 200), "texts": texts, "next": {"reward": torch.rand(8, 5, 1)}}, [8, 5])


def test_a_share_is_sent_without_the_rows_beside_it():
    batch = rows()
    whole, share = len(pickle.dumps(_sent(batch))), len(pickle.dumps(_sent(batch[2:4])))
    assert share < whole / 3
    assert (_sent(batch[2:4])["a"] == batch[2:4]["a"]).all()
    [group] = _sent([Group((batch[2], batch[3]), 1)])
    assert len(pickle.dumps(group)) < whole / 3
    assert (group.crashed, len(group.episodes)) == (1, 2)


@pytest.mark.parametrize("shape", ["batch", "groups", "nothing"])
def test_what_waits_is_plain_and_comes_back(shape):
    batch = rows()
    waits = {"batch": batch, "groups": [Group((batch[2], batch[3]), 1), Group((), 2)], "nothing": None}[shape]
    back = _unplain(_plain(waits))
    found = back if shape == "batch" else back[0].episodes[1] if shape == "groups" else None
    expected = batch if shape == "batch" else batch[3]
    if found is None:
        assert back is None
        return
    assert (found["a"] == expected["a"]).all()
    assert (found["next", "reward"] == expected["next", "reward"]).all()
    assert found.batch_size == expected.batch_size
    assert decode(found["texts"]) == decode(expected["texts"])


def test_a_state_of_other_roles_is_refused():
    """Batches that wait for an actor would be lost where it is none any more."""
    apart, together = Roles((0,), (1,), {1: (0,)}, rank=1), Roles((0, 1), (1,), {1: (1, 0)}, rank=1)
    state = Turns(torch.nn.Linear(1, 1), 0, 1, together).state_dict()
    Turns(torch.nn.Linear(1, 1), 0, 1, together).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"had actors \[0, 1\] and rollouts \[1\].*resume=elastic"):
        Turns(torch.nn.Linear(1, 1), 0, 1, apart).load_state_dict(state)


def test_who_only_collects_writes_no_weights(tmp_path):
    """Not even where its policy is one of FSDP's, in a group of its own, whose parts each process writes."""
    policy = torch.nn.Linear(2, 2)
    shard(policy, parallel.device_mesh(1))
    run = ResumableRun(tmp_path, policy, {}, every=1)
    run.finish(1)
    run.wait()
    torch.distributed.destroy_process_group()
    [written] = (tmp_path / "checkpoints" / "step_00000001" / "tensors").iterdir()
    assert [name for name in load_file(written) if name.startswith("weights")] == []
