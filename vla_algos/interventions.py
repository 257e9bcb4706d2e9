"""DAgger: a scripted expert takes over where a policy has led, and what it does there is kept."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from vla_algos import distributed
from vla_algos.demonstrations import record_demonstrations
from vla_algos.imitation import check_imitation
from vla_algos.samples import Samples
from vla_common import keys
from vla_common.settings import Count, checked
from vla_envs import Episode, VLAEnv
from vla_policies import VLAPolicy

_SHRUNK = 256  # demonstrations whose images are made smaller at a time


class Interventions:
    """Keeps what the benchmark's scripted expert does when it takes over from a policy: the data set of DAgger.

    Ross et al., 2011 (arXiv:1011.0686), in the form where the policy acts first. All processes have the same.

    ::

        interventions.extend(env, episodes, visited)
        clone(policy, interventions.samples(), ...)

    Args:
        policy: it is the policy's decisions that lead there.
        demonstrations: of :class:`~vla_algos.Demonstrations`, which are learnt from too.
        budget: actions of the expert that are kept in the whole run, of all processes together. A call of
            :meth:`extend` that begins below it may exceed it, those after do nothing. ``None``: no limit.
        **recording: of :class:`~vla_algos.demonstrations.RecordingSettings`.

    Attributes:
        actions: of the expert that are kept so far, of all processes.
    """

    replicated = True  # the same in all processes

    @checked
    def __init__(
        self, policy: VLAPolicy, demonstrations: Samples | None = None, *, budget: Count | None = None, **recording: Any
    ):
        check_imitation(policy)
        self.policy, self.budget, self.actions, self._recording = policy, budget, 0, recording
        self._demonstrations: TensorDict | None = None
        if demonstrations is not None:  # in memory, with smaller images where the policy resizes, as the expert's are
            data: TensorDict = demonstrations[torch.arange(len(demonstrations))]
            if keys.MODEL_IMAGES in policy.loss_keys and keys.MODEL_IMAGES not in data:
                data = torch.cat([policy.shrink_images(part.to(policy.device)).cpu() for part in data.split(_SHRUNK)])
            self._demonstrations = data
        self._rows: TensorDict | None = None  # [K], oldest first

    def extend(self, env: VLAEnv, episodes: Sequence[Episode], visited: Sequence[TensorDictBase]) -> None:
        """Let the expert take over in ``episodes``, each before a decision of its ``[T]`` that is drawn evenly.

        Workers of ``env`` simulate them once more, with the policy's actions up to there: a repeated episode is the
        same to the bit. ``visited`` is as a collector yields it; what crashed or is not solved from there is left out.
        """
        if self.budget is not None and self.actions >= self.budget:
            return
        begun = [each for each in zip(episodes, visited, strict=True) if not each[1][keys.NEXT, keys.CRASHED].any()]
        before = [[*each[keys.ACTION][: int(torch.randint(len(each), ()))].cpu().numpy()] for _, each in begun]
        alone = [episode for episode, _ in begun]
        new = record_demonstrations(env, self.policy, alone, before=before, **self._recording) if begun else ()
        everywhere = distributed.all_gather(new if len(new) else None)
        if everywhere is not None:
            firsts = everywhere[keys.STEP] == 0  # of each time that the expert took over
            self.actions += int(everywhere[keys.EPISODE_LEN][firsts].sum())
            everywhere[keys.EPISODE] = firsts.cumsum(0) - 1
            self._rows = everywhere if self._rows is None else _one_after_the_other(self._rows, everywhere)

    def samples(self) -> Samples:
        """Return all that there is to clone: the demonstrations, and what was kept; ``RuntimeError`` if nothing is."""
        parts = [each for each in (self._demonstrations, self._rows) if each is not None]
        if not parts:
            raise RuntimeError("there is nothing to clone: the expert has not taken over in any episode")
        return Samples(parts[0] if len(parts) == 1 else _one_after_the_other(*parts))

    def metrics(self) -> dict[str, float]:
        """Return how many decisions, and how many actions of the expert, are kept."""
        decisions = 0 if self._rows is None else len(self._rows)
        return {"interventions/decisions": float(decisions), "interventions/actions": float(self.actions)}

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, by its keys."""
        return {"actions": self.actions, "rows": {} if self._rows is None else dict(self._rows.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what :meth:`state_dict` returned."""
        self.actions, rows = state["actions"], state["rows"]
        self._rows = TensorDict(rows, [len(rows[keys.STEP])]) if rows else None


def _one_after_the_other(first: TensorDict, then: TensorDict) -> TensorDict:
    """Join demonstrations, which keep their order; each has a number of its own."""
    both = [name for name in then.keys() if name in first.keys()]  # noqa: SIM118  a TensorDict iterates over rows
    numbers = [first[keys.EPISODE], then[keys.EPISODE] + first[keys.EPISODE].max() + 1]
    joined: TensorDict = torch.cat([first.select(*both), then.select(*both)])
    return joined.set(keys.EPISODE, torch.cat(numbers))
