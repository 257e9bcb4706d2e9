"""PPO, GRPO, cloning, evaluation and saving with policy and worlds on a GPU or not: nothing mixes what lies on either.

The GPU is imitated: it shows tensors that are not where they should be, in a process of its own. It has no kernels.
"""

import json
from dataclasses import replace

import forked
import pytest
import torch
from on_imitated_gpu import DEVICES, WORK
from paths import ROOT
from walker import walker_spec

from vla_common import keys
from vla_envs import EpisodeSampler, VLAEnv

WAITS = {"small": (8, 27), "small_flow": (11, 30), "openvla_oft": (16, 29), "pi0": (21, 32)}
WAITS |= {"openvla": (26, 29), "smolvla": (20, 33)}
CASES = [(family, *devices, work) for family, tried in DEVICES.items() for devices in tried for work in WORK]


@pytest.fixture(scope="module")
def lines():
    done = forked.run(ROOT / "tests" / "_support" / "on_imitated_gpu.py", limit=480)
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


@pytest.mark.timeout(540)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_no_tensor_is_where_it_should_not_be(case, lines):
    assert not {tuple(tried): error for *tried, error in lines[:-1]}[case]


@pytest.mark.timeout(540)
@pytest.mark.parametrize("family", WAITS)
def test_the_host_waits_for_the_gpu_no_more_often_than_it_did(family, lines):
    """Each entry of a batch that goes there counts, and each that comes back."""
    assert all(count <= most for count, most in zip(lines[-1][family], WAITS[family], strict=True)), lines[-1]


def test_worlds_that_are_simulated_together_say_their_device_and_are_those_of_workers():
    spec = walker_spec()
    together = replace(spec, batched="batched_walkers:BatchedWalkers", options={**spec.options, "device": "cpu"})
    envs = [VLAEnv(each, 2, 3, EpisodeSampler(spec, 0), num_workers=1) for each in (spec, together)]
    try:
        assert [env.device for env in envs] == [torch.device("cpu")] * 2
        torch.manual_seed(0)
        action = torch.rand(2, 3, spec.action_dim)
        seen, same = (env.step(env.reset().set(keys.ACTION, action)) for env in envs)
        assert (seen == same).all()
    finally:
        for env in envs:
            env.close()
