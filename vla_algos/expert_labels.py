"""DAgger: what the scripted expert would have done in the states that a policy has visited."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from vla_algos import distributed
from vla_algos.samples import Samples
from vla_common import keys
from vla_common.settings import Count, checked
from vla_envs import Episode, VLAEnv
from vla_envs.workers.calls import reason
from vla_policies import VLAPolicy

_SHRUNK = 256  # demonstrations whose images are made smaller at a time


class ExpertLabels:
    """Keeps decisions of a policy, each with what the benchmark's scripted expert would have done: DAgger's data set.

    Ross et al., 2011 (arXiv:1011.0686). All processes have the same decisions.

    ::

        labels.extend(env, episodes, visited)
        clone(policy, labels.samples(), ...)

    A label is what the expert would do in the states that the policy's own chunk leads to, one action after the other:
    the expert is not simulated ahead. So it needs no world that can be put back, and is what a disturbed demonstration
    is labelled with too. Only where a chunk is executed as a whole the expert says a whole one.

    Args:
        policy: whose decisions they are.
        demonstrations: of :class:`~vla_algos.Demonstrations`, which are learnt from too.
        budget: actions that the expert is asked for in a call of :meth:`extend`, of all processes together: episodes
            beyond it are left out. ``None``: all that were executed.

    Attributes:
        asked: actions that the expert was asked for so far, in all processes.
    """

    replicated = True  # the same in all processes

    @checked
    def __init__(self, policy: VLAPolicy, demonstrations: Samples | None = None, *, budget: Count | None = None):
        self.policy, self.asked = policy, 0
        self._demonstrations = None if demonstrations is None else self._as_visited(demonstrations)
        self.budget = None if budget is None else distributed.per_rank(budget, "labels.budget")
        self._rows: TensorDict | None = None  # [K], by episode, oldest first

    def extend(self, env: VLAEnv, episodes: Sequence[Episode], visited: Sequence[TensorDictBase]) -> None:
        """Ask the expert about ``episodes``, each ``[T]`` as a collector yields it; those that crashed are left out.

        Workers of ``env`` simulate them once more; the episodes in its slots stay where they are.
        """
        chosen, asked = [], 0
        for episode, decisions in zip(episodes, visited, strict=True):
            count = int(decisions[keys.NEXT, keys.STEP_MASK].sum())
            if decisions[keys.NEXT, keys.CRASHED].any() or (self.budget is not None and asked + count > self.budget):
                continue
            chosen.append((episode, decisions.cpu()))
            asked += count
        chosen.sort(key=lambda each: each[0].task_id)  # another task may be another world to build
        visits = [
            (episode, each[keys.ACTION].numpy(), each[keys.NEXT, keys.STEP_MASK].numpy()) for episode, each in chosen
        ]
        left_out: list[str] = []
        answers = env.pool.map(
            "vla_envs.experts:label",
            visits,
            on_error=lambda visit, error: left_out.append(f"{env.simulator_spec.describe(visit[0])}: {reason(error)}"),
            ignore_terminations=env.ignore_terminations,
        )
        if left_out:
            warnings.warn(f"the expert said nothing about {len(left_out)} episodes, first {left_out[0]}", stacklevel=2)
        answered = [(each, answer) for (_, each), answer in zip(chosen, answers, strict=True) if answer is not None]
        everywhere = distributed.all_gather_object([self._labelled(*each) for each in answered])
        kept, first = ([], 0) if self._rows is None else ([self._rows], int(self._rows[keys.EPISODE][-1]) + 1)
        new = [rows for part in everywhere for rows in part]
        for number, rows in enumerate(new, first):
            rows[keys.EPISODE] = torch.full([len(rows)], number)
        self._rows = torch.cat(kept + new) if kept + new else None
        self.asked += sum(distributed.all_gather_object(asked))

    def _labelled(self, decisions: TensorDictBase, answer: dict[str, np.ndarray]) -> TensorDict:
        rows = decisions.select(*self.policy.loss_keys, keys.TASK_ID, keys.TRIAL_ID)
        before = decisions[keys.NEXT, keys.EPISODE_LEN].squeeze(-1) - decisions[keys.NEXT, keys.STEP_MASK].sum(1)
        rows.update({name: torch.from_numpy(answer[name]) for name in (keys.ACTION, keys.STEP_MASK)})
        final = torch.from_numpy(answer[keys.FINAL_STATES]).expand(len(rows), -1)
        return rows.update({keys.STEP: before, keys.FINAL_STATES: final.clone()})

    def _as_visited(self, demonstrations: Samples) -> TensorDict:
        """Read demonstrations as the policy keeps what it visits: with smaller images, if it resizes."""
        data: TensorDict = demonstrations[torch.arange(len(demonstrations))]
        if keys.MODEL_IMAGES not in self.policy.loss_keys or keys.MODEL_IMAGES in data:
            return data
        parts = data.split(_SHRUNK)
        return torch.cat([self.policy.shrink_images(part.to(self.policy.device)).cpu() for part in parts])

    def samples(self) -> Samples:
        """Return all that there is to clone: the demonstrations, and what was kept; ``RuntimeError`` if nothing is."""
        first, new = self._demonstrations, self._rows
        if first is None or new is None:
            if first is None and new is None:
                raise RuntimeError("the expert was asked about no episode: all crashed, or labels.budget is too small")
            return Samples(new if first is None else first)
        new = new.copy()
        new[keys.EPISODE] = new[keys.EPISODE] + first[keys.EPISODE].max() + 1  # in order, and each its own
        both = [name for name in new.keys() if name in first.keys()]  # noqa: SIM118  a TensorDict iterates over rows
        return Samples(torch.cat([first.select(*both), new.select(*both)]))

    def metrics(self) -> dict[str, float]:
        """Return how many decisions are kept, and how many actions the expert was asked for so far."""
        return {
            "labels/decisions": float(0 if self._rows is None else len(self._rows)),
            "labels/asked": float(self.asked),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, by its keys."""
        return {"asked": self.asked, "rows": {} if self._rows is None else dict(self._rows.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what :meth:`state_dict` returned."""
        self.asked, rows = state["asked"], state["rows"]
        self._rows = TensorDict(rows, [len(rows[keys.STEP])]) if rows else None
