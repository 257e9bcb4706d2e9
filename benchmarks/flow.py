"""What does pi0 cost? Sampling and updates with and without what is kept of the prefix, in one run.

* Sampling ``K`` steps: ours computes images and prompt once and keeps their keys and values; the other way computes
  them again at every step, as training code does that has only one forward pass.
* The update (log-probability of a stored Flow-SDE step, value, backward pass): the whole model is trained; PaliGemma is
  frozen and computed in every minibatch; PaliGemma is frozen and what it makes of each decision was kept from
  the beginning of the update (``Pi0.prepare``). Keeping costs one pass, shown apart; an update of ``E`` epochs
  then costs ``prepare / E + kept`` per epoch.

The ways of one kind must give the same numbers before anything is timed. Repetitions are interleaved; the table shows
medians, ratios are taken within a repetition: of CPU time, which counts all threads, or on a GPU of wall time. Random
weights.

    python benchmarks/policies.py flow --size middle --batch 4 --output flow.json
    python benchmarks/policies.py flow --size published --device cuda  # two models of 3.2 billion weights
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sentencepiece import SentencePieceTrainer
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type
from tqdm import tqdm

from vla_policies import make_example
from vla_policies.flow.steps import euler, times
from vla_policies.nn.gemma import GemmaConfig
from vla_policies.nn.siglip import SiglipConfig
from vla_policies.pi0.checkpoint import Pi0Checkpoint
from vla_policies.pi0.inspection import published_sizes
from vla_policies.pi0.model import Pi0Model, Pi0ModelConfig
from vla_policies.pi0.policy import Pi0, Pi0Config


def _sizes(vision: int, language: int, expert: int, depth: int, head_dim: int) -> Pi0ModelConfig:
    """256 patches, 8 query heads and one key-value head as in the real model, around smaller everything else."""
    return Pi0ModelConfig(
        vision=SiglipConfig(vision, depth, 4, 4 * vision),
        language=GemmaConfig(language, depth, 4 * language, 8, 1, head_dim),
        expert=GemmaConfig(expert, depth, 4 * expert, 8, 1, head_dim),
        vocab_size=1000,
        action_dim=32,
        pi05=False,
    )


SIZES = {
    "tiny": _sizes(32, 48, 32, 2, 16),
    "middle": _sizes(256, 512, 256, 6, 64),
    "large": _sizes(512, 1024, 512, 9, 128),
    "published": published_sizes(pi05=False),
}
TARGETS = {"sampling": 5.0, "update": 10.0}


def tokenizer() -> bytes:
    """A sentencepiece file of a few pieces with PaliGemma's special ids."""
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["put the cup on the plate", "press the button", "open the drawer slowly"] * 20),
        model_writer=written,
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    return written.getvalue()


def make_policy(size: str, steps: int, frozen: bool, device: str = "cpu") -> Pi0:
    """A policy with random weights, and everything of a checkpoint folder that it needs to exist."""
    torch.manual_seed(0)
    entry = {"mean": [0.0] * 32, "std": [1.0] * 32}
    statistics_ = {"random": {"state": entry, "actions": entry}}
    folder = Pi0Checkpoint(Path("."), {}, {}, statistics_, tokenizer(), {})
    settings = {"num_steps": steps, "num_images_in_input": 2, "action_horizon": 10, "train_expert_only": frozen}
    config = Pi0Config(benchmark="libero", config_name="pi0_libero", **settings)
    with torch.device(device):
        return Pi0(Pi0Model(SIZES[size]), folder, config)


def sample_again(policy: Pi0, batch: TensorDict, noise: Tensor) -> Tensor:
    """Actions ``[N, H, A_model]``; the prefix is computed at every step."""
    schedule, x = times(policy.flow.num_steps).to(noise.device), noise
    for number in range(policy.flow.num_steps):
        now, then = schedule[number].expand(len(x)), schedule[number + 1].expand(len(x))
        x = euler(x, policy.velocity(policy.observe(batch), x, now)[0], now, then)
    return x


def sample_once(policy: Pi0, batch: TensorDict, noise: Tensor) -> Tensor:
    """Actions ``[N, H, A_model]`` as the policy samples them."""
    chain, _, _, _ = policy._denoise(policy.observe(batch), noise, stochastic=False)
    return chain[:, -1]


def update(policy: Pi0, batch: TensorDict) -> tuple[Tensor, Tensor]:
    """Log-probability and value, and the gradients of their sum."""
    policy.zero_grad(set_to_none=True)
    log_prob, _, value = policy.evaluate_actions(batch)
    (log_prob.mean() + value.mean()).backward()
    return log_prob.detach(), value.detach()


def timed(function: Callable[[], Any], device: str) -> tuple[float, float]:
    """Wall and CPU seconds, threads included, until a GPU has done its work."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    wait()
    return time.perf_counter() - wall, time.process_time() - cpu


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; returns what ``--output`` writes."""
    torch.set_num_threads(options.threads)
    whole, frozen = (make_policy(options.size, options.steps, frozen, options.device) for frozen in (False, True))
    torch.manual_seed(1)
    batch = make_example(frozen.adapter.benchmark, options.batch).to(options.device)
    with set_exploration_type(ExplorationType.RANDOM):
        batch = frozen(batch).select(*frozen.loss_keys)
    kept = frozen.precompute(batch.clone())
    noise = torch.randn(options.batch, frozen.horizon, frozen.model_action_dim, device=options.device)

    with torch.no_grad():
        difference = (sample_again(frozen, batch, noise) - sample_once(frozen, batch, noise)).abs().max().item()
    results = [update(policy, td) for policy, td in ((whole, batch), (frozen, batch), (frozen, kept))]
    for other in results[1:]:
        difference = max(difference, *((a - b).abs().max().item() for a, b in zip(results[0], other, strict=True)))
    if not difference < 1e-3:
        raise RuntimeError(f"the ways do not compute the same: they differ by {difference}")

    def without_gradients(function: Callable[[], Any]) -> Callable[[], Any]:
        return torch.no_grad()(function)

    ways: dict[str, Callable[[], Any]] = {
        "sampling, prefix once": without_gradients(lambda: sample_once(frozen, batch, noise)),
        "sampling, prefix at every step": without_gradients(lambda: sample_again(frozen, batch, noise)),
        "update, frozen prefix kept": lambda: update(frozen, kept),
        "update, frozen prefix recomputed": lambda: update(frozen, batch),
        "update, everything trained": lambda: update(whole, batch),
        "keeping the prefix, once per update": lambda: frozen.precompute(batch.clone()),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with tqdm(total=(options.repetitions + 1) * len(ways), desc="measurements", unit="way") as bar:
        for repetition in range(options.repetitions + 1):  # the first warms up
            names = list(ways)
            turn = repetition % len(names)
            for name in names[turn:] + names[:turn]:
                measured = timed(ways[name], options.device)
                bar.update()
                if repetition:
                    seconds[name].append(measured)

    def ratio(slow: str, fast: str) -> float:
        clock = int(options.device == "cpu")
        return statistics.median(a[clock] / b[clock] for a, b in zip(seconds[slow], seconds[fast], strict=True))

    return {
        "settings": {name: value for name, value in vars(options).items() if name != "output"},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f} at the end",
        "parameters": sum(parameter.numel() for parameter in whole.parameters()),
        "largest_difference": difference,
        "ways": {
            name: {
                "wall_ms": 1e3 * statistics.median(wall for wall, _ in measured),
                "cpu_ms": 1e3 * statistics.median(cpu for _, cpu in measured),
            }
            for name, measured in seconds.items()
        },
        "ratios": {
            "sampling": ratio("sampling, prefix at every step", "sampling, prefix once"),
            "update": ratio("update, frozen prefix recomputed", "update, frozen prefix kept"),
        },
    }


def show(result: dict[str, Any]) -> None:
    settings = result["settings"]
    print(
        f"\npi0, size {settings['size']}: {result['parameters'] / 1e6:.0f} M parameters; batch {settings['batch']}, "
        f"2 images, K = {settings['steps']}\n{result['machine']}; {settings['threads']} threads; "
        f"medians of {settings['repetitions']} repetitions; largest difference {result['largest_difference']:.1e}\n"
    )
    print(f"{'':<38}{'wall ms':>10}{'CPU ms':>10}")
    for name, row in result["ways"].items():
        print(f"{name:<38}{row['wall_ms']:>10.1f}{row['cpu_ms']:>10.1f}")
    print()
    for name, found in result["ratios"].items():
        verdict = "reached" if found >= TARGETS[name] else "MISSED"
        print(f"{name}: {found:.1f} times less time (target: at least {TARGETS[name]:.0f}; {verdict})")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="middle")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="K, from noise to actions")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    options = parser.parse_args(arguments)
    for name in ("batch", "steps", "repetitions", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parse(arguments)
    outcome = run(chosen)
    show(outcome)
    if chosen.output:
        chosen.output.write_text(json.dumps(outcome, indent=2) + "\n")


if __name__ == "__main__":
    main()
