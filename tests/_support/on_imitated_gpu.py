"""``python on_imitated_gpu.py``: a line of JSON for everything that policies, worlds and a learner do on either device.

Each says what was tried, with ``null`` or the error. Worlds of a GPU are simulated together, as ManiSkill's on CUDA.
A last line has how often the host waits for the GPU: ``{family: [in a decision, in an optimizer step]}``.
"""

import json
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path

import imitated_gpu
import torch
from walker import walker_spec

from vla_algos import BehaviourCloning, EpisodeCollector, Learner, StepCollector, collect_groups, evaluate, gae, grpo
from vla_algos.losses import ChunkClipPPOLoss
from vla_common import keys
from vla_envs import EpisodeSampler, VLAEnv, evaluation_episodes
from vla_policies import (
    OpenVLA,
    OpenVLAOFT,
    Pi0,
    SmallFlow,
    SmallFlowConfig,
    SmallVLA,
    SmallVLAConfig,
    SmolVLA,
    load_policy,
)
from vla_policies.tiny import make_tiny

SIZES = {"action_low": (-1.0,) * 4, "action_high": (1.0,) * 4, "state_dim": 4, "chunk_size": 2, "dim": 8, "heads": 2}
SIZES |= {"layers": 1, "channels": (4, 4, 4), "keypoints": 4, "text_buckets": 32}


def families(folder):
    """Functions of a device; those of checkpoints are slow, and tried on the GPU alone."""
    for kind in ("openvla_oft_rlinf", "pi0", "smolvla_metaworld"):
        make_tiny(kind, folder / kind)
    oft = {"benchmark": "metaworld", "layout": "rlinf", "num_action_chunks": 2, "value_head": True}
    pi0 = {"benchmark": "metaworld", "config_name": "pi0_metaworld", "num_action_chunks": 2, "num_steps": 2}
    openvla = {"benchmark": "metaworld", "value_head": True}
    smolvla = {"benchmark": "metaworld", "num_action_chunks": 2, "num_steps": 2, "value_head": True}
    return {
        "small": lambda device: SmallVLA(SmallVLAConfig(num_bins=8, **SIZES)).to(device),
        "small_flow": lambda device: SmallFlow(SmallFlowConfig(value_head=True, num_steps=2, **SIZES)).to(device),
        "openvla_oft": lambda d: OpenVLAOFT.from_pretrained(folder / "openvla_oft_rlinf", device=d, **oft),
        "openvla": lambda d: OpenVLA.from_pretrained(folder / "openvla_oft_rlinf", device=d, **openvla),
        "pi0": lambda d: Pi0.from_pretrained(folder / "pi0", device=d, value_head=True, **pi0),
        "smolvla": lambda d: SmolVLA.from_pretrained(folder / "smolvla_metaworld", device=d, **smolvla),
    }


def make_env(device, chunk):
    """Two worlds of Meta-World's shape; with 0 as the goal about half of the episodes succeed."""
    spec = walker_spec(horizon=5, goal=0.0, action_dim=4)
    spec = replace(spec, id="metaworld/walker", state_dim=4, image_shape=(16, 16))
    if device != "cpu":
        where = {**spec.options, "device": device}
        spec = replace(spec, batched="batched_walkers:BatchedWalkers", options=where)
    return VLAEnv(spec, 2, chunk, EpisodeSampler(spec, 0), num_workers=1)


def learn(policy, batch, **settings):
    loss = ChunkClipPPOLoss(policy, reference_kl_coeff=0.1, **settings)
    Learner(loss, lr=1e-3, minibatch_size=8, micro_batch_size=4, aggregation="trajectory_mean").update(batch)


def ppo(policy, env):
    collector = StepCollector(env, policy, 2)
    batch = gae(collector.rollout())
    learn(policy, batch, entropy_coeff=0.01)
    collector.load_state_dict(collector.state_dict())
    collector.rollout()


def group_relative(policy, env):
    groups = collect_groups(EpisodeCollector(env, policy), EpisodeSampler(env.simulator_spec, 0, group_size=4), 1, 8)
    learn(policy, grpo(groups), critic_coeff=None)


def cloning(policy, env):
    shown = policy(env.reset()).select(*policy.loss_keys, keys.STATES, keys.ACTION, strict=False).cpu()
    shown[keys.STEP_MASK] = torch.ones(2, policy.chunk_size, dtype=torch.bool)
    learner = BehaviourCloning(policy, shown, steps=2, batch_size=2)
    learner.step()
    learner.evaluate(shown)


def evaluation(policy, env):
    evaluate(env, policy, evaluation_episodes(env.simulator_spec, 2, seed=1), record=1)


def saving(policy, env):
    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder)
        load_policy(folder, device=policy.device) if policy.needs_checkpoint else load_policy(folder).to(policy.device)


def count_waits(policy, env):
    """Worlds in host memory, policy on the GPU; the second time, when what can be kept there is there."""
    observed = env.reset()
    batch = gae(StepCollector(env, policy, 4).rollout())
    counts = []
    for epochs in (1, 1, 2):
        imitated_gpu.WAITS.clear()
        policy(observed.clone())
        counts.append(imitated_gpu.WAITS.total())
        learner = Learner(ChunkClipPPOLoss(policy), lr=1e-3, minibatch_size=8, epochs=epochs, max_log_ratio=None)
        imitated_gpu.WAITS.clear()
        learner.update(batch.clone())
        counts.append(imitated_gpu.WAITS.total())
    return counts[2], counts[5] - counts[3]


WORK = {"ppo": ppo, "grpo": group_relative, "cloning": cloning, "evaluation": evaluation, "saving": saving}
GPU = "gpu:0"
DEVICES = {"small": [(GPU, GPU), (GPU, "cpu"), ("cpu", GPU)]}  # of policy and worlds
DEVICES |= {each: [(GPU, GPU)] for each in ("small_flow", "openvla_oft", "openvla", "pi0", "smolvla")}


def main():
    torch.set_num_threads(1)
    imitated_gpu.begin()
    waits = {}
    with tempfile.TemporaryDirectory() as folder:
        for family, make in families(Path(folder)).items():
            for devices in DEVICES[family]:
                torch.manual_seed(0)
                policy = make(devices[0])
                env = make_env(devices[1], policy.chunk_size)
                for name, work in WORK.items():
                    try:
                        work(policy, env)
                        error = None
                    except Exception:
                        error = traceback.format_exc()
                    print(json.dumps([family, *devices, name, error]), flush=True)
                env.close()
            policy = make(GPU)
            env = make_env("cpu", policy.chunk_size)
            waits[family] = count_waits(policy, env)
            env.close()
    print(json.dumps(waits))


if __name__ == "__main__":
    sys.exit(main())
