"""TorchRL's parts with real simulators: Meta-World with two instructions."""

from functools import partial

import pytest
import torch
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.envs import CatFrames, Compose, InitTracker, RewardSum, StepCounter, ToTensorImage, TransformedEnv
from torchrl.envs.utils import check_env_specs

from vla_algos import ChunkClipPPOLoss, Learner, StepCollector, evaluate, gae
from vla_common.texts import to_strings
from vla_envs import InstructionsToBytes, evaluation_episodes, make_env
from vla_policies import SmallVLA

TWO_TASKS = "metaworld/reach-v3+faucet-open-v3"
METAWORLD = {"image_size": 32, "render_quality": "fast", "max_episode_steps": 12}


def metaworld():
    pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'vla-torchrl[metaworld]'")


def make_bytes_env(num_envs=2, seed=0):
    env = make_env(TWO_TASKS, num_envs, 5, seed=seed, num_workers=1, **METAWORLD)
    return TransformedEnv(env, InstructionsToBytes())


def small(env):
    torch.manual_seed(0)
    return SmallVLA.make(env.base_env.simulator_spec, chunk_size=5)


def told(env, batch):
    """Whether every decision has the instruction of its task, and both tasks are there."""
    tasks = env.base_env.simulator_spec.tasks
    ids = batch["task_id"].flatten().tolist()
    return set(ids) == {0, 1} and to_strings(batch.reshape(-1)) == [tasks[i].instruction for i in ids]


def test_specs_of_metaworld():
    metaworld()
    env = make_env("metaworld/MT50", 2, 5, num_workers=1, **METAWORLD)
    check_env_specs(TransformedEnv(env, InstructionsToBytes()))
    env.close()


def test_collector_buffer_on_disk_and_an_update(tmp_path):
    """The script of a user who has a loop of TorchRL's parts."""
    metaworld()
    env = make_bytes_env(4)
    policy = small(env)
    buffer, again = (
        TensorDictReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path / name), batch_size=8)
        for name in ("one", "two")
    )
    for batch in Collector(env, policy, frames_per_batch=16, total_frames=32):
        assert told(env, batch)
        with torch.no_grad():
            policy.get_value_operator()(batch["next"])
        buffer.extend(gae(batch).reshape(-1))
    buffer.dumps(tmp_path / "saved")
    again.loads(tmp_path / "saved")
    assert told(env, again[:])
    assert torch.equal(again[:]["images"], buffer[:]["images"])
    loss = ChunkClipPPOLoss(policy)
    out = loss(again.sample())
    assert out["ratio"].item() == pytest.approx(1, abs=1e-5)
    assert Learner(loss, lr=1e-4, minibatch_size=16).update(again[:])["train/steps"] == 2


def test_transforms_over_a_simulator():
    metaworld()
    env = TransformedEnv(
        make_env(TWO_TASKS, 2, 5, seed=0, num_workers=2, **METAWORLD),
        Compose(
            ToTensorImage(in_keys=["images"], out_keys=["pixels"]),
            CatFrames(N=2, dim=-1, in_keys=["states"], out_keys=["two"]),
            RewardSum(),
            StepCounter(),
            InitTracker(),
        ),
    )
    policy = small(env)
    batch = StepCollector(env, policy, 4).rollout()
    assert batch["next", "truncated"].any()
    result = evaluate(env, policy, evaluation_episodes(env.base_env.simulator_spec, 1))
    assert {episode.task for episode in result.finished} == {"reach-v3", "faucet-open-v3"}
    env.close()


def test_simulators_in_two_processes_of_torchrl(forked_processes):
    metaworld()
    env = make_bytes_env()
    policy = small(env)
    collector = MultiSyncCollector(
        [make_bytes_env, partial(make_bytes_env, seed=1)], policy, frames_per_batch=16, total_frames=16, cat_results=0
    )
    try:
        batch = next(iter(collector))
        assert batch.shape == (4, 4)
        assert told(env, batch)
        trials = list(zip(*(batch[key][:, 0].tolist() for key in ("task_id", "trial_id")), strict=True))
        assert len(set(trials)) == 4
    finally:
        collector.shutdown()
        env.close()
