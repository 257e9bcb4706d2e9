"""What ``memory`` calculates for models of billions of parameters, beside the storages that an update of them makes.

They are fake: shapes without memory. (torch.distributed._tools.mem_tracker takes no model with frozen parameters.)
"""

import sys
import weakref
from argparse import Namespace

import pytest
import torch
from paths import ROOT
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from vla_common import keys
from vla_policies.memory import GB, PROMPT_LENGTH, MemoryPlan, PolicyMemory

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_check
import policies

REAL = Namespace(tiny=False, device="cpu")  # sizes
ROWS = 8


class Storages(TorchDispatchMode):
    """The bytes that there are, and the most so far; numbers that are read are made up: all is valid."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self._known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            return {torch.bool: True, torch.int64: PROMPT_LENGTH - 1}.get(args[0].dtype, 1.0)
        made = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._count, made)
        return made

    def _count(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, address, size):
        self._known.discard(address)
        self.now -= size


def openvla_oft(monkeypatch):
    monkeypatch.setattr(policies, "PROMPT_LENGTH", PROMPT_LENGTH)
    policy = gpu_check.openvla_oft(REAL)
    policy.model.set_gradient_checkpointing(False)
    return policy, policies.make_batch(policy, ROWS)


def pi0(monkeypatch):
    policy = gpu_check.pi0(REAL)
    chain = torch.zeros(ROWS, 2, policy.horizon, policy.model_action_dim)
    batch = {keys.DENOISE_CHAIN: chain, keys.DENOISE_STEP: torch.zeros(ROWS, dtype=torch.int64)}
    batch[keys.DENOISED] = torch.zeros(ROWS, policy.chunk_size, policy.action_dim)
    batch[keys.MODEL_IMAGES] = torch.zeros(ROWS, 2, 224, 224, 3, dtype=torch.uint8)
    batch[keys.PROMPT_TOKENS] = torch.ones(ROWS, PROMPT_LENGTH, dtype=torch.int64)
    return policy, TensorDict({**batch, keys.STATES: torch.zeros(ROWS, policy.state_dim)}, [ROWS])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("make", "checkpointing"), [(openvla_oft, False), (pi0, True)])
def test_an_update_takes_what_is_calculated_to_a_tenth(make, checkpointing, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_, **__: self)  # fake tensors cannot be swapped
    with FakeTensorMode(allow_non_fake_inputs=True), Storages() as storages:
        policy, batch = make(monkeypatch)
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        moments = [torch.empty_like(each) for each in trained for _ in range(2)]
        storages.most = storages.now  # not what making it took
        log_prob, entropy, value = policy.evaluate_actions(batch)
        (log_prob.mean() + entropy.mean() + value.mean()).backward()
    calculated, _ = PolicyMemory(policy).gigabytes(MemoryPlan(), checkpointing=checkpointing, decisions=ROWS)
    assert calculated == pytest.approx(storages.most / GB, rel=0.1), len(moments)
