"""An update in one call, for scripts: what the recipes write out, with its optimizer, schedule and frozen policy."""

from typing import Any

from tensordict import TensorDictBase
from torch.distributed.tensor import DTensor
from torchrl.objectives import LossModule

from vla_algos import distributed
from vla_algos.minibatches import UPDATE, Minibatches, check_loss, check_minibatches
from vla_algos.optim import OPTIMIZER, make_optimizer, places, policy_of, trained_parameters
from vla_algos.reference import FrozenPolicy
from vla_common.settings import check_settings


class Learner:
    """Epochs of minibatches with an optimizer on a loss.

    It is :func:`~vla_algos.optim.make_optimizer` and :class:`~vla_algos.minibatches.Minibatches`, as in the recipes; a
    ``ValueError`` says which of their settings cannot be.

    Any TorchRL loss will do whose terms are called ``loss_...``: they are added up, and the other scalars that it
    returns are logged as ``train/<name>``. What :class:`~vla_algos.losses.ChunkClipPPOLoss` has beyond that is used
    where a loss has it: weights of its metrics (``"weights"``), names for the log (``metric_names``), shares of a whole
    minibatch (``forward(..., whole=...)``; otherwise a part counts by its number of decisions), ``has_critic``,
    ``log_prob_level``, ``reference_kl_coeff`` and ``decoupled``.

    Args:
        loss_module: the loss, with the policy in it.
        **settings: of ``make_optimizer`` (``lr``, ...) and of ``Minibatches`` (``epochs``, ...).

    Attributes:
        steps: optimizer steps taken so far.
    """

    replicated = True

    def __init__(self, loss_module: LossModule, **settings: Any):
        if not isinstance(loss_module, LossModule):
            raise TypeError(
                f"Learner takes a loss of TorchRL's, which has its policy in it, not {type(loss_module).__name__}; "
                "such as ChunkClipPPOLoss(policy)"
            )
        check_settings("", settings, {**OPTIMIZER, **UPDATE})
        optim = {name: settings.pop(name) for name in OPTIMIZER if name in settings}
        check_minibatches(**settings)
        check_loss(loss_module, **settings)
        trained = [parameter for some in trained_parameters(loss_module) for parameter in some]
        if distributed.world_size() > 1 and not all(isinstance(each, DTensor) for each in trained):
            raise ValueError(
                f"{distributed.world_size()} processes train a policy together that is sharded: call shard(policy, "
                "distributed.device_mesh(shards=1)) of vla_policies.sharding first, and so for a critic of its own"
            )
        self.loss_module, self.policy, self._settings, self.steps = loss_module, policy_of(loss_module), settings, 0
        self.optimizer, self.scheduler = make_optimizer(loss_module, **optim)
        self._frozen = FrozenPolicy(self.policy) if getattr(loss_module, "reference_kl_coeff", 0.0) else None

    def update(self, batch: TensorDictBase | None) -> dict[str, float]:
        """Learn from a batch with advantages, see :class:`~vla_algos.minibatches.Minibatches`.

        Returns the metrics ``train/...`` (``docs/metrics.md``) of all processes. ValueError: nothing was executed, or
        the stored log-probabilities are not finite or not this policy's. FloatingPointError: no gradient was finite.
        """
        minibatches = Minibatches(self.loss_module, batch, **self._settings, steps=self.steps, frozen=self._frozen)
        if not minibatches.decisions:
            raise ValueError("no decision of this batch was executed: there is nothing to learn from")
        for minibatch in minibatches:
            self.optimizer.zero_grad()
            for part in minibatch:
                minibatch.total(minibatch.losses(part)).backward()
            if minibatch.too_far:
                break
            minibatch.step(self.optimizer)
        self.steps = minibatches.steps
        metrics = minibatches.metrics(self.optimizer)
        self.scheduler.step()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to resume exactly here: tensors and plain numbers."""
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "steps": self.steps,
        }
        return state if self._frozen is None else {**state, "reference": self._frozen.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken, with this learner's rates; the policy's own weights are not in it."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.steps = state["steps"]
        if self._frozen is not None:
            self._frozen.load_state_dict(state.get("reference", {}))

    def places(self) -> dict[str, Any]:
        """Return what lies as tensors of its state are to lie, by their keys."""
        return {"optimizer": places(self.optimizer), "reference": FrozenPolicy(self.policy).places()}
