"""A flow policy that stays as it is, to the bit, and is steered by the noise that it denoises.

Diffusion steering (DSRL): Wagenmaker et al., 2025, arXiv:2506.15799. A small network reads what the frozen policy makes
of an observation and draws the noise; the policy's own deterministic steps make actions of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal

from vla_common.checksums import read_checksums, verify_checksums, write_lines
from vla_common.keys import ACTION, FEATURES, NOISE, STATES
from vla_common.schema import EnvironmentShape
from vla_common.settings import Count, Positive, Width, check_fields
from vla_policies.checkpoint import layout
from vla_policies.checkpoint.hub import resolve
from vla_policies.checkpoint.report import Report
from vla_policies.checkpoint.settings import check_unchanged, defaults_of
from vla_policies.flow.policy import FlowPolicy
from vla_policies.policy import Sharding, VLAPolicy
from vla_policies.registry import inspect_policy, load_policy

BASE = "base"  # folder of the frozen policy, within that of the steered one


@dataclass(frozen=True, kw_only=True)
class SteeredConfig:
    """Settings of a :class:`SteeredPolicy`.

    Attributes:
        noise_range: no number of the noise is larger; the frozen policy was trained with normal noise, of deviation 1.
        noise: ``"repeated"``: one vector ``[A_model]`` for all actions that are denoised together, as the authors have
            it for pi0; ``"whole"``: a number for each.
        width: of the layers of the actor.
        layers: how many there are between.
    """

    noise_range: Positive = 2.0
    noise: Literal["repeated", "whole"] = "repeated"
    width: Width = 128
    layers: Count = 2

    def __post_init__(self) -> None:
        check_fields(self)


class SteeredPolicy(VLAPolicy):
    """Draws the noise of a frozen :class:`~vla_policies.flow.policy.FlowPolicy`, by which its actions are steered.

    An actor that has learnt nothing draws nearly normal noise, and greedy takes zeros: the frozen policy's own greedy
    actions, to the bit. In ``features`` (float16 ``[N, F]``) and ``steering_noise`` is all that learning
    reads.

    Attributes:
        base: the frozen policy.
        actor: TorchRL's, of ``features`` as float32, a :class:`~torchrl.modules.TanhNormal` of noise.
        num_features, num_noise: lengths of both.
    """

    family: ClassVar[str] = "steered"
    config_class: ClassVar[type[SteeredConfig]] = SteeredConfig
    shape_settings: ClassVar[tuple[str, ...]] = ()
    needs_checkpoint: ClassVar[bool] = True

    def __init__(self, base: VLAPolicy, config: SteeredConfig):
        super().__init__()
        if not isinstance(base, FlowPolicy):
            raise ValueError(f"a policy that denoises can be steered, {base.family} does not; take policy=small_flow")
        self.config, self.base = config, base.requires_grad_(False).eval()
        self.chunk_size, self.action_dim, self.state_dim = base.chunk_size, base.action_dim, base.state_dim
        self.in_keys, self.out_keys, self.loss_keys = base.in_keys, [FEATURES, NOISE, ACTION], (FEATURES, NOISE)
        self.num_features = base.keep_features()
        self.num_noise = base.model_action_dim * (base.horizon if config.noise == "whole" else 1)
        self.actor = _make_actor(config, self.num_features, self.num_noise).to(base.device)

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        base, seen = self.base, self.base.write_prompt(tensordict.copy())
        observed = base.observe(seen)
        features = base.features(observed).half()
        dist = self.actor.get_dist(TensorDict({FEATURES: features.float()}, [len(features)]))
        greedy = exploration_type() not in (None, ExplorationType.RANDOM)
        noise = dist.deterministic_sample if greedy else dist.rsample()
        every = noise.unflatten(1, (-1, base.model_action_dim)).expand(-1, base.horizon, -1).contiguous()
        action = base.to_simulator(base.denoise(observed, every), seen.get(STATES))
        return tensordict.set(FEATURES, features).set(NOISE, noise).set(ACTION, action)

    def check_environment(self, shape: EnvironmentShape) -> None:
        self.base.check_environment(shape)

    # ---- saving and loading: a folder of the plain layout with the actor, and the frozen policy's own in it

    def save_pretrained(self, folder: str | Path) -> None:
        folder = Path(folder)
        layout.save(folder, self.family, asdict(self.config), self.actor.state_dict())
        self.base.save_pretrained(folder / BASE)
        of_base = {f"{BASE}/{name}": digest for name, digest in read_checksums(folder / BASE).items()}
        write_lines(folder, {**read_checksums(folder), **of_base})

    @classmethod
    def make(
        cls,
        shape: EnvironmentShape,
        checkpoint: str | Path | None = None,
        *,
        shard: Sharding | None = None,
        **settings: Any,
    ) -> Self:
        if checkpoint is None:
            raise ValueError("policy=steered is what recipes/dsrl.py writes; type policy.checkpoint=FOLDER")
        return super().make(shape, checkpoint, shard=shard, **settings)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, device: torch.device | str = "cpu", shard: Sharding | None = None, **settings: Any
    ) -> Self:
        verify_checksums(path := resolve(folder))
        family, stored = layout.read(path)
        if family != cls.family:
            raise ValueError(f"{path} is a checkpoint of {family!r}, not of {cls.family}")
        check_unchanged(cls, path, {**defaults_of(cls), **stored}, settings)
        policy = cls(load_policy(path / BASE, device=device), cls.config_class(**stored))
        layout.load(policy.actor, path)
        if shard is not None:
            shard(policy)
        return policy

    @classmethod
    def default_device(cls) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @classmethod
    def describe(cls, folder: Path) -> Report:
        report = inspect_policy(folder / BASE)
        return Report({**report.facts, "family": f"{cls.family}, of {report.facts['family']}"}, report.missing)

    @classmethod
    def meta_policy(cls, folder: Path | None = None, **settings: Any) -> Self:
        raise ValueError(
            f"a steered policy takes the memory of the one that it steers; type {folder or 'FOLDER'}/{BASE}"
        )


def _make_actor(config: SteeredConfig, features: int, noise: int) -> ProbabilisticActor:
    """Make an actor whose noise has mean 0 and, where the range does not bound it, deviation 1."""
    network = MLP(features, 2 * noise, num_cells=[config.width] * config.layers, activation_class=nn.ReLU)
    for parameter in network[-1].parameters():
        nn.init.zeros_(parameter)
    deviation = NormalParamExtractor(scale_mapping=f"biased_softplus_{1 / config.noise_range}")
    module = TensorDictModule(nn.Sequential(network, deviation), in_keys=[FEATURES], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        module,
        in_keys=["loc", "scale"],
        out_keys=[NOISE],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -config.noise_range, "high": config.noise_range},
        return_log_prob=True,
    )
