"""Self-imitation: what has solved an episode is cloned, beside the loss of reinforcement learning."""

from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase

from vla_algos import distributed
from vla_algos.imitation import Sigma, check_imitation, share_of_imitation_loss
from vla_common.keys import ACTION, DONE, NEXT, STEP_MASK, SUCCESS, TASK_ID, TRIAL_ID
from vla_common.settings import Count, Factor, checked
from vla_policies import VLAPolicy

_BEGIN = 4  # batches that are stored before the first is drawn
_IDENTITY = {"decisions": (), "episodes": (TASK_ID, TRIAL_ID), "tasks": (TASK_ID,)}


class SelfImitation:
    """Keeps the last decisions of solved training episodes, and clones some of them with each optimizer step.

    With a sparse reward a policy forgets what it found once; this keeps it. It is the idea of self-imitation learning
    (Oh et al., 2018, arXiv:1806.05635), for whose threshold on the return stands the success of the episode, and for
    whose loss the policy's own of behaviour cloning. All processes have the same decisions, and clone a part each.

    ::

        solved.extend(batch)
        for minibatch in minibatches:
            ...  # backward passes of the loss
            solved.add_gradient()
            minibatch.step(optimizer)

    Args:
        policy: that is trained, with an ``imitation_loss``.
        coeff: factor of the cloning loss (``ValueError`` if the policy has none); 0: nothing is kept nor cloned.
        capacity: decisions that are kept, the newest. Their images are the most of a checkpoint.
        batch_size: decisions of an optimizer step, of all processes together. Four times as many are stored first.
        label_sigma: see ``cloning.label_sigma``.
        equal: what is drawn equally often: ``"decisions"``; ``"episodes"`` (initial states), so that a short one counts
            as much as a long one; or ``"tasks"``.
    """

    replicated = True  # the same in all processes
    optional = True  # a run may begin to need it when it is resumed

    @checked
    def __init__(
        self,
        policy: VLAPolicy,
        *,
        coeff: Factor = 0.0,
        capacity: Count = 4096,
        batch_size: Count = 128,
        label_sigma: Sigma = 0.1,
        equal: Literal["decisions", "episodes", "tasks"] = "decisions",
    ):
        if coeff:
            check_imitation(policy)
        self.policy, self.coeff, self.capacity = policy, coeff, capacity
        self.batch_size, self.label_sigma, self.equal = batch_size, label_sigma, equal
        self._stored: TensorDict | None = None  # [K], oldest first
        self._losses: list[torch.Tensor] = []  # shares of this process

    def extend(self, batch: TensorDictBase) -> None:
        """Keep the decisions of ``batch`` ``[N, T]``, in time order, of episodes that were solved in it."""
        if not self.coeff:
            return
        solved = in_solved_episodes(batch[NEXT, SUCCESS], batch[NEXT, DONE]).squeeze(-1)
        needed = [key for key in self.policy.loss_keys if key not in getattr(self.policy, "drawn_keys", ())]
        new = batch.select(*needed, ACTION, TASK_ID, TRIAL_ID)[solved].cpu()
        new[STEP_MASK] = batch[NEXT, STEP_MASK][solved].cpu()
        parts = [part.select(*new.keys()) for part in (self._stored, distributed.all_gather(new)) if part is not None]
        self._stored = torch.cat(parts)[-self.capacity :].clone()

    def add_gradient(self) -> None:
        """Add the gradient of cloning some of them, once there are enough; all processes call it."""
        stored = self._stored
        if stored is None or len(stored) < min(_BEGIN * self.batch_size, self.capacity):
            return
        rows = distributed.broadcast_object(self._draw(stored))
        loss = share_of_imitation_loss(self.policy, stored[rows], self.label_sigma)
        (self.coeff * loss).backward()
        self._losses.append(loss.detach())

    def _draw(self, stored: TensorDict) -> torch.Tensor:
        if not (identity := _IDENTITY[self.equal]):
            return torch.randint(len(stored), (self.batch_size,))
        which = torch.zeros(len(stored), dtype=torch.int64)  # one number each: rows are slow to compare
        for key in identity:
            which = which * (stored[key].max() + 1) + stored[key]
        _, number, counts = which.unique(return_inverse=True, return_counts=True)
        return torch.multinomial(1 / counts[number], self.batch_size, replacement=True)

    def metrics(self) -> dict[str, float]:
        """Return how many decisions are kept, and the mean loss since the last call, of all processes, which call it.

        Nothing without ``coeff``.
        """
        if not self.coeff:
            return {}
        losses, self._losses = self._losses, []
        whole = sum(distributed.all_gather_object(float(sum(losses))))
        mean = {"self_imitation/loss": whole / len(losses)} if losses else {}
        return {"self_imitation/decisions": float(0 if self._stored is None else len(self._stored)), **mean}

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, by its keys."""
        return {} if self._stored is None else dict(self._stored.items())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what :meth:`state_dict` returned; nothing without ``coeff``."""
        self._stored = TensorDict(state, [len(next(iter(state.values())))]) if state and self.coeff else None


def in_solved_episodes(success: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
    """Tell of decisions, bool ``[N, T, 1]`` as ``success`` so far and ``done``, whether their episode was solved.

    One that the batch does not see the end of was not, unless it is already.
    """
    solved, follows = torch.zeros_like(success), torch.zeros_like(success[:, 0])
    for time in reversed(range(success.shape[1])):
        follows = success[:, time] | (follows & ~done[:, time])
        solved[:, time] = follows
    return solved
