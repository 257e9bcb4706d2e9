"""Behaviour cloning: the warm start before reinforcement learning."""

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Gt, Le
from tensordict import TensorDict, TensorDictBase
from torchrl.envs.utils import ExplorationType, set_exploration_type
from tqdm import tqdm

from vla_algos import distributed
from vla_algos.files import finite_or_none
from vla_algos.optim import Schedule, clip_gradient, places, trained_parameters
from vla_algos.samples import Samples
from vla_algos.state_prediction import StatePrediction
from vla_common import keys
from vla_common.settings import Count, Factor, Fraction, Rate, checked
from vla_common.texts import decode
from vla_envs.protocol import are_numbers
from vla_policies import VLAPolicy
from vla_policies.sharding import compute_device, reshard

Sigma = Annotated[float, Gt(0), Le(1)]  # width of soft labels, as a fraction of half the range


def check_state_noise(state_noise: Any, state_dim: int) -> None:
    """Refuse (``ValueError``) what is neither a number nor one for each of ``state_dim`` states."""
    if not are_numbers([state_noise], 1) and not are_numbers(state_noise, state_dim):
        raise ValueError(f"state_noise is one number or one for each of the {state_dim} states, got {state_noise}")


def clone(
    policy: VLAPolicy, demonstrations: Samples, heldout: Samples | None, folder: Path, *, steps: Count, **settings: Any
) -> None:
    """Clone demonstrations into ``policy``, in all processes at once: ``recipes/sft.py`` within another recipe.

    Args:
        policy: trained in place.
        demonstrations: what it learns from.
        heldout: the loss on these is said at the end, if there are some.
        folder: gets ``metrics.jsonl``, whose steps are not the run's.
        steps: of the optimizer.
        **settings: of :class:`BehaviourCloning`.
    """
    cloning, main = BehaviourCloning(policy, demonstrations, steps=steps, **settings), distributed.is_main()
    if main:
        folder.mkdir(parents=True, exist_ok=True)
    with (
        open(folder / "metrics.jsonl" if main else os.devnull, "w", buffering=1) as log,  # a line at a time
        tqdm(total=steps, desc="behaviour cloning", unit="step", disable=not main) as bar,
    ):

        def note(step: int, metrics: Mapping[str, float]) -> None:
            log.write(json.dumps({"step": step, **finite_or_none(metrics)}) + "\n")

        for step in range(1, steps + 1):
            loss = cloning.step()
            note(step, {"train/loss": loss})
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
        if heldout:
            measured = cloning.evaluate(heldout)
            note(steps, {f"heldout/{name}": value for name, value in measured.items()})
            error = f", error {measured['error']:.3f} of half the range" if "error" in measured else ""
            bar.write(f"{heldout.episodes} demonstrations held out: loss {measured['loss']:.3f}{error}")


class BehaviourCloning:
    """Trains ``policy`` to imitate, and sets the normalisation of its states if it has none yet.

    Several processes that share a sharded policy work off a part of each batch each; all have all demonstrations. What
    a policy draws by itself, such as the noise of a flow, each draws for its part: seed them differently.

    Args:
        policy: trained in place.
        demonstrations: of :func:`~vla_algos.demonstrations.record_demonstrations` or
            :func:`~vla_algos.demonstrations.for_policy`.
        steps: number of AdamW steps there will be, with linear warm-up and cosine decay to 2 % of ``lr``.
        batch_size: samples per step.
        lr, weight_decay: of AdamW.
        label_sigma: width of the soft labels, see ``imitation_loss`` of the policy.
        state_noise: standard deviation of noise on ``states`` in their own units, one number or one for each of the
            ``S``. It keeps the policy from reading the phase of the motion off the state instead of the image.
        warmup_steps: of the learning rate.
        auxiliary: weight of a second loss, which teaches the policy where to look: from what it has made of image and
            instruction alone a small network, thrown away afterwards, predicts the states to come
            (:class:`~vla_algos.state_prediction.StatePrediction`).

    Raises:
        ValueError: ``state_noise`` is neither; ``auxiliary`` of a policy without ``vision_features``.
    """

    replicated = True

    @checked
    def __init__(
        self,
        policy: VLAPolicy,
        demonstrations: TensorDict | Samples,
        *,
        steps: Count,
        batch_size: Count = 32,
        lr: Rate = 1e-3,
        weight_decay: Fraction = 1e-4,
        label_sigma: Sigma = 0.1,
        state_noise: Factor | Sequence[Factor] = 0.01,
        warmup_steps: Count = 30,
        auxiliary: Factor = 0.0,
    ):
        trained_parameters(policy)  # ValueError: a precision that rounds steps away
        states = demonstrations[keys.STATES]
        check_state_noise(state_noise, states.shape[-1])
        spread = states.std(0) if len(states) > 1 else torch.zeros_like(states[0])
        policy.set_statistics(states.mean(0), spread + 1e-2)  # a constant entry must not be blown up
        self.policy, self.demonstrations = policy, demonstrations
        self.batch_size, self.label_sigma, self.state_noise = batch_size, label_sigma, torch.tensor(state_noise)
        trained: list[dict[str, Any]] = [{"params": list(policy.parameters())}]
        self.state_prediction = None
        if auxiliary:
            self.state_prediction = StatePrediction(policy, demonstrations, auxiliary, label_sigma)
            # A group of its own: on a GPU AdamW takes a group's tensors together, which must not be shards and whole.
            trained.append({"params": list(self.state_prediction.parameters())})
        self.optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=weight_decay)

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / warmup_steps) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))

        self.schedule = Schedule(self.optimizer, factor)
        self._order: list[torch.Tensor] = []  # batches that are left of this epoch, the next one last

    def step(self) -> float:
        """Take one step of the optimizer; returns the loss of its batch, ``FloatingPointError`` if not finite."""
        self.policy.train()
        if not self._order:
            order = distributed.broadcast_object(torch.randperm(len(self.demonstrations)))
            self._order = list(order.split(self.batch_size))
        rows = self._order.pop()
        batch = self.demonstrations[rows]
        noise = distributed.broadcast_object(torch.randn_like(batch[keys.STATES]))
        batch[keys.STATES] = batch[keys.STATES] + self.state_noise * noise
        if getattr(self.policy, "lists_states", False) and self.state_noise.any():  # in its prompts
            texts = decode(batch[keys.TASK_DESCRIPTIONS])
            batch[keys.PROMPT_TOKENS] = self.policy.prompt_tokens(texts, batch[keys.STATES]).cpu()
        with self.state_prediction.watching() if self.state_prediction else contextlib.nullcontext():
            loss = share_of_imitation_loss(self.policy, batch, self.label_sigma)
        whole = sum(distributed.all_gather_object(loss.item()))
        if not math.isfinite(whole):
            raise FloatingPointError(
                f"the loss of cloning is {whole}: the policy has diverged; lower lr (recipes: cloning.lr), or look "
                "at the demonstrations"
            )
        self.optimizer.zero_grad()
        if self.state_prediction:
            loss = loss + self.state_prediction.share_of_loss(rows)
        loss.backward()
        if self.state_prediction:
            self.state_prediction.sum_gradients()
        clip_gradient(list(self.policy.parameters()), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return whole

    def evaluate(self, demonstrations: TensorDict | Samples) -> dict[str, float]:
        """Measure the policy on demonstrations (at least one row) that it does not learn from; learning stays the same.

        What a policy draws by itself is the same each time. Several processes all measure everything.

        Returns:
            ``loss``, the mean of what :meth:`step` minimises, without noise on the states. Of a policy that knows the
            bounds of actions (``config.action_low``) also ``error``, the mean distance of its greedy actions from the
            demonstrated ones as a fraction of half the range, and ``error_0``, ``error_1``, ... of each dimension.
        """
        policy, was_training = self.policy, self.policy.training
        device = compute_device(next(policy.parameters()))
        low, high = (getattr(policy.config, name, None) for name in ("action_low", "action_high"))
        acts = low is not None and high is not None and all(key in demonstrations for key in policy.in_keys)
        loss, errors, count = 0.0, torch.zeros(policy.action_dim, dtype=torch.float64), 0
        policy.eval()
        try:
            with (
                torch.no_grad(),
                torch.random.fork_rng([device] if device.type == "cuda" else []),
                set_exploration_type(ExplorationType.DETERMINISTIC),
            ):
                torch.manual_seed(0)
                for index in torch.arange(len(demonstrations)).split(4 * self.batch_size):
                    rows = demonstrations[index].to(device)
                    valid = rows[keys.STEP_MASK]
                    loss += float(policy.imitation_loss(rows, sigma=self.label_sigma)[valid].double().sum())
                    count += int(valid.sum())
                    if acts:
                        chosen = policy(rows.select(*policy.in_keys))[keys.ACTION]
                        errors += (chosen - rows[keys.ACTION])[valid].abs().double().sum(0).cpu()
        finally:
            policy.train(was_training)
            reshard(policy)  # which a backward pass would do
        measured = {"loss": loss / count}
        if acts:
            half = (torch.tensor(high, dtype=torch.float64) - torch.tensor(low, dtype=torch.float64)) / 2
            errors /= count * half
            measured["error"] = float(errors.mean())
            measured |= {f"error_{number}": float(error) for number, error in enumerate(errors)}
        return measured

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to resume exactly here, with the same demonstrations."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "order": list(self._order),
            **({"state_prediction": self.state_prediction.state_dict()} if self.state_prediction else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken, by this run's settings; the policy's own weights are not in it."""
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state["optimizer"]["state"]})
        self.schedule.load_state_dict(state["schedule"])
        self._order = [rows for rows in state["order"] if int(rows.max()) < len(self.demonstrations)]
        if self.state_prediction and "state_prediction" in state:
            self.state_prediction.load_state_dict(state["state_prediction"])

    def places(self) -> dict[str, Any]:
        """Return what lies as tensors of its state are to lie, by their keys."""
        return {"optimizer": places(self.optimizer)}


def check_imitation(policy: VLAPolicy) -> None:
    """Refuse (``ValueError``) a policy that has no ``imitation_loss`` of its own."""
    if getattr(type(policy), "imitation_loss", None) in (None, VLAPolicy.imitation_loss):
        what = "(demonstrations.episodes=0, self_imitation.coeff=0)"
        raise ValueError(f"{type(policy).__name__} has no imitation_loss: write it, or leave out what clones {what}")


def share_of_imitation_loss(policy: VLAPolicy, batch: TensorDictBase, sigma: float) -> torch.Tensor:
    """Return what this process's rows add to the mean of ``imitation_loss`` over what is valid of ``batch`` ``[B]``.

    All processes call it with the same batch, each takes a part of the rows; 0 where it has none.
    """
    valid = batch[keys.STEP_MASK]
    own = batch[distributed.rank() :: distributed.world_size()]
    counted = bool(own[keys.STEP_MASK].any())  # no process may leave out a pass of a sharded policy
    rows = (own if counted else batch[:1]).to(compute_device(next(policy.parameters())))
    loss = policy.imitation_loss(rows, sigma=sigma)
    if not counted:
        return 0.0 * loss.sum()
    loss = loss[rows[keys.STEP_MASK]]
    return loss.mean() * (len(loss) / int(valid.sum()))
