"""REINFORCE with a leave-one-out baseline, for a copied recipe: docs/how-to/add-an-algorithm.md says where it goes.

Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; for language models Ahmadian et al. 2024
(arXiv 2402.14740).
"""

from tensordict import TensorDict
from torchrl.objectives import LossModule

from vla_algos.groups import concatenate


def leave_one_out(groups):
    """Give each run of a group its score less the mean score of the others; ``None`` where nothing can be learnt.

    Returns:
        The decisions ``[D]`` of all groups whose runs differ, with ``advantage`` ``[D, 1]``.
    """
    kept = [group for group in groups if group.has_signal]
    for group in kept:
        scores = group.scores  # one per run
        others = (scores.sum() - scores) / (len(scores) - 1)
        for episode, advantage in zip(group.episodes, scores - others, strict=True):
            episode["advantage"] = advantage.expand(len(episode), 1)
    return concatenate(kept) if kept else None


class ReinforceLoss(LossModule):
    """``-A log p`` of the action tokens that were executed."""

    in_keys = ("advantage", ("next", "step_mask"))
    out_keys = ("loss_objective",)

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, tensordict):
        """Return the loss of a minibatch ``[B]``."""
        log_prob, _, _ = self.policy.evaluate_actions(tensordict)  # [B, C, A]
        executed = tensordict["next", "step_mask"].unsqueeze(-1).expand_as(log_prob)
        gain = tensordict["advantage"].unsqueeze(-1) * log_prob
        return TensorDict({"loss_objective": -gain[executed].mean()})
