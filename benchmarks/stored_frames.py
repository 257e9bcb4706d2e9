"""What do stored frames cost? ``python benchmarks/stored_frames.py`` measures bytes of a decision and peak memory.

*Bytes*: the real policy classes (tiny random weights, their own preprocessing, 224 pixels) act in worlds with the
experiments' cameras, whose simulator draws noise; a collector stores what it stores. The table shows bytes of frames
per decision as observed and as stored, and both times the decisions of an iteration of the experiment.

*Peak memory*: two iterations of collecting and learning as the recipes do, with a policy of a few parameters so that
frames are all there is; most resident memory of this process above that before the first, over the bytes of the frames
of one batch as observed. With ``cameras`` the policy stores what was observed, with ``model_images`` what it sees. In
the GRPO half of the groups have no signal. Each line is a process of its own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import flow
import numpy as np
import policies
import torch
from tensordict import TensorDictBase
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from vla_algos import (
    ChunkClipPPOLoss,
    ChunkGRPOLoss,
    EpisodeCollector,
    Learner,
    StepCollector,
    collect_groups,
    gae,
    grpo,
)
from vla_common import keys
from vla_common.schema import get_schema
from vla_envs import Episode, EpisodeSampler, Observation, Outcome, SimulatorSpec, Task, VLAEnv, make_env
from vla_policies import OpenVLA, OpenVLAOFT, Pi0, VLAPolicy
from vla_policies.openvla.checkpoint import SPACE, OpenVLACheckpoint
from vla_policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
from vla_policies.openvla.model import BOS, Prismatic
from vla_policies.pi0.checkpoint import Pi0Checkpoint
from vla_policies.pi0.model import Pi0Model
from vla_policies.pi0.policy import Pi0Config
from vla_policies.processing.images import resize_exact
from vla_policies.processing.model_images import ModelImages


@dataclass(frozen=True)
class Case:
    """One experiment: whose frames, and how many decisions an iteration stores at most, all processes together."""

    experiment: str
    family: str
    benchmark: str
    images: int
    decisions: int
    config_name: str = ""


CASES = (
    Case("maniskill_ppo_openvla", "openvla", "maniskill", 1, 128 * 160),
    Case("maniskill_ppo_openpi", "pi0", "maniskill", 1, 320 * 16, "pi0_maniskill"),
    Case("metaworld_50_ppo_openpi", "pi0", "metaworld", 1, 64 * 160, "pi0_metaworld"),
    Case("libero_130_grpo_openvlaoft", "openvla_oft", "libero", 1, 512 * 8 * 64),
    Case("libero_10_ppo_openpi", "pi0", "libero", 2, 64 * 384, "pi0_libero"),
)


class Noise:
    """A world of noise. Of even trials half the episodes end in success, decided by the first action; others fail."""

    def __init__(self, spec: SimulatorSpec):
        self.spec, self._random = spec, np.random.default_rng(0)

    def reset(self, episode: Episode) -> None:
        self._even, self._step = episode.trial_id % 2 == 0, 0

    def step(self, action: np.ndarray) -> Outcome:
        self._step += 1
        if self._step == 1:
            self._right = self._even and bool(action[0] > 0)
        success = self._right and self._step == self.spec.max_episode_steps
        return Outcome(reward=float(success), success=success)

    def observe(self) -> Observation:
        image = self._random.integers(0, 256, (*self.spec.image_shape, 3), dtype=np.uint8)
        wrists = self.spec.wrist_image_shape
        wrist = None if wrists is None else self._random.integers(0, 256, (*wrists, 3), dtype=np.uint8)
        return Observation(image, np.zeros(self.spec.state_dim, np.float32), "put the cup on the plate", wrist)

    def close(self) -> None:
        pass


def make_noise(benchmark: str, num_envs: int, chunk_size: int, steps: int) -> VLAEnv:
    """Environments with the cameras, states and actions of a benchmark, ``steps`` long."""
    schema = get_schema(benchmark)
    spec = SimulatorSpec(
        id=f"{benchmark}/noise",
        entry_point="stored_frames:Noise",
        tasks=(Task("noise", "put the cup on the plate"),),
        trials=10**6,
        image_shape=schema.image_size,
        wrist_image_shape=schema.wrist_images if schema.wrist_images[0] else None,
        state_dim=schema.state_dim,
        action_low=(-1.0,) * schema.action_dim,
        action_high=(1.0,) * schema.action_dim,
        max_episode_steps=steps,
        control_frequency=20,
    )
    return make_env(spec, num_envs=num_envs, chunk_size=chunk_size, num_workers=1)


def make_policy(case: Case) -> VLAPolicy:
    """The policy class of an experiment with tiny random weights."""
    torch.manual_seed(0)
    if case.family == "pi0":
        entry = {"mean": [0.0] * 32, "std": [1.0] * 32}
        folder = Pi0Checkpoint(Path("."), {}, {}, {"random": {"state": entry, "actions": entry}}, flow.tokenizer(), {})
        config = Pi0Config(
            benchmark=case.benchmark, config_name=case.config_name, num_images_in_input=case.images, action_horizon=10
        )
        return Pi0(Pi0Model(flow.SIZES["tiny"]), folder, config)
    bounds = {"q01": [-1.0] * 7, "q99": [1.0] * 7}
    with tempfile.TemporaryDirectory() as path:
        Tokenizer(WordLevel({"<unk>": 0, "<s>": BOS, "▁": SPACE}, unk_token="<unk>")).save(f"{path}/tokenizer.json")
        weights = OpenVLACheckpoint(Path(path), {}, policies.PREPROCESSOR, {"random": {"action": bounds}})
        model = Prismatic(policies.SIZES["tiny"])
        if case.family == "openvla":
            return OpenVLA(model, weights, OpenVLAConfig(benchmark=case.benchmark))
        settings = {"num_images_in_input": case.images, "layout": "rlinf"}
        return OpenVLAOFT(model, weights, OpenVLAOFTConfig(benchmark=case.benchmark, **settings))


def frame_bytes(td: TensorDictBase) -> int:
    """Bytes of all frames in a batch."""
    names = (keys.IMAGES, keys.WRIST_IMAGES, keys.MODEL_IMAGES)
    return sum(td[name].nbytes for name in names if name in td)


def bytes_per_decision(case: Case) -> tuple[int, int]:
    """Bytes of the frames that the policy looks at, as observed and as stored."""
    policy = make_policy(case).eval()
    env = make_noise(case.benchmark, 2, policy.chunk_size, 100)
    observed: list[int] = []
    cameras = [key for key in policy.in_keys if key in (keys.IMAGES, keys.WRIST_IMAGES)]
    collector = StepCollector(
        env, policy, 2, step_hook=lambda outcome: observed.append(frame_bytes(outcome.select(*cameras)))
    )
    stored = frame_bytes(collector.rollout())
    collector.shutdown()
    return sum(observed) // 4, stored // 4


class Glance(VLAPolicy):
    """Hardly a policy: actions around the mean pixel. It resizes as OpenVLA does and stores the cameras."""

    in_keys: ClassVar[list[str]] = [keys.IMAGES, keys.STATES, keys.TASK_DESCRIPTIONS]
    loss_keys: tuple[str, ...] = (keys.IMAGES, keys.ACTION)
    chunk_size, num_values, model_image_size = 1, 1, (224, 224)

    def __init__(self, action_dim: int, critic: bool):
        super().__init__()
        self.action_dim = action_dim
        self.mean = torch.nn.Linear(1, action_dim)
        self.value_head = torch.nn.Linear(1, 1) if critic else None
        self.out_keys = [keys.ACTION, keys.ACTION_LOG_PROB, *([keys.STATE_VALUE] if critic else [])]

    def model_images(self, td: TensorDictBase) -> Tensor:
        return self.resize_cameras([td[keys.IMAGES]])

    def resize_cameras(self, cameras: Any) -> Tensor:
        return torch.stack([resize_exact(camera, self.model_image_size) for camera in cameras], dim=1)

    def _look(self, td: TensorDictBase) -> tuple[torch.distributions.Normal, Tensor | None]:
        pixel = self.model_images(td)[:, :, ::32, ::32].float().mean((1, 2, 3, 4)).unsqueeze(-1) / 255
        value = None if self.value_head is None else self.value_head(pixel)
        return torch.distributions.Normal(self.mean(pixel).unsqueeze(1), 1.0), value

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        dist, value = self._look(td)
        td[keys.ACTION] = dist.sample()
        td[keys.ACTION_LOG_PROB] = dist.log_prob(td[keys.ACTION])
        return td if value is None else td.set(keys.STATE_VALUE, value)

    def get_dist(self, td: TensorDictBase) -> torch.distributions.Normal:
        return self._look(td)[0]

    def evaluate_actions(self, td: TensorDictBase) -> tuple[Tensor, Tensor, Tensor | None]:
        dist, value = self._look(td)
        return dist.log_prob(td[keys.ACTION]), dist.entropy(), value

    def prompt_tokens(self, task_descriptions: Any, states: Tensor | None = None) -> Tensor:
        return torch.zeros(len(task_descriptions), 1, dtype=torch.int64)


class StoringGlance(ModelImages, Glance):
    """The same, storing what it sees."""

    loss_keys = (keys.MODEL_IMAGES, keys.ACTION)
    model_image_size, resize_cameras = Glance.model_image_size, Glance.resize_cameras

    def cameras(self, tensordict: TensorDictBase) -> list[Tensor]:
        return [tensordict[keys.IMAGES]]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        seen = self.shrink_images(td.select(keys.IMAGES))
        return super().forward(td.set(keys.MODEL_IMAGES, seen[keys.MODEL_IMAGES]))


def memory(field: str) -> int:
    """Bytes of ``VmRSS`` or ``VmHWM`` of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def peak(algorithm: str, keeps: str, num_envs: int, decisions: int) -> None:
    """Print what two iterations take: bytes at the peak, bytes of the frames of one batch as observed."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    height, width = get_schema("maniskill").image_size
    env = make_noise("maniskill", num_envs, 1, 8)
    policy = (Glance if keeps == "cameras" else StoringGlance)(env.simulator_spec.action_dim, algorithm == "ppo")
    loss = ChunkClipPPOLoss(policy) if algorithm == "ppo" else ChunkGRPOLoss(policy)
    learner = Learner(loss, lr=1e-4, minibatch_size=None, minibatches=4, micro_batch_size=8)
    count = num_envs * decisions
    if algorithm == "ppo":
        collector: Any = StepCollector(env, policy, decisions)
    else:
        collector, episodes = EpisodeCollector(env, policy), EpisodeSampler(env.simulator_spec, group_size=8)
    env.reset()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    before = memory("VmRSS")
    for _ in range(2):
        if algorithm == "ppo":
            batch = collector.rollout()
            gae(batch)
        else:
            groups = collect_groups(collector, episodes, groups=count // 64, max_groups=count // 64)
            batch = grpo(groups, move=True)
        learner.update(batch)
        del batch
    print(memory("VmHWM") - before, count * height * width * 3)
    env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=8, help="of the peaks")
    parser.add_argument("--decisions", type=int, default=32, help="of each environment and iteration, of the peaks")
    parser.add_argument("--peak", nargs=2, metavar=("ALGORITHM", "KEEPS"), help="one of the peaks, in this process")
    options = parser.parse_args()
    if options.peak:
        peak(*options.peak, options.num_envs, options.decisions)
        return
    print(
        f"{'experiment':<28} {'kB observed':>12} {'kB stored':>10} {'ratio':>6} {'GB observed':>12} {'GB stored':>10}"
    )
    for case in CASES:
        observed, stored = bytes_per_decision(case)
        print(
            f"{case.experiment:<28} {observed / 1e3:12.1f} {stored / 1e3:10.1f} {observed / stored:6.2f} "
            f"{case.decisions * observed / 1e9:12.1f} {case.decisions * stored / 1e9:10.1f}",
            flush=True,
        )
    print(f"\n{'peak':<28} {'MB':>12} {'of the frames observed':>25}")
    for algorithm in ("ppo", "grpo"):
        for keeps in ("cameras", "model_images"):
            sizes = ["--num-envs", str(options.num_envs), "--decisions", str(options.decisions)]
            command = [sys.executable, __file__, "--peak", algorithm, keeps, *sizes]
            # glibc gives pieces of this size back to the system at once, so that peaks are those of the tensors.
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
            ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            used, frames = map(int, ran.stdout.split()[-2:])
            print(f"{algorithm + ', ' + keeps:<28} {used / 1e6:12.0f} {used / frames:25.2f}", flush=True)


if __name__ == "__main__":
    main()
