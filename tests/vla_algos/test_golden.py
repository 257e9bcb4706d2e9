"""Masks, advantages, losses and metrics against recorded numbers of the reference system.

``golden/algos.npz`` and ``golden/algos.json`` hold what the algorithm functions of RLinf (github.com/RLinf/RLinf,
commit a3816b596) returned for random inputs: 8 trajectories of 6 decisions of 4 actions, and minibatches of 12
decisions.
"""

import json
from itertools import product

import numpy as np
import pytest
import torch
from closeness import assert_near
from paths import GOLDEN as FOLDER
from scripted import scripted_spec
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase

from vla_algos.advantages import gae, group_advantages, trajectory_weights, valid_decisions
from vla_algos.collectors import EpisodeCollector
from vla_algos.groups import Group, grpo
from vla_algos.losses import ChunkClipPPOLoss
from vla_algos.metrics import explained_variance
from vla_common.keys import (
    ACTION,
    ACTION_LOG_PROB,
    ADVANTAGE,
    DONE,
    EPISODE_LEN,
    GROUP_ID,
    NEXT,
    REWARD,
    STATE_VALUE,
    STATES,
    STEP_MASK,
    STEP_REWARDS,
    TERMINATED,
    TRIAL_ID,
    VALUE_TARGET,
    WEIGHT,
)
from vla_envs import Episode, EpisodeQueue
from vla_envs.env import VLAEnv

ARRAYS = {name: torch.from_numpy(array) for name, array in np.load(FOLDER / "algos.npz").items()}
NUMBERS = json.loads((FOLDER / "algos.json").read_text())
SUMMED = 128  # roundings, where the log-probabilities of a chunk are summed
CLOSE = {"rel": 1e-5, "abs": 4e-6}  # 4e-6: of a mean of differences of float32 sums up to 30
S, B, C, A, GROUP_SIZE = (NUMBERS[name] for name in ("S", "B", "C", "D", "group_size"))
DISCOUNT = {"gamma": NUMBERS["gamma"], "lmbda": NUMBERS["gae_lambda"], "bootstrap": "none"}
DONES = ARRAYS["dones"][1:].transpose(0, 1)  # [B, S, C], after each action; the recording has a row of zeros before it
REWARDS = ARRAYS["rewards"].transpose(0, 1)
MASK = ARRAYS["loss_mask"].transpose(0, 1)

# With loss masks the reference weighs by this number, see `recorded_weight`. The recording used the length of the
# rollout; no other number reproduces its losses.
MAX_EPISODE_STEPS = S * C
CLIP, VALUE_CLIP, HUBER_DELTA = (0.2, 0.28), 0.2, 1.0
CASES = [case for case in product(["chunk", "action"], ["token", "action", "chunk"], ["masked", "unmasked"])
         if case[:2] != ("action", "chunk")]  # fmt: skip


class Still(TensorDictModuleBase):
    """Does nothing, which is enough where the simulator plays back what happens."""

    in_keys, loss_keys, out_keys = [STATES], [STATES], [ACTION, ACTION_LOG_PROB]

    def forward(self, td):
        return td.update({key: torch.zeros(len(td), C, A) for key in self.out_keys})


@pytest.fixture(scope="module")
def episodes():
    """The recorded trajectories as our environment runs them, which stops each at its first done."""
    first_done = DONES.flatten(1).int().argmax(1) + 1
    solved_after = [int(step) if step < S * C else 0 for step in first_done]  # those of full length run out of time
    spec = scripted_spec(REWARDS.flatten(1).tolist(), solved_after, A)
    env = VLAEnv(spec, 3, C, EpisodeQueue([]), num_workers=1)
    queue = [Episode(0, trial_id=trial, group_id=trial // GROUP_SIZE) for trial in range(B)]
    yield list(EpisodeCollector(env, Still(), queue))
    env.close()


def test_step_masks_are_the_recorded_loss_masks(episodes):
    """The reference runs each chunk to its end and then masks what came after the first done; the action that caused
    it still counts. Ours never executes what came after, and ``step_mask`` says so. Decisions that begin after the
    end, whole rows of zeros in the recording, do not exist.
    """
    for trial, episode in enumerate(episodes):
        assert (episode[TRIAL_ID] == trial).all()
        recorded = MASK[trial]
        assert torch.equal(episode[NEXT, STEP_MASK], recorded[: len(episode)])
        assert torch.equal(valid_decisions(episode).squeeze(-1), recorded[: len(episode)].any(-1))
        assert not recorded[len(episode) :].any()
        assert (ARRAYS["loss_mask_sum"][:, trial] == episode[NEXT, EPISODE_LEN][-1]).all()


def rollout(values, reward, done, mask):
    """Values ``[B, T + 1, ...]`` and the rest ``[B, T, ...]`` to a batch ``[B, T]``."""
    after = {
        STATE_VALUE: values[:, 1:],
        REWARD: reward.sum(-1, keepdim=True),
        STEP_REWARDS: reward,
        DONE: done.any(-1, keepdim=True),
        TERMINATED: torch.zeros_like(done.any(-1, keepdim=True)),
        STEP_MASK: mask,
    }
    return TensorDict({STATE_VALUE: values[:, :-1], NEXT: after}, mask.shape[:2])


def assert_recorded_gae(batch, name, valid):
    for key, kind in [(ADVANTAGE, "advantages"), (VALUE_TARGET, "returns")]:
        expected = ARRAYS[f"{name}/{kind}"].transpose(0, 1).reshape(batch[key].shape)
        assert_near(batch[key][valid], expected[valid])


@pytest.mark.parametrize("masked", ["masked", "unmasked"])
def test_gae_per_chunk(masked):
    """The reference bootstraps beyond no end of an episode; truncation is paid for in its rewards."""
    name = f"gae/chunk_level/{masked}"
    mask = MASK if masked == "masked" else torch.ones_like(MASK)
    batch = gae(rollout(ARRAYS[f"{name}/values"].transpose(0, 1), REWARDS, DONES, mask), **DISCOUNT)
    assert_recorded_gae(batch, name, mask.any(-1, keepdim=True))


def test_gae_per_action_masked():
    name = "gae/action_level/masked"
    values = ARRAYS[f"{name}/values"].transpose(0, 1)
    assert MASK.any(-1).ne(MASK.all(-1)).any()  # episodes end in mid-chunk
    batch = rollout(values, REWARDS, DONES, MASK)
    batch[NEXT, REWARD] = torch.where(MASK, REWARDS, 0.0).sum(-1, keepdim=True)  # of what was executed, as ours are
    assert_recorded_gae(gae(batch, **DISCOUNT, reward_level="action"), name, MASK)


def test_gae_per_action_unmasked():
    """Unmasked, the reference continues in mid-chunk with the next episode, which ours never does: each action is taken
    as a chunk of one.
    """
    name = "gae/action_level/unmasked"
    values = ARRAYS[f"{name}/values"].transpose(0, 1).flatten(1)[:, : S * C + 1]
    flat = [x.flatten(1).unsqueeze(-1) for x in (REWARDS, DONES, torch.ones_like(MASK))]
    for level in ("action", "chunk"):
        batch = gae(rollout(values.unsqueeze(-1), *flat), **DISCOUNT, reward_level=level)
        assert_recorded_gae(batch, name, torch.ones(B, S * C, 1, dtype=torch.bool))


@pytest.mark.parametrize("level", ["chunk", "action"])
def test_grpo_advantages(episodes, level):
    """Per chunk, the reference counts the rewards after the end of the episode that fall into its last chunk. Our
    environment does not execute those actions, so their recorded rewards are put in here.
    """
    episodes = [episode.clone() for episode in episodes]
    if level == "chunk":
        for trial, episode in enumerate(episodes):
            episode[NEXT, REWARD] = REWARDS[trial, : len(episode)].sum(-1, keepdim=True)
    labels = torch.stack([episode[GROUP_ID][0] for episode in episodes])
    groups = [Group.of([episodes[i] for i in (labels == label).nonzero()]) for label in labels.unique()]
    assert [len(group.episodes) for group in groups] == [GROUP_SIZE] * (B // GROUP_SIZE)
    batch = grpo(groups)
    recorded = ARRAYS[f"grpo/{level}_level/advantages"].transpose(0, 1)
    mask = MASK if level == "action" else MASK.any(-1, keepdim=True)
    assert (recorded[~mask] == 0).all()
    executed = batch[NEXT, STEP_MASK] if level == "action" else valid_decisions(batch)
    ours = batch[ADVANTAGE].expand(executed.shape)[executed]
    assert_near(ours, recorded[mask])
    assert ours.abs().min() > 0

    scores = torch.cat([group.scores for group in groups])
    assert_near(group_advantages(scores, labels), recorded[:, 0, 0])


class Recorded(TensorDictModuleBase):
    """Returns what it was given, as leaves of the graph."""

    in_keys = out_keys = loss_keys = []

    def __init__(self, log_prob, value):
        super().__init__()
        self.log_prob, self.value = log_prob.clone().requires_grad_(), value.clone().requires_grad_()

    def evaluate_actions(self, td):
        return self.log_prob, torch.zeros_like(self.log_prob), self.value


class Case:
    """A recorded minibatch of 12 decisions, and our loss on it."""

    def __init__(self, reward_level, log_prob_level, masked):
        self.name = f"loss/{reward_level}_level/{log_prob_level}_level/{masked}"
        self.reward_level, self.level, self.masked = reward_level, log_prob_level, masked == "masked"
        names = ("logprobs", "old_logprobs", "advantages", "values", "prev_values", "returns", "loss_mask",
                 "loss_mask_sum", "loss", "grad_logprobs", "grad_values")  # fmt: skip
        self.given = {name: ARRAYS[f"{self.name}/{name}"] for name in names}
        self.metrics = NUMBERS[self.name]
        self.mask = self.given["loss_mask"] if self.masked else torch.ones_like(self.given["loss_mask"])

    def recorded_weight(self):
        """The reference's weight of a decision, as one that ours takes.

        Its loss is the mean of ``term * mask * max_episode_steps / loss_mask_sum`` over all elements, masked ones
        included (its ``masked_mean_ratio``); ours divides by the number of valid ones. See the last test of this file
        for what that has to do with ``trajectory_weights``.
        """
        share = MAX_EPISODE_STEPS / self.given["loss_mask_sum"][:, :1]
        return share * self.mask.float().mean()

    def ours(self):
        """The policy with its gradients and what our loss returned."""
        policy = Recorded(self.given["logprobs"].view(12, C, A), self.given["values"])
        data = {
            ACTION_LOG_PROB: self.given["old_logprobs"].view(12, C, A),
            ADVANTAGE: self.given["advantages"],
            STATE_VALUE: self.given["prev_values"],
            VALUE_TARGET: self.given["returns"],
            NEXT: {STEP_MASK: self.mask.expand(12, C)},
        }
        if self.masked:
            data[WEIGHT] = self.recorded_weight()
        loss = ChunkClipPPOLoss(
            policy,
            log_prob_level=self.level,
            clip_epsilon=CLIP,
            clip_value=VALUE_CLIP,
            huber_delta=HUBER_DELTA,
        )
        out = loss(TensorDict(data, [12]))
        (out["loss_objective"] + out["loss_critic"]).backward()
        return policy, out

    def elements(self):
        """Log-ratios, advantages and validity at the level of the ratio, in plain numpy."""
        given = {name: tensor.double().numpy() for name, tensor in self.given.items()}
        log_ratio = (given["logprobs"] - given["old_logprobs"]).reshape(12, C, A)
        advantage, valid = given["advantages"], self.mask.numpy()
        if self.level == "token":
            advantage, valid = advantage[..., None], valid[..., None]
        else:
            log_ratio = log_ratio.sum(-1) if self.level == "action" else log_ratio.sum((1, 2))
        if self.level == "chunk":
            advantage, valid = advantage[:, 0], valid[:, 0]
        return log_ratio, np.broadcast_to(advantage, log_ratio.shape), np.broadcast_to(valid, log_ratio.shape)

    def unexpanded(self):
        """What the reference divides some metrics by: the number of valid entries of the mask as it came, before it is
        broadcast to the elements; without a mask, the number of elements.
        """
        return self.mask.sum().item() if self.masked else self.elements()[0].size


@pytest.fixture(params=CASES, ids="-".join)
def case(request):
    return Case(*request.param)


def test_loss_and_gradients(case):
    policy, out = case.ours()
    assert_near(out["loss_objective"] + out["loss_critic"], case.given["loss"], SUMMED)
    assert_near(policy.log_prob.grad.view(12, C * A), case.given["grad_logprobs"], SUMMED)
    assert_near(policy.value.grad, case.given["grad_values"], SUMMED)
    assert case.given["grad_logprobs"].abs().max() > 1e-3
    assert case.given["grad_values"].abs().max() > 1e-3
    assert out["policy_loss"].item() == pytest.approx(case.metrics["actor/policy_loss"], **CLOSE)
    assert out["value_loss"].item() == pytest.approx(case.metrics["critic/value_loss"], **CLOSE)


def test_ratios(case):
    """Defect of the reference: the mean of ratios per action under a mask per decision is their sum over the chunk."""
    _, out = case.ours()
    log_ratio, _, valid = case.elements()
    ratio = np.exp(log_ratio)
    clipped = ratio.clip(1 - CLIP[0], 1 + CLIP[1])
    summed = C if case.masked and (case.reward_level, case.level) == ("chunk", "action") else 1
    assert case.metrics["actor/ratio"] == pytest.approx(summed * ratio[valid].mean(), **CLOSE)
    assert case.metrics["actor/clipped_ratio"] == pytest.approx(summed * clipped[valid].mean(), **CLOSE)
    assert out["ratio"].item() == pytest.approx(ratio[valid].mean(), **CLOSE)
    assert out["clipped_ratio"].item() == pytest.approx(clipped[valid].mean(), **CLOSE)


def test_approximate_kl_and_clip_fraction(case):
    """Defect of the reference: under a mask both are divided by the number of entries of the mask before it is
    broadcast to the elements that were summed, and come out up to ``C * A`` times too large. Ours are means.
    """
    _, out = case.ours()
    log_ratio, advantage, valid = case.elements()
    ratio = np.exp(log_ratio)
    gain, clipped_gain = ratio * advantage, ratio.clip(1 - CLIP[0], 1 + CLIP[1]) * advantage
    clipping = gain > clipped_gain
    count = case.unexpanded()
    assert case.metrics["actor/approx_kl"] == pytest.approx(-log_ratio[valid].sum() / count, **CLOSE)
    assert case.metrics["actor/clip_fraction"] == pytest.approx(clipping[valid].sum() / count, abs=1e-6)
    assert out["kl_approx"].item() == pytest.approx(-log_ratio[valid].mean(), **CLOSE)
    assert out["kl_k3"].item() == pytest.approx((ratio - 1 - log_ratio)[valid].mean(), abs=1e-6)
    assert out["clip_fraction"].item() == pytest.approx(clipping[valid].mean(), abs=1e-6)
    elements = {"token": A * C, "action": C, "chunk": 1}[case.level]
    per_entry = elements // (C if case.reward_level == "action" else 1)
    assert valid.sum() / count == (per_entry if case.masked else 1)


def test_value_clip_fraction(case):
    """Defect of the reference: it clamps the change of the value and then asks whether the clamped change is larger
    than the bound it was clamped to. The answer is rounding noise, masked entries included.
    """
    _, out = case.ours()
    old, value = case.given["prev_values"], case.given["values"]
    near = old + (value - old).clamp(-VALUE_CLIP, VALUE_CLIP)
    noise = ((near - old).abs() > VALUE_CLIP).float().mean().item()
    assert case.metrics["critic/value_clip_ratio"] == pytest.approx(noise, abs=1e-6)
    moved = np.abs(value.double().numpy() - old.double().numpy())[case.mask.numpy()] > VALUE_CLIP
    assert out["value_clip_fraction"].item() == pytest.approx(moved.mean(), abs=1e-6)
    assert abs(moved.mean() - noise) > 0.03


def test_explained_variance(case):
    """The reference keeps sums over its minibatches; the ratio of variances needs no more, however they are scaled."""
    sums = {name.rpartition("/")[2]: value for name, value in case.metrics.items() if name.startswith("__sum__")}
    variance = lambda kind: sums[f"{kind}_sq_sum"] / sums["count"] - (sums[f"{kind}_sum"] / sums["count"]) ** 2  # noqa: E731
    valid = case.mask
    assert valid.sum() == sums["count"]
    ours = explained_variance(case.given["values"][valid], case.given["returns"][valid])
    assert ours.item() == pytest.approx(1 - variance("errors") / variance("returns"), **CLOSE)


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
@pytest.mark.parametrize("max_episode_steps", [S * C, 5 * S * C])
def test_trajectory_weights_are_the_references_up_to_a_constant(level, max_episode_steps):
    """On complete trajectories of whole chunks, one in each of ``n`` rows of ``S`` decisions.

    The reference weighs by ``max_episode_steps / length`` and takes the mean over all ``n * S * C`` positions: that is
    ``max_episode_steps / (S * C)`` times the mean over trajectories of their own means. Ours leaves the constant out,
    which depends on the horizon and on the room that the rollout had, not on what happened.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([6, 1, 4, 2])
    n = len(lengths)
    random = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    decision = torch.arange(S).expand(n, S)
    mask = (decision < lengths[:, None]).unsqueeze(-1)  # [n, S, 1]
    old, change = -random(n, S, C, A).abs(), 0.1 * random(n, S, C, A)
    advantage, value, target = random(n, S, 1), random(n, S, 1), random(n, S, 1)

    log_ratio, wide, valid = change, advantage, mask
    if level == "token":
        wide, valid = wide.unsqueeze(-1), valid.unsqueeze(-1)
    else:
        log_ratio = change.sum(-1) if level == "action" else change.sum((-2, -1)).unsqueeze(-1)
    ratio = log_ratio.exp()
    objective = torch.maximum(-wide * ratio, -wide * ratio.clamp(1 - CLIP[0], 1 + CLIP[1]))
    share = (lengths * C / max_episode_steps).view(n, 1, 1)
    reference = (objective / share.reshape(n, *(1,) * (objective.ndim - 1)) * valid).mean()
    critic = torch.nn.functional.huber_loss(value, target, reduction="none", delta=HUBER_DELTA)
    reference = reference + (critic / share * mask).mean()

    batch = TensorDict(
        {
            ACTION_LOG_PROB: old,
            ADVANTAGE: advantage,
            STATE_VALUE: value,
            VALUE_TARGET: target,
            NEXT: {STEP_MASK: mask.expand(n, S, C), DONE: (decision == lengths[:, None] - 1).unsqueeze(-1)},
        },
        [n, S],
    )
    trajectory_weights(batch, level)
    policy = Recorded((old + change).flatten(0, 1), value.flatten(0, 1))
    loss = ChunkClipPPOLoss(policy, log_prob_level=level, clip_epsilon=CLIP, clip_value=None, huber_delta=HUBER_DELTA)
    out = loss(batch.reshape(-1))
    ours = (out["loss_objective"] + out["loss_critic"]).item()
    assert ours * max_episode_steps / (S * C) == pytest.approx(reference.item(), **CLOSE)
