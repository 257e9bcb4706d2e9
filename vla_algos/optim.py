"""The optimizer of a policy and its critic: two groups of parameters, a schedule, and a step that can be skipped."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from vla_common.settings import BelowOne, Count, Fraction, Rate, Whole, checked, setting_types
from vla_policies.checkpoint.parts import from_part
from vla_policies.sharding import compute_device

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
_HOST = torch.device("cpu")
_OWN = ("betas", "eps", "weight_decay", "initial_lr", "max_grad_norm", "offload")  # of this run, whatever was saved
_SMOKE = 10  # so few updates only try whether everything works


@checked
def make_optimizer(
    loss_module: nn.Module,
    *,
    lr: Rate,
    value_lr: Rate | None = None,
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999),
    eps: Rate = 1e-8,
    weight_decay: Fraction = 0.0,
    max_grad_norm: Annotated[float, Gt(0)] | None = 1.0,
    schedule: Literal["constant", "cosine"] = "constant",
    warmup_updates: Whole = 0,
    final_lr: Fraction = 0.0,
    optimizer: OptimizerFactory | None = None,
    updates: Count | None = None,
    offload: bool = False,
) -> "tuple[Optimizer, Schedule]":
    """Make the optimizer of what a loss trains, and the schedule of its learning rates.

    The parameters of the critic have a learning rate of their own and their gradient is clipped apart from the others':
    a value far off must not silence the policy. Which are the critic's, the policy says (``critic_parameters()``), or
    they are those of the loss's ``critic_network``. A ``ValueError`` says which setting cannot be.

    Args:
        loss_module: the loss, with the policy in it; or the policy.
        lr: learning rate of the policy.
        value_lr: that of the critic; ``None`` for the same.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW.
        max_grad_norm: largest norm of a gradient; ``None`` for any.
        schedule: ``"constant"`` or ``"cosine"``, which falls to ``final_lr`` times the rate at the last update.
        warmup_updates: updates before which the learning rate rises linearly.
        final_lr: see ``schedule``.
        optimizer: makes another optimizer of two parameter groups, policy and critic, each with its ``lr``; ``None``
            for AdamW with ``betas``, ``eps`` and ``weight_decay``.
        updates: how many there will be, for ``"cosine"``.
        offload: keep the optimizer's moments in host memory but for the steps of an update.

    Returns:
        The optimizer, for :func:`step`, and the schedule, whose ``step()`` ends an update. Both restore the state of
        a run with the settings that they are made with here.
    """
    check_schedule(updates, betas=betas, warmup_updates=warmup_updates, schedule=schedule)
    actor, critic = trained_parameters(loss_module)
    limit = math.inf if max_grad_norm is None else max_grad_norm
    groups: list[dict[str, Any]] = [
        {"params": parameters, "lr": rate, "max_grad_norm": limit}
        for parameters, rate in ((actor, lr), (critic, lr if value_lr is None else value_lr))
    ]
    make = optimizer or partial(AdamW, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay)
    made: Optimizer = make(groups)
    for group in made.param_groups:
        group["offload"] = offload

    def factor(update: int) -> float:
        if update < warmup_updates:
            return (update + 1) / (warmup_updates + 1)
        if schedule == "constant":
            return 1.0
        progress = min(1.0, (update - warmup_updates) / max(1, (updates or 0) - 1 - warmup_updates))
        return final_lr + (1 - final_lr) * (1 + math.cos(math.pi * progress)) / 2

    scheduled = Schedule(made, factor)
    own = [{name: group[name] for name in _OWN if name in group} for group in made.param_groups]

    def keep_own_settings(loaded: Optimizer) -> None:
        for group, settings in zip(loaded.param_groups, own, strict=True):
            group.update(settings)
        move_moments(loaded, _HOST)

    made.register_load_state_dict_post_hook(keep_own_settings)
    return made, scheduled


OPTIMIZER = setting_types(make_optimizer, without=["loss_module"])
OPTIM = {name: kind for name, kind in OPTIMIZER.items() if name not in ("optimizer", "updates", "offload")}


class Schedule(LambdaLR):
    """Learning rates by the number of the update; a state that is restored keeps the rates of this run."""

    def step(self, epoch: int | None = None) -> None:
        """End an update: moments that are kept in host memory return there, and the rates are those of the next."""
        super().step(epoch)
        move_moments(self.optimizer, _HOST)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the update of ``state_dict``; after the optimizer's own state is loaded."""
        super().load_state_dict({**state_dict, "base_lrs": self.base_lrs})
        for group, rate, factor in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = rate * factor(self.last_epoch)


def step(optimizer: Optimizer, critic_only: bool = False) -> torch.Tensor | None:
    """Take a step with the gradients that are there, those of each group clipped to its ``max_grad_norm``.

    With ``critic_only`` the policy's gradient is thrown away, see ``critic_warmup_steps``. Returns the norm of the
    policy's gradient before, the same in all processes; ``None`` if no step was taken: a gradient was not finite.
    """
    actor, critic = optimizer.param_groups
    if critic_only:  # the value loss may reach the backbone as well, see critic_detach
        for parameter in actor["params"]:
            parameter.grad = None
    norms = [clip_gradient(group["params"], group["max_grad_norm"]) for group in (actor, critic)]
    if not all(bool(norm.isfinite()) for norm in norms):
        return None
    move_moments(optimizer, compute_device(next(iter([*actor["params"], *critic["params"]]))))
    optimizer.step()
    return norms[0]


def clip_gradient(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradient of parameters, or of their shards in all processes, to ``max_norm``; returns its norm."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def move_moments(optimizer: Optimizer, device: torch.device) -> None:
    """Move the moments of an optimizer with ``offload``; single numbers stay where they are."""
    if not optimizer.param_groups[0].get("offload"):
        return
    for state in optimizer.state.values():
        for name, moment in state.items():
            if isinstance(moment, torch.Tensor) and moment.ndim:
                part = moment.to_local() if isinstance(moment, DTensor) else moment
                if part.device != device:
                    state[name] = from_part(part.to(device), moment)


def check_schedule(updates: int | None, **settings: Any) -> None:
    """Refuse (``ValueError``) settings of :func:`make_optimizer` that do not fit each other, before any work."""
    betas, warmup_updates = settings.get("betas"), settings.get("warmup_updates", 0)
    if betas and betas[0] > betas[1]:
        raise ValueError(f"betas={list(betas)}: the first is larger than the second; write {sorted(betas)}")
    if settings.get("schedule") == "cosine" and not updates:
        raise ValueError("schedule='cosine' needs to know how many updates there will be")
    if updates is not None and warmup_updates >= updates > _SMOKE:
        raise ValueError(
            f"warmup_updates={warmup_updates}: there are only {updates} updates (iterations), so that lr is never "
            f"reached; take fewer, such as {updates // 10}"
        )


def places(optimizer: Optimizer) -> dict[str, Any]:
    """Return what lies as an optimizer's state is to lie, for ``make_room``: the parameters, by their numbers."""
    return {"state": dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))}


def policy_of(loss_module: nn.Module) -> Any:
    """Return the policy in a loss: its ``policy``, or what TorchRL's losses call ``actor_network``; or it is one."""
    return getattr(loss_module, "policy", getattr(loss_module, "actor_network", loss_module))


def trained_parameters(loss_module: nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """List what a loss trains, of the policy and of the critic. ValueError: a precision that rounds steps away."""
    of_critic = {id(parameter) for parameter in getattr(policy_of(loss_module), "critic_parameters", tuple)()}
    actor: list[torch.nn.Parameter] = []
    critic: list[torch.nn.Parameter] = []
    for name, parameter in loss_module.named_parameters():
        if parameter.requires_grad:
            is_critic = id(parameter) in of_critic or name.startswith("critic_network")
            (critic if is_critic else actor).append(parameter)
    short = {str(each.dtype).removeprefix("torch.") for each in [*actor, *critic]} - {"float32", "float64"}
    if short:
        raise ValueError(
            f"trained parameters are {', '.join(sorted(short))}, which rounds away steps of a usual learning rate; set "
            "policy.dtype=float32 (sharding.compute=bf16 computes in bfloat16), or train adapters: policy.lora_rank=32"
        )
    return actor, critic
