"""The update: epochs of minibatches over what was collected, for PPO and GRPO alike."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt
from tensordict import TensorDict, TensorDictBase
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchrl.objectives import LossModule

from vla_algos import parallel
from vla_algos.advantages import trajectory_weights, valid_decisions
from vla_algos.balance import BalancedMinibatches, masked
from vla_algos.losses import add_proximal_log_prob, add_reference_log_prob
from vla_algos.metrics import WeightedMean, add_loss_metrics
from vla_common.keys import ACTION_LOG_PROB, DONE, NEXT, PROXIMAL_LOG_PROB, STEP_MASK, WEIGHT
from vla_common.settings import BelowOne, Count, Fraction, Positive, Rate, Whole, checked
from vla_common.tensor_files import make_room
from vla_policies import VLAPolicy
from vla_policies.checkpoint.parts import from_part
from vla_policies.sharding import compute_device, gathered, sharded_modules

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
HOST = torch.device("cpu")
_LITTLE = 0.1  # of the policy's weights, whose whole gradient a process may hold
_SMOKE = 10  # so few updates only try whether everything works
OPTIM = ("lr", "value_lr", "betas", "eps", "weight_decay", "max_grad_norm", "schedule", "warmup_updates", "final_lr")


class Learner:
    """Epochs of minibatches with an optimizer on a loss, with everything that goes around a step.

    * The parameters of the critic have a learning rate of their own and their gradient is clipped apart from the
      others': a value far off must not silence the policy.
    * A minibatch is worked off in parts of ``micro_batch_size`` decisions whose gradients add up to that of the whole;
      of several processes each works off as many decisions as the others (:mod:`vla_algos.balance`).
    * Of a policy that was sharded before (:func:`vla_policies.sharding.shard`) each process steps its part.
    * A step whose gradient is not finite is skipped and counted.
    * Each epoch shuffles afresh, from torch's global generator.
    * The frozen policy of ``reference_kl_coeff`` is the policy as it was at the first update.
    * The proximal policy of a ``decoupled`` loss is the policy as it is at the start of each update.

    Any TorchRL loss will do whose terms are called ``loss_...``: they are added up, and the other scalars that it
    returns are logged as ``train/<name>``. What :class:`~vla_algos.losses.ChunkClipPPOLoss` has beyond that is used
    where a loss has it: weights of its metrics (``"weights"``), names for the log (``metric_names``), shares of a whole
    minibatch (``forward(..., whole=...)``; otherwise a part counts by its number of decisions), ``has_critic``,
    ``log_prob_level``, ``reference_kl_coeff`` and ``decoupled``. Which parameters are the critic's, the policy says
    (``critic_parameters()``), or they are those of the loss's ``critic_network``.

    Args:
        loss_module: the loss, with the policy in it.
        lr: learning rate of the policy.
        value_lr: that of the critic; ``None`` for the same.
        betas, eps, weight_decay: of AdamW.
        max_grad_norm: largest norm of a gradient; ``None`` for any.
        schedule: ``"constant"`` or ``"cosine"``, which falls to ``final_lr`` times the rate at the last update.
        warmup_updates: updates before which the learning rate rises linearly.
        final_lr: see ``schedule``.
        optimizer: makes another optimizer of two parameter groups, policy and critic, each with its ``lr``; ``None``
            for AdamW with ``betas``, ``eps`` and ``weight_decay``.
        updates: how many there will be, for ``"cosine"``.
        aggregation: what the loss is a mean over: ``"token_mean"``, every valid element counts the same, or
            ``"trajectory_mean"``, every trajectory does (:func:`~vla_algos.advantages.trajectory_weights`).
        epochs: passes over the batch per update.
        minibatch_size: decisions per optimizer step, of all processes together; ``None`` with ``minibatches``.
        minibatches: instead, so many optimizer steps per pass, of equally many decisions. Where groups are dropped and
            episodes end early, an update then still has as many steps.
        micro_batch_size: decisions per backward pass of a process; ``None`` for a whole minibatch.
        target_kl: an update ends before the step of a minibatch whose ``kl_k3`` exceeds it; ``None`` for never.
        critic_warmup_steps: optimizer steps at the start in which only the critic learns.
        max_log_ratio: largest ``log_ratio_per_token`` (nats) before the first step of an update; ``None`` for any. More
            means that the stored log-probabilities are not those of the policy that is trained: stale, or of another
            precision. With a ``decoupled`` loss it is the proximal ones that are compared, which are never stale.
        offload_optimizer: keep the optimizer's moments in host memory but for the steps of an update.

    Attributes:
        steps: optimizer steps taken so far.

    Raises:
        ValueError: a setting that cannot be; the message says what would be right.
    """

    @checked
    def __init__(
        self,
        loss_module: LossModule,
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
        aggregation: Literal["token_mean", "trajectory_mean"] = "token_mean",
        epochs: Count = 1,
        minibatch_size: Count | None = 128,
        minibatches: Count | None = None,
        micro_batch_size: Count | None = None,
        target_kl: Positive | None = None,
        critic_warmup_steps: Whole = 0,
        max_log_ratio: Positive | None = 0.1,
        offload_optimizer: bool = False,
    ):
        if not isinstance(loss_module, LossModule):
            raise TypeError(
                f"Learner takes a loss of TorchRL's, which has its policy in it, not {type(loss_module).__name__}; "
                "such as ChunkClipPPOLoss(policy)"
            )
        check_steps(
            betas=betas,
            warmup_updates=warmup_updates,
            minibatch_size=minibatch_size,
            minibatches=minibatches,
            micro_batch_size=micro_batch_size,
            updates=updates,
        )
        if critic_warmup_steps and not getattr(loss_module, "has_critic", True):
            raise ValueError("critic_warmup_steps needs a critic: set critic_warmup_steps=0, or critic_coeff above 0")
        if target_kl is not None and "kl_k3" not in loss_module.out_keys:
            raise ValueError(f"target_kl needs a loss that returns kl_k3, {type(loss_module).__name__} does not; null")
        if aggregation == "trajectory_mean" and not hasattr(loss_module, "log_prob_level"):
            raise ValueError(
                f"aggregation='trajectory_mean' needs a loss that reads {WEIGHT!r} and has a log_prob_level, such as "
                f"ChunkClipPPOLoss; with {type(loss_module).__name__} set aggregation='token_mean'"
            )
        if schedule == "cosine" and not updates:
            raise ValueError("schedule='cosine' needs to know how many updates there will be")
        self.loss_module = loss_module
        self.policy: Any = policy_of(loss_module)  # a VLAPolicy, or the network of a loss of TorchRL's
        self.aggregation = aggregation
        self.epochs, self.minibatch_size, self.minibatches = epochs, minibatch_size, minibatches
        self.micro_batch_size = micro_batch_size
        self.max_grad_norm = math.inf if max_grad_norm is None else max_grad_norm
        self.max_log_ratio = math.inf if max_log_ratio is None else max_log_ratio
        self.target_kl = target_kl
        self.critic_warmup_steps = critic_warmup_steps
        self.offload_optimizer = offload_optimizer
        self.steps = 0
        self._reference: dict[str, torch.Tensor] | None = None  # weights of the frozen policy where the loss needs one
        self._sharded = sharded_modules(self.policy)
        self._takes_whole = takes_whole(loss_module)
        self._decoupled = bool(getattr(loss_module, "decoupled", False))
        self._names = getattr(loss_module, "metric_names", {})
        self._actor, self._critic = trained_parameters(loss_module)
        if parallel.world_size() > 1 and not all(isinstance(each, DTensor) for each in [*self._actor, *self._critic]):
            raise ValueError(
                f"{parallel.world_size()} processes train a policy together that is sharded: call shard(policy, "
                "parallel.device_mesh(shards=1)) of vla_policies.sharding first, and likewise for a critic of its own"
            )
        if critic_warmup_steps and not self._critic:
            raise ValueError(
                "critic_warmup_steps needs parameters to warm up, those of the policy's critic_parameters(); "
                "set it to 0"
            )
        self._device = compute_device(next(iter([*self._actor, *self._critic])))
        # Until the last pass of a minibatch a process would hold the whole gradient: little with adapters alone.
        trained, all_of_it = (
            sum(each.numel() for each in some) for some in ([*self._actor, *self._critic], self.policy.parameters())
        )
        self._sums_late = bool(self._sharded) and trained <= _LITTLE * all_of_it
        rates = [(self._actor, lr), (self._critic, lr if value_lr is None else value_lr)]
        groups = [{"params": parameters, "lr": rate} for parameters, rate in rates]
        if optimizer is None:
            self.optimizer: Optimizer = torch.optim.AdamW(
                groups, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay
            )
        else:
            self.optimizer = optimizer(groups)

        total = updates or 0

        def factor(update: int) -> float:
            if update < warmup_updates:
                return (update + 1) / (warmup_updates + 1)
            if schedule == "constant":
                return 1.0
            progress = min(1.0, (update - warmup_updates) / max(1, total - 1 - warmup_updates))
            return final_lr + (1 - final_lr) * (1 + math.cos(math.pi * progress)) / 2

        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def update(self, batch: TensorDictBase | None, before_step: Callable[[], None] | None = None) -> dict[str, float]:
        """Learn from a batch with advantages.

        Of several processes each gives its part of the batch; the update is the one that a single process would do with
        all of it, up to rounding, and the same in all of them.

        Args:
            batch: ``[D]`` or ``[N, T]``, last dimension in time order; decisions that were never executed are
                left out. With ``"trajectory_mean"`` it gets ``weight`` written. ``None``: this process has none.
            before_step: called before each minibatch; may raise to abandon the update.

        Returns:
            Metrics under ``train/``, see ``docs/metrics.md``; those of all processes.

        Raises:
            ValueError: nothing was executed, or the stored log-probabilities are not finite or not this policy's.
            FloatingPointError: no gradient of the update was finite.
        """
        if self.aggregation == "trajectory_mean":
            self._weigh(batch)
        samples = None if batch is None else _executed(batch)
        masks = parallel.all_gather_object(None if samples is None else samples[NEXT, STEP_MASK].cpu())
        if not sum(len(mask) for mask in masks if mask is not None):
            raise ValueError("no decision of this batch was executed: there is nothing to learn from")
        self._refresh_reference()
        if samples is not None and len(samples):
            self._check_stored(samples)
        samples, computed = self._completed(samples)
        largest = self._add_proximal(samples)
        dealt = BalancedMinibatches(
            samples, [0 if mask is None else len(mask) for mask in masks], self._device, computed
        )
        everybodys = TensorDict({NEXT: {STEP_MASK: torch.cat([mask for mask in masks if mask is not None])}})
        everybodys.batch_size = everybodys[NEXT, STEP_MASK].shape[:1]
        self._keep_moments(self._device)
        mean, steps_before, skipped = WeightedMean(), self.steps, 0
        mismatch, first = None, True
        for rows in self._minibatches(len(everybodys)):
            if before_step is not None:
                before_step()
            seen = self._backward(dealt, rows, everybodys[rows])
            mean.merge(seen)
            if first:
                mismatch, first = self._checked_mismatch(seen), False
            if self.target_kl is not None and seen.mean_of(self._logged("kl_k3")) > self.target_kl:
                break
            norms = [clip_gradient(group, self.max_grad_norm) for group in (self._actor, self._critic)]
            if not all(bool(norm.isfinite()) for norm in norms):
                skipped += 1
                continue
            self.optimizer.step()
            self.steps += 1
            mean.add({"train/actor/grad_norm": norms[0]})
        if skipped and self.steps == steps_before:
            raise FloatingPointError(
                f"no gradient of this update was finite ({skipped} steps skipped): the policy has diverged; lower "
                "optim.lr or optim.max_grad_norm and start from an earlier checkpoint"
            )
        self._keep_moments(HOST)
        actor_lr, critic_lr = (group["lr"] for group in self.optimizer.param_groups)
        self.scheduler.step()
        return {
            **mean.compute(),
            **({"train/actor/log_ratio_at_start": mismatch} if mismatch is not None else {}),
            **({"train/actor/behaviour_weight_max": largest} if largest is not None else {}),
            "train/actor/lr": actor_lr if self.steps > self.critic_warmup_steps else 0.0,
            "train/critic/lr": critic_lr,
            "train/steps": float(self.steps - steps_before),
            "train/skipped_steps": float(skipped),
            **dealt.metrics(),
        }

    def _weigh(self, batch: TensorDictBase | None) -> None:
        whole = parallel.all_gather(None if batch is None else batch.select((NEXT, STEP_MASK), (NEXT, DONE)))
        if whole is not None:
            trajectory_weights(whole, self.loss_module.log_prob_level)
            own = parallel.local_rows(whole, 0 if batch is None else len(batch))
            if batch is not None:
                batch[WEIGHT] = own[WEIGHT]

    def _minibatches(self, decisions: int) -> Iterator[torch.Tensor]:
        """Yield which rows of the batches of all processes, joined, are in each minibatch."""
        for _ in range(self.epochs):
            yield from self._parts(parallel.broadcast_object(torch.randperm(decisions)))

    def _parts(self, order: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.minibatch_size is not None:
            return order.split(self.minibatch_size)
        assert self.minibatches is not None  # one of the two is given
        return order.tensor_split(min(self.minibatches, len(order)))

    def _backward(self, dealt: BalancedMinibatches, rows: torch.Tensor, whole: TensorDictBase) -> WeightedMean:
        """Leave the gradient of the whole minibatch in the parameters; returns its diagnostics."""
        critic_only = self.steps < self.critic_warmup_steps
        self.optimizer.zero_grad()
        seen, total = WeightedMean(), 0.0
        for part, counts, last in dealt.passes(rows, self.micro_batch_size):
            if self._sums_late:
                self._sharded[0].set_requires_gradient_sync(last)
            losses = self._loss_of(part, whole, counts)
            terms = {name: loss for name, loss in losses.items() if name.startswith("loss_")}
            loss = terms["loss_critic"] if critic_only else sum(terms.values())
            loss.backward()
            if counts:
                total = total + loss.detach()
                add_loss_metrics(seen, losses, self._names, len(part))
        if critic_only:  # the value loss may reach the backbone as well, see critic_detach
            for parameter in self._actor:
                parameter.grad = None
        processes = parallel.world_size()
        seen.add({"train/loss": total * processes}, 1 / processes)  # the sum of the shares, not their mean
        return seen.of_all_processes()

    def _loss_of(self, part: TensorDictBase, whole: TensorDictBase, counts: bool) -> TensorDictBase:
        """Compute the loss of a part of a minibatch; over the parts that count its terms add up to those of the whole.

        A part that does not count gives 0, by its mask where the loss divides by what the whole has, else by its share:
        a mean over what was executed would be none.
        """
        if self._takes_whole:
            return self.loss_module(part if counts else masked(part), whole=whole)
        losses, share = self.loss_module(part), len(part) / len(whole) if counts else 0.0
        return losses.update({name: share * loss for name, loss in losses.items() if name.startswith("loss_")})

    def _refresh_reference(self) -> None:
        """Keep the frozen policy, where one is needed, the one before the first update."""
        if getattr(self.loss_module, "reference_kl_coeff", 0.0) and self._reference is None:
            self._reference = self.policy.trained_weights()

    def _check_stored(self, samples: TensorDictBase) -> None:
        stored = samples.get(ACTION_LOG_PROB, None)
        if stored is not None:  # else the loss says what is missing
            mask, finite = samples[NEXT, STEP_MASK], stored.isfinite()
            if finite.shape[:2] == mask.shape:  # of each action; other policies have one of the decision
                finite = finite.reshape(*mask.shape, -1).all(-1) | ~mask
            broken = ~finite.reshape(len(samples), -1).all(-1)
            if broken.any():
                raise ValueError(
                    f"{ACTION_LOG_PROB!r} is not finite in {int(broken.sum())} of {len(samples)} decisions: the policy "
                    "that acted had diverged, or did not write it"
                )

    def _completed(self, samples: TensorDictBase | None) -> tuple[TensorDictBase | None, set[Any]]:
        """Add what an update needs of each decision: what the frozen policy says, and what the policy precomputes.

        A sharded policy is gathered for it, in a process without rows too.

        Returns:
            The samples, and the names of what was precomputed.
        """
        if self._reference is not None:
            with self.policy.reference_weights(self._reference), gathered(self.policy):
                if samples is not None and len(samples):
                    size = self.micro_batch_size or len(self._parts(torch.arange(len(samples)))[0])
                    add_reference_log_prob(samples, self.policy, size, self._device)
        if getattr(type(self.policy), "precompute", VLAPolicy.precompute) is VLAPolicy.precompute:
            return samples, set()
        with gathered(self.policy):
            if samples is None or not len(samples):
                return samples, set()
            before = set(samples.keys(True, True))
            samples = self.policy.precompute(samples)
            return samples, set(samples.keys(True, True)) - before

    def _add_proximal(self, samples: TensorDictBase | None) -> float | None:
        """Add what the policy says of each decision before the first step, where the loss is decoupled.

        A sharded policy is gathered for it, in a process without rows too.

        Returns:
            The largest behaviour weight of all processes.
        """
        if not self._decoupled:
            return None
        largest = 0.0
        with gathered(self.policy):
            if samples is not None and len(samples):
                size = self.micro_batch_size or len(self._parts(torch.arange(len(samples)))[0])
                add_proximal_log_prob(samples, self.policy, size, self._device)
                weight, valid = self.loss_module.behaviour_weight(samples)
                largest = float(weight[valid].max())
        return max(parallel.all_gather_object(largest))

    def _checked_mismatch(self, first: WeightedMean) -> float | None:
        name = self._logged("log_ratio_per_token")
        if name not in first:
            return None
        mismatch = first.mean_of(name)
        if mismatch > self.max_log_ratio:
            stored, why = (
                ACTION_LOG_PROB,
                "they are stale, or of other actions; collect with the policy that is trained",
            )
            if self._decoupled:
                stored, why = PROXIMAL_LOG_PROB, "evaluate_actions does not compute the same twice; look for dropout"
            raise ValueError(
                f"before the first step of this update the policy's log-probabilities are {mismatch:.3g} nats per "
                f"token away from the stored {stored!r} (allowed: max_log_ratio={self.max_log_ratio:g}): {why}"
            )
        return mismatch

    def _keep_moments(self, device: torch.device) -> None:
        """Move what the optimizer knows of each number, its moments, if asked for; numbers of a tensor stay."""
        if not self.offload_optimizer:
            return
        for state in self.optimizer.state.values():
            for name, moment in state.items():
                if isinstance(moment, torch.Tensor) and moment.ndim:
                    part = moment.to_local() if isinstance(moment, DTensor) else moment
                    state[name] = from_part(part.to(device), moment)

    def _logged(self, diagnostic: str) -> str:
        """Name what the loss returns as ``diagnostic`` as the log does."""
        return f"train/{self._names.get(diagnostic, diagnostic)}"

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to resume exactly here: tensors and plain numbers."""
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "steps": self.steps,
        }
        if self._reference is not None:
            state["reference"] = dict(self._reference)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken, with this learner's rates; the policy's own weights are not in it."""
        names = ("betas", "eps", "weight_decay", "initial_lr")
        settings = [{name: group[name] for name in names if name in group} for group in self.optimizer.param_groups]
        rates = self.scheduler.base_lrs
        self.optimizer.load_state_dict(state["optimizer"])
        self._keep_moments(HOST)
        self.scheduler.load_state_dict(state["scheduler"])
        self.scheduler.base_lrs = rates
        for group, own, rate, factor in zip(
            self.optimizer.param_groups, settings, rates, self.scheduler.lr_lambdas, strict=True
        ):
            group.update(own, lr=rate * factor(self.scheduler.last_epoch))
        self.steps = state["steps"]
        if "reference" in state:
            self._reference = self._restored(state["reference"])

    def empty_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a state to load into: like ``saved``, whose tensors have shapes alone, with memory as its own have."""
        state = empty_state(saved, self.optimizer)
        if "reference" in saved:
            own = dict(self.policy.named_parameters())
            state["reference"] = {name: make_room(each, own.get(name)) for name, each in saved["reference"].items()}
        return state

    def _restored(self, reference: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights of the frozen policy, copied."""
        weights = self.policy.trained_weights()
        names = weights.keys() | reference.keys()
        wrong = sorted(name for name in names if _shape(weights, name) != _shape(reference, name))
        if wrong:
            raise ValueError(
                f"the frozen policy of this state is another one: {len(wrong)} tensors differ, such as {wrong[0]}; "
                "resume with the policy settings of that run"
            )
        for name, tensor in weights.items():
            tensor.copy_(reference[name])
        return weights


def check_steps(
    *,
    betas: Sequence[float] = (0.9, 0.999),
    warmup_updates: int = 0,
    minibatch_size: int | None = 128,
    minibatches: int | None = None,
    micro_batch_size: int | None = None,
    updates: int | None = None,
    **_: Any,
) -> None:
    """Raise a ValueError with what would be right for settings of a :class:`Learner` that do not fit each other.

    Recipes ask before they load a policy, which may take minutes; the arguments are those of :class:`Learner`.
    """
    if (minibatch_size is None) == (minibatches is None):
        raise ValueError(
            f"minibatch_size is {minibatch_size} and minibatches {minibatches}: give one of them, the other is null"
        )
    if micro_batch_size is not None and minibatch_size is not None and micro_batch_size > minibatch_size:
        raise ValueError(
            f"micro_batch_size={micro_batch_size}: is a part of a minibatch, which has minibatch_size="
            f"{minibatch_size} decisions; leave it out (null) for no parts"
        )
    if betas[0] > betas[1]:
        raise ValueError(f"betas={list(betas)}: the first is larger than the second; write {sorted(betas)}")
    if updates is not None and warmup_updates >= updates > _SMOKE:
        raise ValueError(
            f"warmup_updates={warmup_updates}: there are only {updates} updates (iterations), so that lr is never "
            f"reached; take fewer, such as {updates // 10}"
        )


def empty_state(saved: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return a state like ``saved``, whose tensors have shapes alone, with memory for them.

    Args:
        saved: of a learner, with the state of its optimizer under ``"optimizer"``.
        optimizer: tensors of its parameters' shapes lie where these do, and are sharded as these are.
    """
    parameters = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))
    of_parameters = {
        number: make_room(entries, parameters.get(number)) for number, entries in saved["optimizer"]["state"].items()
    }
    rest = {key: make_room(value) for key, value in saved.items() if key != "optimizer"}
    return {**rest, "optimizer": {**saved["optimizer"], "state": of_parameters}}


def _shape(tensors: dict[str, torch.Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None


def _executed(batch: TensorDictBase) -> TensorDictBase:
    """Return the decisions of ``batch`` that were executed, ``[D]``: without a copy if all were, as they mostly are."""
    samples = batch.reshape(-1)
    executed = valid_decisions(samples).squeeze(-1)
    return samples.copy() if executed.all() else samples[executed]


def clip_gradient(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradient of some parameters, or of their parts in all processes, to a norm of ``max_norm`` at most.

    Returns:
        Its norm before; of all parts, the same in all processes.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def takes_whole(loss_module: LossModule) -> bool:
    """Tell whether a loss gives shares of a whole minibatch: its ``forward`` names ``whole``, or hands it on by name.

    A ``forward(*args, **kwargs)`` does so only where a class above it names ``whole``.
    """
    parameters = inspect.signature(loss_module.forward).parameters.values()
    if any(parameter.name == "whole" for parameter in parameters):
        return True
    above = [each.__dict__["forward"] for each in type(loss_module).__mro__ if "forward" in each.__dict__]
    named = any("whole" in inspect.signature(forward).parameters for forward in above)
    return named and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def policy_of(loss_module: LossModule) -> torch.nn.Module:
    """Return the policy in a loss: its ``policy``, or what TorchRL's losses call ``actor_network``."""
    return loss_module.policy if hasattr(loss_module, "policy") else loss_module.actor_network


def trained_parameters(loss_module: LossModule) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """List the parameters of a loss that are trained: those of the policy, and those of the critic.

    Raises:
        ValueError: they are of a precision that rounds away the steps of a usual learning rate.
    """
    policy = policy_of(loss_module)
    of_critic = {id(parameter) for parameter in getattr(policy, "critic_parameters", tuple)()}
    actor: list[torch.nn.Parameter] = []
    critic: list[torch.nn.Parameter] = []
    for name, parameter in loss_module.named_parameters():
        if parameter.requires_grad:
            is_critic = id(parameter) in of_critic or name.startswith("critic_network")
            (critic if is_critic else actor).append(parameter)
    short = {str(p.dtype).removeprefix("torch.") for p in [*actor, *critic]} - {"float32", "float64"}
    if short:
        raise ValueError(
            f"trained parameters are {', '.join(sorted(short))}, which rounds away steps of a usual learning rate; "
            "set policy.dtype=float32 (sharding.compute=bf16 computes in bfloat16 all the same), or train adapters, "
            "which are float32: policy.lora_rank=32"
        )
    return actor, critic
