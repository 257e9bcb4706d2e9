"""What ``memory`` calculates for models of billions of parameters, beside the storages that their passes make.

They are fake: shapes without memory. (torch.distributed._tools.mem_tracker takes no model with frozen parameters.)
"""

import sys
import weakref
from functools import partial

import pytest
import torch
from paths import ROOT
from simulators import some
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from vla_common import keys
from vla_policies import OpenVLA, OpenVLAOFT, SmolVLA
from vla_policies.memory import GB, PROMPT_LENGTH, MemoryPlan, PolicyMemory
from vla_policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
from vla_policies.tiny import make_tiny

sys.path.insert(0, str(ROOT / "benchmarks"))
import flow
import policies

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


def openvla(family, dtype, lora, checkpointing):
    policy = policies.make_policy("7b", "cpu", dtype, lora, checkpointing, *family)
    return policy, policies.make_batch(policy, ROWS)


def pi0(pi05, dtype, lora, checkpointing, frozen=False):
    how = {"dtype": dtype, "lora": lora, "checkpointing": checkpointing, "pi05": pi05}
    policy = flow.make_policy("published", 4, frozen, **how)
    return policy, of_a_chain(policy, 224)


def smolvla(policy):
    """The tiny one, whose files were read before, around networks of the published size."""
    policy.model = policy.published_model()
    policy.freeze()
    policy.make_heads()
    return policy, of_a_chain(policy, 512)


def of_a_chain(policy, side):
    chain = torch.zeros(ROWS, 2, policy.horizon, policy.model_action_dim)
    batch = {keys.DENOISE_CHAIN: chain, keys.DENOISE_STEP: torch.zeros(ROWS, dtype=torch.int64)}
    batch[keys.DENOISED] = torch.zeros(ROWS, policy.chunk_size, policy.action_dim)
    batch[keys.MODEL_IMAGES] = torch.zeros(ROWS, 2, side, side, 3, dtype=torch.uint8)
    batch[keys.PROMPT_TOKENS] = torch.ones(ROWS, PROMPT_LENGTH, dtype=torch.int64)
    return TensorDict({**batch, keys.STATES: torch.zeros(ROWS, policy.state_dim)}, [ROWS])


HALF, FULL = torch.bfloat16, torch.float32
OFT, OPENVLA = (OpenVLAOFT, OpenVLAOFTConfig), (OpenVLA, OpenVLAConfig)
CASES = {  # what is made, and whether blocks are computed again
    "OpenVLA-OFT, whole": (partial(openvla, OFT, FULL, 0, True), True),
    "OpenVLA-OFT, LoRA": (partial(openvla, OFT, HALF, 32, False), False),
    "OpenVLA, LoRA": (partial(openvla, OPENVLA, HALF, 32, True), True),
    "pi0, whole": (partial(pi0, False, FULL, 0, False), False),
    "pi0, LoRA": (partial(pi0, False, HALF, 32, True), True),
    "pi0, expert": (partial(pi0, False, FULL, 0, False, frozen=True), False),
    "pi0.5, expert": (partial(pi0, True, FULL, 0, False, frozen=True), False),
    "pi0.5, LoRA": (partial(pi0, True, HALF, 32, True), True),
}


def assert_calculated(make, checkpointing, monkeypatch):
    """As in the second part of a minibatch, when there are gradients; a frozen prefix is computed in it."""
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_, **__: self)  # fake tensors cannot be swapped
    monkeypatch.setattr(policies, "PROMPT_LENGTH", PROMPT_LENGTH)
    with FakeTensorMode(allow_non_fake_inputs=True), Storages() as storages:
        policy, batch = make()
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        moments = [torch.empty_like(each) for each in trained for _ in range(2)]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        storages.most = storages.now  # not what making it took
        log_prob, entropy, value = policy.evaluate_actions(batch)
        (log_prob.mean() + entropy.mean() + value.mean()).backward()
        del log_prob, entropy, value
        in_update, storages.most = storages.most / GB, storages.now
        with torch.no_grad():
            policy.evaluate_actions(batch)  # the largest pass of acting too
    memory = PolicyMemory(policy)
    sizes = {"checkpointing": checkpointing, "decisions": ROWS, "num_envs": ROWS, "keeps": False}
    update, rollout = memory.gigabytes(MemoryPlan(), **sizes)
    assert update == pytest.approx(in_update, rel=0.1), len(moments)
    assert rollout == pytest.approx(storages.most / GB, rel=0.1)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", some(CASES, 2))
def test_update_and_rollout_take_what_is_calculated_to_a_tenth(case, monkeypatch):
    assert_calculated(*CASES[case], monkeypatch)


@pytest.mark.timeout(400)
def test_so_does_smolvla_with_a_frozen_vlm(tmp_path, monkeypatch):
    tiny = make_tiny("smolvla", tmp_path / "tiny")
    policy = SmolVLA.from_pretrained(tiny, benchmark="libero", num_steps=4, value_head=True)
    assert_calculated(partial(smolvla, policy), False, monkeypatch)
