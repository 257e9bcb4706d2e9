"""A collector of one's own, for a copied recipe: docs/how-to/add-a-collector.md says where it goes.

TorchRL's ``env.rollout`` does the work. Every batch begins with fresh episodes, so that all of it is of one policy; for
that each observation is kept twice, and the critic sees the second one once more.
"""

import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_envs.resume import load_state, save_state


class FreshEpisodes:
    """So many decisions from the beginning of fresh episodes, in every environment."""

    def __init__(self, env, policy, decisions, step_hook=None):
        self.env, self.policy, self.decisions, self.step_hook = env, policy, decisions, step_hook

    @torch.no_grad()
    def rollout(self):
        """Collect ``[N, T]``; an environment whose episode ends begins the next one."""
        with set_exploration_type(ExplorationType.RANDOM):
            batch = self.env.rollout(self.decisions, self.policy, break_when_any_done=False)
        with set_exploration_type(ExplorationType.DETERMINISTIC):  # draws no random numbers
            after = self.policy(batch["next"].select(*self.policy.in_keys).flatten())
        values = after["state_value"].view_as(batch["state_value"])
        batch["next", "state_value"] = values.masked_fill(batch["next", "crashed"], 0.0)  # a crash has no future
        for step in range(self.decisions) if self.step_hook else ():  # films training episodes
            self.step_hook(batch[:, step])
        return batch

    def reset(self):
        """Nothing runs between two batches."""

    def state_dict(self):
        """Which episodes come next."""
        return {"environment": save_state(self.env, None)}

    def load_state_dict(self, state_dict):
        """Continue with them."""
        load_state(self.env, state_dict["environment"])
