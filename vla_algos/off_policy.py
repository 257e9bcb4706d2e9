"""Off-policy learning of decisions: transitions of chunks, a buffer of them that outlives its process, SAC's loss."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import SACLoss, ValueEstimators

from vla_algos.files import write_atomically
from vla_algos.samples import Samples
from vla_common import keys
from vla_common.checksums import ChecksumError
from vla_common.settings import BelowOne, Count, Positive, Width, checked
from vla_policies.steered import SteeredPolicy

STEPS = "steps_to_next_obs"  # int64 [K, 1], executed actions of a transition: by this name TorchRL's TD(0) discounts


def transitions(episode: TensorDictBase, gamma: float, n_steps: int = 1) -> TensorDict:
    """Return the transitions ``[K]`` of an episode ``[T]``: features, noise, and under ``next`` what follows.

    A decision is an action: its reward is that of its executed actions, each discounted by ``gamma`` to the power of
    those before it, and the value of what follows by ``gamma`` to the power of all that were executed
    (``steps_to_next_obs``). With ``n_steps`` the rewards of so many decisions are added, as far as the episode goes.

    What terminates an episode has no value afterwards. Where the time limit ended it, its last decision is what those
    before it bootstrap from: the observation after it was never looked at, so that of itself nothing is learnt.
    """
    after, count = episode[keys.NEXT], len(episode)
    mask = after[keys.STEP_MASK]
    executed = mask.sum(-1)
    reward = (after[keys.STEP_REWARDS] * mask * gamma ** (mask.cumsum(-1) - 1)).sum(-1)
    terminated = bool(after[keys.TERMINATED][-1])
    last = count if terminated else count - 1
    start = torch.arange(last)
    stop = (start + n_steps).clamp(max=last)
    total, steps = torch.zeros(last), torch.zeros(last, dtype=torch.int64)
    for ahead in range(n_steps):
        at = (start + ahead).clamp(max=count - 1)
        within = start + ahead < last
        total += torch.where(within, gamma**steps * reward[at], 0.0)
        steps += torch.where(within, executed[at], 0)
    over = (stop == last) & terminated
    following = {
        keys.FEATURES: episode[keys.FEATURES][stop.clamp(max=count - 1)],
        keys.REWARD: total.unsqueeze(-1),
        keys.TERMINATED: over.unsqueeze(-1),
        keys.DONE: over.unsqueeze(-1),
    }
    decided = episode.select(keys.FEATURES, keys.STEERING)[:last].to_dict()
    return TensorDict({**decided, STEPS: steps.unsqueeze(-1), keys.NEXT: following}, [last])


def demonstrated(samples: Samples, policy: SteeredPolicy) -> list[TensorDict]:
    """Return demonstrations as episodes ``[T]`` of decisions, each solved by its last action; rewards are not known.

    ValueError: no row for each decision, as ``demonstrations.stride`` does not divide the policy's chunks.
    """
    steps, numbers = samples[keys.STEP], samples[keys.EPISODE]
    episodes = []
    for number in numbers.unique():
        length = samples.choose(numbers == number)[keys.EPISODE_LEN].max().item()
        rows: TensorDict = samples.choose((numbers == number) & (steps % policy.chunk_size == 0))[:]
        if not torch.equal(rows[keys.STEP], torch.arange(0, length, policy.chunk_size)):
            raise ValueError(
                f"demonstrations lack the start of some chunks of {policy.chunk_size}; type demonstrations.stride=1"
            )
        mask, over = rows[keys.STEP_MASK], torch.zeros(len(rows), 1, dtype=torch.bool)
        ends = over.clone()
        ends[-1] = True
        after = {keys.STEP_MASK: mask, keys.SUCCESS: ends, keys.TERMINATED: ends, keys.CRASHED: over}
        seen = policy.explain(rows.to(policy.device)).cpu()
        episodes.append(seen.set(keys.NEXT, TensorDict(after, seen.batch_size)))
    return episodes


def paid_by_success(episode: TensorDictBase) -> TensorDictBase:
    """Return an episode ``[T]`` whose only reward is 1, for the action that solves it: what demonstrations tell too."""
    after = episode[keys.NEXT]
    first = after[keys.SUCCESS] & (after[keys.SUCCESS].cumsum(0) == 1)
    left = after[keys.STEP_MASK].flip(-1).cumsum(-1).flip(-1)  # executed actions of the chunk from each on
    return episode.copy().set((keys.NEXT, keys.STEP_REWARDS), (first & after[keys.STEP_MASK] & (left == 1)).float())


class Replay:
    """All transitions of a run: in TorchRL's buffer, and in the run's folder, where a checkpoint refers to them.

    Each :meth:`extend` writes one segment, a file that is never written again; a checkpoint has the digests of those
    that there were. There is room for every decision of the run, so that none is overwritten.

    Args:
        folder: of the segments.
        capacity: decisions of the whole run, at most; ``None``: what the first :meth:`extend` brings, and no more.
        gamma, n_steps: see :func:`transitions`.
        batch_size: transitions that :meth:`sample` draws, with replacement.
    """

    @checked
    def __init__(
        self,
        folder: Path,
        capacity: int | None = None,
        *,
        gamma: BelowOne = 0.98,
        n_steps: Count = 3,
        batch_size: Count = 128,
    ):
        self.folder, self.capacity, self.batch_size = Path(folder), capacity, batch_size
        self._asked, self.gamma, self.n_steps = capacity or 0, gamma, n_steps
        self._buffer: TensorDictReplayBuffer | None = None
        self._digests: list[str] = []  # of the segments

    @property
    def decisions(self) -> int:
        """How many transitions are kept."""
        return 0 if self._buffer is None else len(self._buffer)

    def bytes_of(self, policy: SteeredPolicy) -> int:
        """Return what all decisions of the run take at most, in memory and as much on the disk."""
        numbers = 2 * 2 * policy.num_features + 4 * policy.num_drawn  # features are float16, here and afterwards
        return (self.capacity or 0) * (numbers + 4 + 8 + 2)  # reward, steps, two flags

    def extend(self, episodes: Sequence[TensorDictBase]) -> int:
        """Keep transitions of episodes ``[T]`` that did not crash; returns how many. ValueError, OSError: no room."""
        whole = [episode.cpu() for episode in episodes if not episode[keys.NEXT, keys.CRASHED].any()]
        parts = [transitions(episode, self.gamma, self.n_steps) for episode in whole]
        if not sum(map(len, parts)):
            return 0
        rows: TensorDictBase = torch.cat(parts)
        self.capacity = self.capacity or len(rows)
        if (wanted := self.decisions + len(rows)) > self.capacity:
            raise ValueError(f"capacity={self.capacity}: there would be {wanted}; give it all decisions of the run")
        content = save({name: tensor.contiguous() for name, tensor in rows.flatten_keys(".").items()})
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._segment(len(self._digests)), content)
        self._digests.append(hashlib.sha256(content).hexdigest())
        self._keep(rows)
        return len(rows)

    def _keep(self, rows: TensorDictBase) -> None:
        if self._buffer is None:
            storage = LazyTensorStorage(self.capacity or len(rows))
            self._buffer = TensorDictReplayBuffer(storage=storage, batch_size=self.batch_size)
        self._buffer.extend(rows)

    def sample(self) -> TensorDictBase:
        """Draw a batch, from torch's global generator; ``features`` are float32, for networks."""
        assert self._buffer is not None, "there is nothing to sample"
        batch: TensorDictBase = self._buffer.sample().exclude("index")
        for key in (keys.FEATURES, (keys.NEXT, keys.FEATURES)):
            batch[key] = batch[key].float()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the digests of the segments, and how many transitions they have."""
        return {"digests": list(self._digests), "decisions": self.decisions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read the segments of :meth:`state_dict`; ``ChecksumError`` if one is not what was written."""
        self._buffer = None
        self._digests = state["digests"]
        self.capacity = self._asked + state.get("decisions", 0)  # a run of other settings may have kept more
        for number, digest in enumerate(self._digests):
            content = self._segment(number).read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                raise ChecksumError(f"{self._segment(number)} is not what the run wrote")
            self._keep(TensorDict(load(content)).auto_batch_size_(1).unflatten_keys("."))

    def _segment(self, number: int) -> Path:
        return self.folder / f"segment_{number + 1:05d}.safetensors"


@checked
def make_sac_loss(
    policy: SteeredPolicy,
    gamma: float,
    *,
    critics: Count = 4,
    width: Width = 128,
    layers: Count = 2,
    target_entropy: float = 0.0,
    alpha: Positive = 0.005,
) -> SACLoss:
    """Make TorchRL's loss of Soft Actor-Critic (arXiv:1812.05905) in the noise of a policy.

    Args:
        policy: whose actor is trained, in place.
        gamma: of a primitive action.
        critics: layer-normalised networks of which the smallest value counts.
        width: of their layers.
        layers: how many each has between.
        target_entropy: of each number of the noise, in nats, where the range is -1 to 1; 0.7 is that of even noise.
        alpha: the entropy's weight to begin with.
    """
    config, sizes = policy.config, (policy.num_features + policy.num_drawn, 1)
    network = MLP(
        *sizes,
        num_cells=[width] * layers,
        activation_class=nn.ReLU,
        norm_class=nn.LayerNorm,
        norm_kwargs=[{"normalized_shape": width}] * layers,
    )
    critic = ValueOperator(
        network.to(policy.device), in_keys=[keys.FEATURES, keys.STEERING], out_keys=["state_action_value"]
    )
    wanted = policy.num_drawn * (target_entropy + torch.tensor(config.limit).log().item())
    loss = SACLoss(policy.actor, critic, num_qvalue_nets=critics, target_entropy=wanted, alpha_init=alpha)
    loss.make_value_estimator(ValueEstimators.TD0, gamma=gamma)
    loss.target_entropy  # noqa: B018  it is a buffer from then on, which a state has to have
    return loss
