"""What goes from processes that collect to those that learn, and what of it waits in a checkpoint."""

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from vla_algos import distributed
from vla_algos.disaggregated.placement import Placement
from vla_algos.disaggregated.roles import Roles
from vla_algos.disaggregated.schedule import Schedule
from vla_algos.run.checkpoints import CheckpointError
from vla_algos.run.plain_state import from_json, to_json
from vla_algos.run.saving import Saver
from vla_common.texts import decode
from vla_envs.instructions import Instructions
from vla_policies.sharding import shard


def rows():
    """Eight slots ``[8, 5]`` with 4 kB in each."""
    texts = torch.stack([Instructions.of([f"task {slot}, {time}" for slot in range(8)]) for time in range(5)], dim=1)
    return TensorDict({"a": torch.rand(8, 5, 200), "texts": texts, "next": {"reward": torch.rand(8, 5, 1)}}, [8, 5])


def test_what_waits_is_plain_and_comes_back():
    batch, roles = rows(), Roles(Placement((0,), (0,), (0,), 1, 1), rank=0)
    one, other = (Schedule(torch.nn.Linear(1, 1), 0, 2, roles) for _ in range(2))
    for each in (batch, None):
        one._deliver_batch(each)
    text, tensors = to_json(one.state_dict())
    state, empty = from_json(text, "cpu")
    for name, tensor in empty.items():
        tensor.copy_(tensors[name])
    other.load_state_dict(state)
    back, nothing = other._waiting
    assert (back["a"] == batch["a"]).all()
    assert (back["next", "reward"] == batch["next", "reward"]).all()
    assert back.batch_size == batch.batch_size == back["next"].batch_size
    assert decode(back["texts"]) == decode(batch["texts"])
    assert decode(back[2:4].reshape(-1)["texts"]) == decode(batch[2:4].reshape(-1)["texts"])
    assert nothing is None


def test_a_state_of_other_roles_is_refused():
    """Batches that wait for an actor would be lost where it is none any more."""
    apart, together = (Roles(Placement(actors, (1,), (1,), 2, 2), rank=1) for actors in ((0,), (0, 1)))
    state = Schedule(torch.nn.Linear(1, 1), 0, 1, together).state_dict()
    Schedule(torch.nn.Linear(1, 1), 0, 1, together).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"had actors \[0, 1\] and rollouts \[1\]"):
        Schedule(torch.nn.Linear(1, 1), 0, 1, apart).load_state_dict(state)


def test_a_process_that_only_collects_writes_no_weights(tmp_path):
    """Not even where its policy is one of FSDP's, in a group of its own, whose parts each process writes."""
    policy = torch.nn.Linear(2, 2)
    shard(policy, distributed.device_mesh(1))
    saver = Saver(tmp_path)
    saver.save(1, {"policy": policy}, {"iteration": 1}, None)
    saver.wait()
    torch.distributed.destroy_process_group()
    [written] = (tmp_path / "step_00000001" / "tensors").iterdir()
    assert [name for name in load_file(written) if name.startswith("weights")] == []
