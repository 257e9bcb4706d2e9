"""A policy that stays as it is, to the bit, and is steered by the noise that it denoises or by a change of its actions.

A small network reads what the frozen policy makes of an observation. It draws the noise of which the policy's own
deterministic steps make actions (DSRL: Wagenmaker et al., 2025, arXiv:2506.15799), or what is added to the policy's
greedy actions (residuals: Ankile et al., 2025, arXiv:2509.19301).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, runtime_checkable

import torch
from annotated_types import Ge, Le
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal

from vla_common.checksums import read_checksums, write_lines
from vla_common.keys import ACTION, FEATURES, STATES, STEERING
from vla_common.schema import EnvironmentShape
from vla_common.settings import Positive, Width, check_fields
from vla_policies.checkpoint import layout
from vla_policies.checkpoint.report import Report
from vla_policies.flow.policy import FlowPolicy
from vla_policies.policy import VLAPolicy
from vla_policies.registry import inspect_policy, load_policy

BASE = "base"  # folder of the frozen policy, within that of the steered one


@runtime_checkable
class Steerable(Protocol):
    """What a policy has that can be steered; a flow policy, and SmallVLA, are two."""

    trained_dims: int  # D, numbers of an action

    def write_prompt(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``prompt_tokens``; returns the observations, on the policy's device."""

    def observe(self, tensordict: TensorDictBase) -> Any:
        """Compute once of observations and ``prompt_tokens`` ``[N]`` what :meth:`features` and :meth:`plan` read."""

    def keep_features(self) -> int:
        """Have :meth:`observe` keep what :meth:`features` reads; returns ``F``, how many features there are."""

    def features(self, observed: Any) -> Tensor:
        """Return ``[N, F]``, of image, instruction and states, for small networks; about 1 each."""

    def plan(self, observed: Any, batch: int) -> Tensor:
        """Return the greedy actions ``[N, C, D]``, normalised: -1 to 1, or nearly."""

    def to_simulator(self, actions: Tensor, states: Tensor) -> Tensor:
        """Convert normalised actions ``[N, C, D]`` to the simulator's units; ``states`` are ``[N, S]``."""

    def to_model(self, actions: Tensor, states: Tensor) -> Tensor:
        """Invert :meth:`to_simulator`."""


@dataclass(frozen=True, kw_only=True)
class SteeredConfig:
    """Settings of a :class:`SteeredPolicy`.

    Attributes:
        by: what the actor draws: ``"noise"`` that a flow policy denoises; a ``"residual"``, added to the frozen
            policy's greedy actions; or the ``"action"`` itself, where the frozen policy is there to look only.
        limit: no number that is drawn is larger. A flow policy was trained with normal noise, of deviation 1.
        deviation: of the numbers before the actor has learnt, as far as the limit does not bound them.
        noise: ``"repeated"``: one vector ``[A_model]`` for all actions that are denoised together, as the authors have
            it for pi0; ``"whole"``: a number for each.
        reach: what a drawn 1 is of a residual or action: so much of half the action's range.
        width: of the layers of the actor.
        layers: how many there are between.
    """

    by: Literal["noise", "residual", "action"] = "noise"
    limit: Positive = 2.0
    deviation: Positive = 1.0
    noise: Literal["repeated", "whole"] = "repeated"
    reach: Positive = 1.0
    width: Width = 128
    layers: Annotated[int, Ge(1), Le(8)] = 2

    def __post_init__(self) -> None:
        check_fields(self)


class SteeredPolicy(VLAPolicy):
    """Draws the noise of a frozen :class:`~vla_policies.flow.policy.FlowPolicy`, or a change of any policy's actions.

    An actor that has learnt nothing draws around zero, and greedy takes zeros: of noise or a residual, the frozen
    policy's own greedy actions. In ``features`` (float16 ``[N, F]``; the planned actions among them, for a residual)
    and ``steering`` is all that learning reads.

    Attributes:
        base: the frozen policy.
        actor: TorchRL's, of ``features`` as float32, a :class:`~torchrl.modules.TanhNormal` of ``steering``.
        num_features, num_drawn: lengths of both.
    """

    family: ClassVar[str] = "steered"
    config_class: ClassVar[type[SteeredConfig]] = SteeredConfig
    shape_settings: ClassVar[tuple[str, ...]] = ()
    needs_checkpoint: ClassVar[bool] = True

    base: Any  # a VLAPolicy that is Steerable

    def __init__(self, base: VLAPolicy, config: SteeredConfig):
        super().__init__()
        if config.by == "noise" and not isinstance(base, FlowPolicy):
            raise ValueError(f"{base.family} does not denoise, so no noise can steer it; take policy=small_flow")
        if not isinstance(base, Steerable):
            raise ValueError(f"{base.family} cannot be steered: vla_policies.steered.Steerable says what it lacks")
        self.config, self.base = config, base.requires_grad_(False).eval()
        self.chunk_size, self.action_dim, self.state_dim = base.chunk_size, base.action_dim, base.state_dim
        self.in_keys, self.out_keys, self.loss_keys = base.in_keys, [FEATURES, STEERING, ACTION], (FEATURES, STEERING)
        self.num_features: int = self.base.keep_features()
        self.num_drawn: int = self.chunk_size * self.base.trained_dims
        if config.by == "noise":
            self.num_drawn = self.base.model_action_dim * (self.base.horizon if config.noise == "whole" else 1)
        elif config.by == "residual":
            self.num_features += self.num_drawn
        self.actor = _make_actor(config, self.num_features, self.num_drawn).to(base.device)

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        base, config = self.base, self.config
        seen = base.write_prompt(tensordict.copy().clear_device_())
        observed = base.observe(seen)
        features, plan = self._look(observed, len(seen))
        dist = self.actor.get_dist(TensorDict({FEATURES: features.float()}, [len(features)]))
        greedy = exploration_type() not in (None, ExplorationType.RANDOM)
        drawn = dist.deterministic_sample if greedy else dist.rsample()
        if plan is None:
            every = drawn.unflatten(1, (-1, base.model_action_dim)).expand(-1, base.horizon, -1).contiguous()
            chosen = base.denoise(observed, every)
        else:
            chosen = plan + config.reach * drawn.view_as(plan)
        action = base.to_simulator(chosen, seen.get(STATES))
        return tensordict.set(FEATURES, features).set(STEERING, drawn).set(ACTION, action)

    @torch.no_grad()
    def explain(self, tensordict: TensorDictBase) -> TensorDict:
        """Return ``features`` and the ``steering`` by which this policy takes the ``action`` that a demonstration has.

        ``tensordict`` is as for :meth:`imitation_loss`. A number may be larger than ``limit``.
        """
        base = self.base
        features, plan = self._look(base.observe(tensordict), len(tensordict))
        if plan is None:
            raise ValueError("of which noise an action came is not known; type steering.by=residual")
        drawn = (base.to_model(tensordict[ACTION], tensordict[STATES]) - plan) / self.config.reach
        return TensorDict({FEATURES: features, STEERING: drawn.flatten(1)}, tensordict.batch_size)

    def _look(self, observed: Any, batch: int) -> tuple[Tensor, Tensor | None]:
        """Return ``features`` ``[N, F]``, and normalised actions ``[N, C, D]`` to change; ``None`` of noise."""
        base, features = self.base, self.base.features(observed)
        if self.config.by == "noise":
            return features.half(), None
        plan = base.plan(observed, batch)
        if self.config.by == "action":
            return features.half(), torch.zeros_like(plan)
        return torch.cat([features, plan.flatten(1)], 1).half(), plan

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
    def make(cls, shape: EnvironmentShape, checkpoint: str | Path | None = None, **settings: Any) -> Self:
        if checkpoint is None:
            raise ValueError("policy=steered is what recipes/dsrl.py and sac.py write; type policy.checkpoint=FOLDER")
        return super().make(shape, checkpoint, **settings)

    @classmethod
    def _restore(cls, path: Path, settings: dict[str, Any], device: torch.device | str) -> Self:
        policy = cls(load_policy(path / BASE, device=device), cls.config_class(**settings))
        layout.load(policy.actor, path)
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
        raise ValueError(f"a steered policy takes the memory of what it steers; type {folder or 'FOLDER'}/{BASE}")


def _make_actor(config: SteeredConfig, features: int, drawn: int) -> ProbabilisticActor:
    """Make an actor whose numbers have mean 0 and, where the limit does not bound them, ``deviation``."""
    network = MLP(features, 2 * drawn, num_cells=[config.width] * config.layers, activation_class=nn.ReLU)
    for parameter in network[-1].parameters():
        nn.init.zeros_(parameter)
    deviation = NormalParamExtractor(scale_mapping=f"biased_softplus_{config.deviation / config.limit}")
    module = TensorDictModule(nn.Sequential(network, deviation), in_keys=[FEATURES], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        module,
        in_keys=["loc", "scale"],
        out_keys=[STEERING],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -config.limit, "high": config.limit},
        return_log_prob=True,
    )
