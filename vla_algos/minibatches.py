"""Epochs of minibatches over what was collected, in parts that fit into memory, and as many in every process."""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch.optim import Optimizer
from torchrl.objectives import LossModule

from vla_algos import distributed
from vla_algos.advantages import trajectory_weights, valid_decisions
from vla_algos.distributed import BalancedMinibatches, masked
from vla_algos.levels import mean, to_level
from vla_algos.losses import add_log_prob
from vla_algos.metrics import WeightedMean, add_loss_metrics
from vla_algos.optim import policy_of, step, trained_parameters
from vla_algos.progress import tell
from vla_algos.reference import FrozenPolicy
from vla_common.keys import ACTION_LOG_PROB, DONE, NEXT, PROXIMAL_LOG_PROB, STEP_MASK, WEIGHT
from vla_common.settings import Count, Positive, Whole, checked, setting_types
from vla_policies import VLAPolicy
from vla_policies.sharding import compute_device, gathered, sharded_modules

_ROW = "row"  # place of a decision in the batches of all processes, joined
_LITTLE = 0.1  # of the policy's weights, whose whole gradient a process may hold


class Minibatches:
    """The minibatches of one update, and what is measured in it.

    ::

        minibatches = Minibatches(loss_module, batch, epochs=4, minibatch_size=128, steps=steps)
        for minibatch in minibatches:
            optimizer.zero_grad()
            for part in minibatch:  # micro-batches, whose gradients add up
                minibatch.total(loss_module(part, whole=minibatch.whole)).backward()
            if minibatch.too_far:
                break
            minibatch.step(optimizer)

    Each epoch shuffles again, from torch's global generator. Of several processes each passes its part of the batch and
    computes as many decisions as the others (:class:`~vla_algos.distributed.BalancedMinibatches`); the update is that
    of a single process with all of it, up to rounding. All of them must ask for the same minibatches.

    Args:
        loss_module: the loss, with the policy in it.
        batch: ``[D]`` or ``[N, T]`` with advantages, last dimension in time order; decisions that were never executed
            are left out. With ``"trajectory_mean"`` it gets ``weight``. ``None``: this process has none.
        epochs: passes over the batch.
        minibatch_size: decisions per optimizer step, of all processes together; ``None`` with ``minibatches``.
        minibatches: instead, so many optimizer steps per pass, of equally many decisions, however many there are.
        micro_batch_size: decisions per backward pass of a process; ``None`` for a whole minibatch.
        aggregation: what the loss is a mean over: ``"token_mean"``, every valid element counts the same, or
            ``"trajectory_mean"``, every trajectory does (:func:`~vla_algos.advantages.trajectory_weights`).
        target_kl: the update ends before the step of a minibatch whose ``kl_k3`` exceeds it; ``None`` for never.
        critic_warmup_steps: optimizer steps at the start of training in which only the critic learns.
        max_log_ratio: largest ``log_ratio_per_token`` (nats) before the first step; ``None`` for any. More means that
            the stored log-probabilities (of a ``decoupled`` loss the proximal ones) are not this policy's: a
            ``ValueError``, as where they are not finite.
        recompute_log_prob: compute these once more before the first step, without gradient, in the parts of the first
            epoch: batches of other sizes round otherwise, most of all in bfloat16.
        steps: optimizer steps before this update.
        frozen: the policy of ``reference_kl_coeff``.

    Attributes:
        steps: optimizer steps so far.
        decisions: how many were executed, in all processes; where there are none, as every episode crashed when it
            began, there are no minibatches either.
    """

    @checked
    def __init__(
        self,
        loss_module: LossModule,
        batch: TensorDictBase | None,
        *,
        epochs: Count = 1,
        minibatch_size: Count | None = 128,
        minibatches: Count | None = None,
        micro_batch_size: Count | None = None,
        aggregation: Literal["token_mean", "trajectory_mean"] = "token_mean",
        target_kl: Positive | None = None,
        critic_warmup_steps: Whole = 0,
        max_log_ratio: Positive | None = 0.1,
        recompute_log_prob: bool = False,
        steps: int = 0,
        frozen: FrozenPolicy | None = None,
    ):
        self.loss_module = loss_module
        self.policy: Any = policy_of(loss_module)  # a VLAPolicy, or the network of a loss of TorchRL's
        self.epochs, self.minibatch_size, self.minibatches = epochs, minibatch_size, minibatches
        self.micro_batch_size, self.target_kl, self.max_log_ratio = micro_batch_size, target_kl, max_log_ratio
        self.critic_warmup_steps, self.steps = critic_warmup_steps, steps
        self._before, self._skipped, self._mean = steps, 0, WeightedMean()
        self._at_start: dict[str, float] = {}  # measured before the first step
        self._stored = PROXIMAL_LOG_PROB if getattr(loss_module, "decoupled", False) else ACTION_LOG_PROB
        self._recompute = recompute_log_prob
        self._recomputed: torch.Tensor | None = None  # the log-probabilities of the decisions of all processes
        self._takes_whole, self._names = takes_whole(loss_module), getattr(loss_module, "metric_names", {})
        trained = [parameter for some in trained_parameters(loss_module) for parameter in some]
        self._device = compute_device(next(iter(trained)))
        self._sharded = sharded_modules(self.policy)
        # Until the last pass of a minibatch a process would hold the whole gradient: little with adapters alone.
        whole = sum(parameter.numel() for parameter in self.policy.parameters())
        self._sums_late = bool(self._sharded) and sum(each.numel() for each in trained) <= _LITTLE * whole
        if aggregation == "trajectory_mean":
            _weigh(batch, loss_module.log_prob_level)
        samples = None if batch is None else batch.reshape(-1)
        if samples is not None:
            executed = valid_decisions(samples).squeeze(-1)
            samples = samples.copy() if executed.all() else samples[executed]  # mostly all: then nothing is copied
        masks = distributed.all_gather_object(None if samples is None else samples[NEXT, STEP_MASK].cpu())
        rows = [0 if mask is None else len(mask) for mask in masks]
        self.decisions = sum(rows)
        if self.decisions and self.decisions < (minibatch_size or 0):
            warnings.warn(
                f"minibatch_size={minibatch_size} is more than the {self.decisions} decisions of the batch: there is "
                "one optimizer step per epoch",
                stacklevel=3,
            )
        if self.decisions:
            samples, computed = self._prepare(samples, frozen)
            if recompute_log_prob and samples is not None:
                samples[_ROW] = torch.arange(len(samples)) + sum(rows[: distributed.rank()])
            self._balanced = BalancedMinibatches(samples, rows, self._device, computed)
            joined = torch.cat([mask for mask in masks if mask is not None])
            self._masks = TensorDict({NEXT: TensorDict({STEP_MASK: joined}, joined.shape[:1])}, joined.shape[:1])

    def _prepare(
        self, samples: TensorDictBase | None, frozen: FrozenPolicy | None
    ) -> tuple[TensorDictBase | None, set[Any]]:
        """Add what is computed once of each decision; returns the samples, and the names of what the policy adds."""
        if samples is not None and not len(samples):
            samples = None
        computed, size = set[Any](), self.micro_batch_size or 1  # decisions of a forward pass
        if samples is not None and not self.micro_batch_size:
            size = -(-len(self._split(torch.arange(self.decisions))[0]) // distributed.world_size())
        if frozen is not None:
            frozen.add_log_prob(samples, size, self._device)
        if samples is not None:
            _check_stored(samples)
        if getattr(type(self.policy), "precompute", VLAPolicy.precompute) is not VLAPolicy.precompute:
            with gathered(self.policy):
                if samples is not None:
                    before = set(samples.keys(True, True))
                    samples = self.policy.precompute(samples.clear_device_())  # or it would be moved to host memory
                    computed = set(samples.keys(True, True)) - before
        if getattr(self.loss_module, "decoupled", False):
            largest = 0.0
            with gathered(self.policy):
                if samples is not None:
                    add_log_prob(samples, self.policy, PROXIMAL_LOG_PROB, size, self._device)
                    weight, valid = self.loss_module.behaviour_weight(samples)
                    largest = float(weight[valid].max())
            self._at_start["train/actor/behaviour_weight_max"] = max(distributed.all_gather_object(largest))
        return samples, computed

    def __iter__(self) -> "Iterator[Minibatch]":
        for epoch in range(self.epochs if self.decisions else 0):
            parts = self._split(distributed.broadcast_object(torch.randperm(self.decisions)))
            if self._recompute and not epoch:
                self._recompute_log_prob(parts)
            for number, rows in enumerate(parts, epoch * len(parts)):
                tell("updating", number, self.epochs * len(parts))
                yield Minibatch(self, rows, self._masks[rows])
            tell("updating", (epoch + 1) * len(parts), self.epochs * len(parts))

    @torch.no_grad()
    def _recompute_log_prob(self, minibatches: Sequence[torch.Tensor]) -> None:
        own, difference = [], WeightedMean()
        for number, rows in enumerate(minibatches):
            tell("recomputing log-probabilities", number, len(minibatches))
            for part, counts in self._passes(rows):
                log_prob = self.policy.evaluate_actions(part)[0]
                if counts:
                    changed, valid = to_level((log_prob - part[self._stored]).abs(), part[NEXT, STEP_MASK], "token")
                    difference.add({"changed": mean(changed, valid)}, valid.sum())
                    own.append((part[_ROW].cpu(), log_prob.cpu()))
        everywhere = [each for process in distributed.all_gather_object(own) for each in process]
        rows, log_probs = map(torch.cat, zip(*everywhere, strict=True))
        self._recomputed = log_probs[rows.argsort()].to(self._device)
        self._at_start["train/actor/log_ratio_recomputed"] = difference.of_all_processes().mean_of("changed")

    def metrics(self, optimizer: Optimizer) -> dict[str, float]:
        """Return what was measured, under ``train/``, see ``docs/metrics.md``; of all processes.

        At the end of an update: the samples are let go.
        Before the schedule of ``optimizer``, whose learning rates they were, has gone to the next. A
        ``FloatingPointError`` if no gradient of the update was finite.
        """
        if self._skipped and self.steps == self._before:
            raise FloatingPointError(
                f"no gradient of this update was finite ({self._skipped} steps skipped): the policy has diverged; "
                "lower optim.lr or optim.max_grad_norm and start from an earlier checkpoint"
            )
        if not self.decisions:
            return {}
        actor, critic = optimizer.param_groups
        self._balanced.samples = None  # and what precompute has added: the next rollout needs the room
        return {
            **self._mean.compute(),
            **self._at_start,
            "train/actor/lr": actor["lr"] if self.steps > self.critic_warmup_steps else 0.0,
            "train/critic/lr": critic["lr"],
            "train/steps": float(self.steps - self._before),
            "train/skipped_steps": float(self._skipped),
            **self._balanced.metrics(),
        }

    def _split(self, order: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.minibatch_size is not None:
            return order.split(self.minibatch_size)
        return order.tensor_split(min(self.minibatches or 1, len(order)))

    def _passes(self, rows: torch.Tensor) -> Iterator[tuple[TensorDictBase, bool]]:
        """Yield this process's parts of a minibatch, and whether they count; gradients are summed in the last pass."""
        for part, counts, last in self._balanced.passes(rows, self.micro_batch_size):
            if self._sums_late:
                self._sharded[0].set_requires_gradient_sync(last)
            if self._recomputed is not None:
                part[self._stored] = self._recomputed[part[_ROW]]
            yield part if counts or not self._takes_whole else masked(part), counts

    def _logged(self, diagnostic: str) -> str:
        return f"train/{self._names.get(diagnostic, diagnostic)}"

    def _check_log_ratio(self, first: WeightedMean) -> None:
        """Refuse stored log-probabilities that the first minibatch has shown not to be this policy's."""
        if (name := self._logged("log_ratio_per_token")) not in first:
            return
        mismatch = first.mean_of(name)
        if self.max_log_ratio is not None and mismatch > self.max_log_ratio:
            why = (
                "they are stale, or of other actions; collect with the policy that is trained, or set "
                "recompute_log_prob=true where only rounding differs"
            )
            if self._recompute or self._stored == PROXIMAL_LOG_PROB:
                why = "evaluate_actions does not compute the same twice; look for dropout"
            raise ValueError(
                f"before the first step of this update the policy's log-probabilities are {mismatch:.3g} nats per "
                f"token away from the stored {self._stored!r} (allowed: max_log_ratio={self.max_log_ratio:g}): {why}"
            )
        self._at_start["train/actor/log_ratio_at_start"] = mismatch


UPDATE = setting_types(Minibatches, without=["loss_module", "batch", "steps", "frozen"])


class Minibatch:
    """One minibatch: iterated, it yields this process's parts; all of its gradients together are that of the whole.

    ``rows`` are those of the batches of all processes, joined, and ``whole`` their masks.
    """

    def __init__(self, update: Minibatches, rows: torch.Tensor, whole: TensorDictBase):
        self.whole, self._update, self._rows = whole, update, rows
        self._seen, self._counts, self._part_rows = WeightedMean(), False, 0
        self._loss: torch.Tensor | float = 0.0
        self._gathered: WeightedMean | None = None
        self._critic_only = update.steps < update.critic_warmup_steps

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield parts of ``micro_batch_size`` decisions; one that is to count nothing has nothing executed in it."""
        for part, counts in self._update._passes(self._rows):
            self._counts, self._part_rows = counts, len(part)
            yield part

    def losses(self, part: TensorDictBase) -> TensorDictBase:
        """Compute any loss of TorchRL's of a part; over the parts that count its terms add up to those of the whole.

        A part counts by its share of the decisions, where the loss does not give shares of a whole by itself.
        """
        loss_module = self._update.loss_module
        if self._update._takes_whole:
            return loss_module(part, whole=self.whole)
        losses, share = loss_module(part), len(part) / len(self.whole) if self._counts else 0.0
        return losses.update({name: share * loss for name, loss in losses.items() if name.startswith("loss_")})

    def total(self, losses: TensorDictBase) -> torch.Tensor:
        """Add up the terms ``loss_...`` of a part, while the critic warms up its own alone; counts what is logged."""
        terms = {name: loss for name, loss in losses.items() if name.startswith("loss_")}
        loss = terms["loss_critic"] if self._critic_only else sum(terms.values())
        if self._counts:
            self._loss = self._loss + loss.detach()
            add_loss_metrics(self._seen, losses, self._update._names, self._part_rows)
        return loss

    @property
    def too_far(self) -> bool:
        """Whether the policy is further from the one that acted than ``target_kl``: the update ends here."""
        seen, name, most = self._of_all_processes(), self._update._logged("kl_k3"), self._update.target_kl
        return most is not None and name in seen and seen.mean_of(name) > most

    def step(self, optimizer: Optimizer) -> None:
        """Take a step of the optimizer with the gradient of the minibatch; one that is not finite is skipped."""
        self._of_all_processes()
        norm = step(optimizer, self._critic_only)
        if norm is None:
            self._update._skipped += 1
        else:
            self._update.steps += 1
            self._update._mean.add({"train/actor/grad_norm": norm})

    def _of_all_processes(self) -> WeightedMean:
        """Count what all processes have seen in this minibatch, once."""
        if self._gathered is None:
            processes = distributed.world_size()
            self._seen.add({"train/loss": self._loss * processes}, 1 / processes)  # the sum of the shares
            self._gathered = self._seen.of_all_processes()
            if "train/loss" not in self._update._mean:
                self._update._check_log_ratio(self._gathered)
            self._update._mean.merge(self._gathered)
        return self._gathered


def check_minibatches(
    *, minibatch_size: int | None = 128, minibatches: int | None = None, micro_batch_size: int | None = None, **_: Any
) -> None:
    """Refuse (``ValueError``) settings of :class:`Minibatches` that do not fit each other, before any work."""
    if (minibatch_size is None) == (minibatches is None):
        both = f"minibatch_size is {minibatch_size} and minibatches {minibatches}"
        raise ValueError(f"{both}: give one of them, the other is null")
    if micro_batch_size is not None and minibatch_size is not None and micro_batch_size > minibatch_size:
        raise ValueError(
            f"micro_batch_size={micro_batch_size}: is a part of a minibatch, which has minibatch_size="
            f"{minibatch_size} decisions; leave it out (null) for no parts"
        )


def check_loss(loss_module: LossModule, **settings: Any) -> None:
    """Refuse (``ValueError``) settings of :class:`Minibatches` that a loss cannot serve, before any work."""
    name, warmup = type(loss_module).__name__, settings.get("critic_warmup_steps")
    if warmup and not getattr(loss_module, "has_critic", True):
        raise ValueError("critic_warmup_steps needs a critic: set critic_warmup_steps=0, or critic_coeff above 0")
    if warmup and not trained_parameters(loss_module)[1]:
        raise ValueError("critic_warmup_steps needs parameters, the policy's critic_parameters(); set it to 0")
    if settings.get("recompute_log_prob") and not hasattr(policy_of(loss_module), "evaluate_actions"):
        raise ValueError(f"recompute_log_prob needs a policy that has evaluate_actions, that of {name} has not; false")
    if settings.get("target_kl") is not None and "kl_k3" not in loss_module.out_keys:
        raise ValueError(f"target_kl needs a loss that returns kl_k3, {name} does not; null")
    if settings.get("aggregation") == "trajectory_mean" and not hasattr(loss_module, "log_prob_level"):
        raise ValueError(
            f"aggregation='trajectory_mean' needs a loss that reads {WEIGHT!r} and has a log_prob_level, such as "
            f"ChunkClipPPOLoss; with {name} set aggregation='token_mean'"
        )


def takes_whole(loss_module: LossModule) -> bool:
    """Tell whether a loss gives shares of a whole minibatch: its ``forward`` names ``whole``, or passes it on by name.

    A ``forward(*args, **kwargs)`` does so only where a class above it names ``whole``.
    """
    for kind in type(loss_module).__mro__:
        parameters = inspect.signature(kind.__dict__["forward"]).parameters if "forward" in kind.__dict__ else {}
        if "whole" in parameters:
            return True
        if parameters and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return False
    return False


def _weigh(batch: TensorDictBase | None, log_prob_level: Any) -> None:
    """Write the weight of each decision of a trajectory, of the trajectories of all processes."""
    whole = distributed.all_gather(None if batch is None else batch.select((NEXT, STEP_MASK), (NEXT, DONE)))
    if whole is not None:
        trajectory_weights(whole, log_prob_level)
        own = distributed.local_rows(whole, 0 if batch is None else len(batch))
        if batch is not None:
            batch[WEIGHT] = own[WEIGHT]


def _check_stored(samples: TensorDictBase) -> None:
    stored = samples.get(ACTION_LOG_PROB, None)
    if stored is None:  # the loss says what is missing
        return
    mask, finite = samples[NEXT, STEP_MASK], stored.isfinite()
    if finite.shape[:2] == mask.shape:  # of each action; other policies have one of the decision
        finite = finite.reshape(*mask.shape, -1).all(-1) | ~mask
    broken = ~finite.reshape(len(samples), -1).all(-1)
    if broken.any():
        raise ValueError(
            f"{ACTION_LOG_PROB!r} is not finite in {int(broken.sum())} of {len(samples)} decisions: the policy "
            "that acted had diverged, or did not write it"
        )
