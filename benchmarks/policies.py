"""What does an update cost? The head of OpenVLA-OFT beside the way the field computes it, in one run.

All contenders share one policy with random weights, one batch and the same backbone pass; they differ in how they get
log-probability and entropy of the action tokens from the last hidden states ``[B, S, hidden]``:

* ``256 rows at action positions``: this library, ``OpenVLAOFT.evaluate_actions`` as it is;
* ``all rows and positions, masked``: float32 logits of the whole vocabulary at every position; at the action
  positions all but the 256 rows of action tokens are masked with -inf, then log-softmax over the vocabulary;
* ``all rows and positions, sliced``: the same logits, of which the 256 rows are cut out before the log-softmax;
* ``all rows at action positions``: the whole vocabulary, masked, but at the action positions only. No peer; it tells
  how much of the gain is due to positions and how much to rows.

The second and the third are what implementations do that take logits from the model's forward pass. Both get the
cheaper reading: masking and log-softmax at the action positions only. Before anything is timed all contenders must
give the same log-probabilities, entropies and gradients of the hidden states.

Measured are the head alone and the whole step: image preprocessing, backbone, log-probability, entropy, value and the
backward pass, without an optimizer. Repetitions are interleaved in rotating order; the table shows medians, and ratios
are taken within a repetition. CPU time counts all threads. Memory is the peak of what is allocated beyond weights and
inputs: on a CPU every allocation in torch's profiler, on CUDA ``max_memory_allocated``. That of the head is measured
with its weights frozen, so that it is logits and intermediate results; that of the step has all gradients.

The larger the backbone, the smaller the head's share of the step: compare ``--size`` before you expect the ratio of
the whole step elsewhere. ``--device cuda --dtype bfloat16 --size 7b --lora 32`` is the real model.

    python benchmarks/policies.py --size middle --batch 4 --output policies.json
    python benchmarks/policies.py flow --help     # pi0: what keeping the prefix saves, see flow.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from vla_common import keys
from vla_policies import make_example
from vla_policies.checkpoint.lora import add_lora
from vla_policies.nn.dino_siglip import TransformerConfig, VisionConfig
from vla_policies.nn.llama import LlamaConfig
from vla_policies.openvla.checkpoint import OpenVLACheckpoint
from vla_policies.openvla.model import Prismatic, PrismaticConfig
from vla_policies.openvla.oft import OpenVLAOFT, OpenVLAOFTConfig
from vla_policies.openvla.prompts import BOS, SPACE

PROMPT_LENGTH = 24  # tokens, that of a short instruction
ENTROPY_BONUS = 0.01
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}  # bfloat16 logits of the peers are rounded, ours are float32
PREPROCESSOR = {
    "means": [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]],
    "stds": [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]],
    "input_sizes": [[3, 224, 224], [3, 224, 224]],
}


def _sizes(hidden: int, inner: int, layers: int, vision: tuple[int, int], blocks: int) -> PrismaticConfig:
    """The full vocabulary and 256 patches of 14 pixels, as in the 7B model, around a smaller everything else."""
    first, second = vision
    return PrismaticConfig(
        VisionConfig(
            TransformerConfig(first, blocks, 4, 4 * first, registers=4, layer_scale=True),
            TransformerConfig(second, blocks, 4, 4 * second),
        ),
        LlamaConfig(hidden, inner, layers, hidden // 64, hidden // 64),
    )


SIZES = {
    "tiny": _sizes(64, 128, 2, (32, 48), 2),
    "middle": _sizes(512, 1376, 4, (128, 192), 4),
    "large": _sizes(1024, 2752, 8, (256, 384), 6),
    "7b": PrismaticConfig(VisionConfig()),
}


@dataclass
class Contender:
    """A way to compute the head.

    Attributes:
        name: for the table.
        head: policy, hidden states ``[B, S, hidden]`` and action tokens to log-probability and entropy, ``[B, C, A]``.
        is_peer: whether it is what other implementations do.
        head_wall, head_cpu, step_wall, step_cpu: samples in seconds.
        head_memory, step_memory: peaks in bytes.
    """

    name: str
    head: Callable[[OpenVLAOFT, Tensor, Tensor], tuple[Tensor, Tensor]]
    is_peer: bool = False
    head_wall: list[float] = field(default_factory=list)
    head_cpu: list[float] = field(default_factory=list)
    step_wall: list[float] = field(default_factory=list)
    step_cpu: list[float] = field(default_factory=list)
    head_memory: int = 0
    step_memory: int = 0

    def run_head(self, policy: OpenVLAOFT, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Forward and backward pass from ``hidden``, a leaf; returns log-probability and entropy."""
        log_prob, entropy = self.head(policy, hidden, tokens)
        _objective(log_prob, entropy).backward()
        return log_prob.detach(), entropy.detach()

    def run_step(self, policy: OpenVLAOFT, batch: TensorDict) -> None:
        """Forward and backward pass from images."""
        if self.head is ours:
            log_prob, entropy, value = policy.evaluate_actions(batch)
        else:
            hidden = all_states(policy, batch)
            log_prob, entropy = self.head(policy, hidden, batch[keys.ACTION_TOKENS])
            value = policy.value(action_positions(policy, hidden)[:, 0])
        (_objective(log_prob, entropy) + value.mean()).backward()


def _objective(log_prob: Tensor, entropy: Tensor) -> Tensor:
    return -log_prob.mean() - ENTROPY_BONUS * entropy.mean()


def all_states(policy: OpenVLAOFT, batch: TensorDict) -> Tensor:
    """Hidden states ``[B, S, hidden]`` at every position: the policy's own pass, caught before it drops the others."""
    caught = []
    hook = policy.model.language_model.model.norm.register_forward_hook(lambda *call: caught.append(call[-1]))
    policy.action_states(batch)
    hook.remove()
    return caught[0]


def action_positions(policy: OpenVLAOFT, sequence: Tensor) -> Tensor:
    """What predicts an action token of ``[B, S, ...]``: the last are a token that predicts nothing and the stop."""
    count = policy.chunk_size * policy.token_dim
    return sequence[:, -2 - count : -2]


def ours(policy: OpenVLAOFT, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    logits = policy.model.action_logits(action_positions(policy, hidden))
    dist = policy.distribution(logits.unflatten(1, tokens.shape[1:]), tokens)
    return dist.log_prob(tokens), dist.entropy()


def masked_everywhere(policy: OpenVLAOFT, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return _masked(policy, action_positions(policy, policy.model.language_model.lm_head(hidden).float()), tokens)


def sliced_everywhere(policy: OpenVLAOFT, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    logits = action_positions(policy, policy.model.language_model.lm_head(hidden).float())
    log_probs = logits[..., policy.model.config.action_window].log_softmax(-1).unflatten(1, tokens.shape[1:])
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


def masked_at_actions(policy: OpenVLAOFT, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return _masked(policy, policy.model.language_model.lm_head(action_positions(policy, hidden)).float(), tokens)


def _masked(policy: OpenVLAOFT, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-softmax over the vocabulary, ``[B, C * A, V]``, without the rows that are no action tokens."""
    window = policy.model.config.action_window
    forbidden = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
    forbidden[window] = False
    log_probs = logits.masked_fill(forbidden, -torch.inf).log_softmax(-1).unflatten(1, tokens.shape[1:])
    log_prob = log_probs.gather(-1, (tokens + window.start).unsqueeze(-1)).squeeze(-1)
    return log_prob, -(log_probs.exp() * log_probs.masked_fill(forbidden, 0.0)).sum(-1)


def make_contenders() -> list[Contender]:
    return [
        Contender("256 rows at action positions", ours),
        Contender("all rows and positions, masked", masked_everywhere, is_peer=True),
        Contender("all rows and positions, sliced", sliced_everywhere, is_peer=True),
        Contender("all rows at action positions", masked_at_actions),
    ]


def make_policy(size: str, device: str, dtype: torch.dtype, lora: int, checkpointing: bool) -> OpenVLAOFT:
    """A policy with random weights, and everything of a checkpoint folder that it needs to exist."""
    config = SIZES[size]
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Prismatic(config)
    finally:
        torch.set_default_dtype(default)
    bounds = {"q01": [-1.0] * 7, "q99": [1.0] * 7}
    with tempfile.TemporaryDirectory() as path:
        vocabulary = {"<unk>": 0, "<s>": BOS, "▁": SPACE}  # nothing is tokenised
        Tokenizer(WordLevel(vocabulary, unk_token="<unk>")).save(str(Path(path) / "tokenizer.json"))
        folder = OpenVLACheckpoint(Path(path), {}, PREPROCESSOR, {"random": {"action": bounds}})
        policy = OpenVLAOFT(model, folder, OpenVLAOFTConfig(benchmark="libero", max_prompt_length=PROMPT_LENGTH))
    if lora:
        add_lora(policy, lora)
    policy.model.set_gradient_checkpointing(checkpointing)
    return policy.to(device)


def make_batch(policy: OpenVLAOFT, batch_size: int) -> TensorDict:
    """Made-up observations, prompts and action tokens."""
    generator = torch.Generator().manual_seed(1)
    batch = make_example(policy.adapter.benchmark, batch_size)
    prompts = torch.randint(100, 20_000, (batch_size, PROMPT_LENGTH), generator=generator)
    prompts[:, 0], prompts[:, -1] = BOS, SPACE
    shape = (batch_size, policy.chunk_size, policy.token_dim)
    batch[keys.PROMPT_TOKENS] = prompts
    batch[keys.ACTION_TOKENS] = torch.randint(0, 256, shape, generator=generator)
    return batch.to(policy.device)


def check_agreement(
    contenders: Sequence[Contender], policy: OpenVLAOFT, hidden: Tensor, tokens: Tensor, tolerance: float
) -> dict[str, float]:
    """Largest differences to ours, of all contenders.

    Those of log-probability and entropy are in nats; that of the gradient of the hidden states is the norm of the
    difference, relative to the norm of ours.

    Raises:
        RuntimeError: one is larger than ``tolerance``.
    """
    results = []
    for contender in contenders:
        _forget(policy, hidden)
        log_prob, entropy = contender.run_head(policy, hidden, tokens)
        results.append((log_prob, entropy, hidden.grad))
    log_prob, entropy, gradient = results[0]
    differences = [
        ((other[0] - log_prob).abs().max(), (other[1] - entropy).abs().max(), _distance(other[2], gradient))
        for other in results[1:]
    ]
    log_prob, entropy, gradient = torch.tensor(differences).amax(0).tolist()  # NaN stays NaN
    worst = {"log_prob": log_prob, "entropy": entropy, "gradient": gradient}
    if not all(difference <= tolerance for difference in worst.values()):
        raise RuntimeError(f"contenders do not compute the same: {worst}, at most {tolerance} is rounding")
    return worst


def _distance(gradient: Tensor, reference: Tensor) -> Tensor:
    return (gradient - reference).norm() / reference.norm()


def _forget(policy: OpenVLAOFT, hidden: Tensor) -> None:
    policy.zero_grad(set_to_none=True)
    hidden.grad = None


def timed(function: Callable[[], Any], device: str) -> tuple[float, float]:
    """Wall and CPU seconds, threads included."""
    _synchronize(device)
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - wall, time.process_time() - cpu


def peak_memory(function: Callable[[], Any], device: str) -> int:
    """Most bytes that are allocated at one time, beyond those that were before."""
    if device.startswith("cuda"):
        _synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        _synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    return int(np.cumsum([change for _, change in changes]).max())


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; returns what ``--output`` writes."""
    torch.set_num_threads(options.threads)
    dtype, device = getattr(torch, options.dtype), options.device
    policy = make_policy(options.size, device, dtype, options.lora, options.gradient_checkpointing)
    batch = make_batch(policy, options.batch)
    tokens = batch[keys.ACTION_TOKENS]
    with torch.no_grad():
        hidden = all_states(policy, batch)
    hidden.requires_grad_()
    contenders = make_contenders()
    bar = tqdm(total=(options.repetitions + 4) * len(contenders), desc="measurements", unit="contender")
    agreement = check_agreement(contenders, policy, hidden, tokens, TOLERANCE[options.dtype])
    bar.update(len(contenders))

    head = policy.model.language_model.lm_head
    trainable = [parameter for parameter in head.parameters() if parameter.requires_grad]
    for contender in contenders:
        _forget(policy, hidden)
        for parameter in trainable:
            parameter.requires_grad_(False)
        contender.head_memory = peak_memory(lambda c=contender: c.run_head(policy, hidden, tokens), device)
        for parameter in trainable:
            parameter.requires_grad_(True)
        _forget(policy, hidden)
        bar.update()
        contender.step_memory = peak_memory(lambda c=contender: c.run_step(policy, batch), device)
        bar.update()
    for repetition in range(options.repetitions + 1):  # the first warms up
        turn = repetition % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            _forget(policy, hidden)
            head_times = timed(lambda c=contender: c.run_head(policy, hidden, tokens), device)
            _forget(policy, hidden)
            step_times = timed(lambda c=contender: c.run_step(policy, batch), device)
            bar.update()
            if repetition:
                samples = (contender.head_wall, contender.head_cpu, contender.step_wall, contender.step_cpu)
                for sample, seconds in zip(samples, head_times + step_times, strict=True):
                    sample.append(seconds)
    bar.close()
    return _summary(options, policy, hidden, contenders, agreement)


def _summary(
    options: argparse.Namespace,
    policy: OpenVLAOFT,
    hidden: Tensor,
    contenders: Sequence[Contender],
    agreement: dict[str, float],
) -> dict[str, Any]:
    mine, peers = contenders[0], [contender for contender in contenders if contender.is_peer]
    clock = "cpu" if options.device == "cpu" else "wall"

    def ratio(contender: Contender, what: str) -> float:
        return float(statistics.median(np.divide(getattr(contender, what), getattr(mine, what))))

    rows = []
    for contender in contenders:
        row = {"name": contender.name, "is_peer": contender.is_peer}
        for part in ("head", "step"):
            for sort in ("wall", "cpu"):
                what = f"{part}_{sort}"
                row[f"{what}_ms"] = 1e3 * statistics.median(getattr(contender, what))
                row[f"{what}_over_ours"] = ratio(contender, what)
            memory = getattr(contender, f"{part}_memory")
            row[f"{part}_MiB"] = memory / 2**20
            row[f"{part}_memory_over_ours"] = memory / getattr(mine, f"{part}_memory")
        row["sequence_tokens_per_s"] = hidden.shape[0] * hidden.shape[1] / statistics.median(contender.step_wall)
        rows.append(row)
    best = {  # against the better peer of each
        "head_time": min(ratio(peer, f"head_{clock}") for peer in peers),
        "head_memory": min(peer.head_memory for peer in peers) / mine.head_memory,
        "step_time": min(ratio(peer, f"step_{clock}") for peer in peers),
    }
    processor = torch.cuda.get_device_name(options.device) if clock == "wall" else f"{os.cpu_count()} cores"
    return {
        "settings": {name: value for name, value in vars(options).items() if name != "output"},
        "machine": f"{platform.machine()}, {processor}, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f} at the end",
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "head_parameters": policy.model.config.language.vocab_size * policy.model.config.language.hidden_size,
        "sequence_length": hidden.shape[1],
        "action_tokens": policy.chunk_size * policy.token_dim,
        "agreement": agreement,
        "clock_of_ratios": clock,
        "over_ours_of_the_better_peer": best,
        "targets_reached": {
            "head_time": best["head_time"] >= 2,
            "head_memory": best["head_memory"] >= 5,
            "step_time": best["step_time"] >= 1,
        },
        "contenders": rows,
    }


def show(result: dict[str, Any]) -> None:
    settings, agreement = result["settings"], result["agreement"]
    trained = f"LoRA of rank {settings['lora']}" if settings["lora"] else "all weights trained"
    print(
        f"\nOpenVLA-OFT, size {settings['size']}: {result['parameters'] / 1e6:.0f} M parameters, "
        f"{result['head_parameters'] / 1e6:.0f} M of them in lm_head; batch {settings['batch']}, "
        f"{result['sequence_length']} positions, {result['action_tokens']} action tokens, {settings['dtype']}, "
        f"{trained}\n"
        f"{result['machine']}; {settings['device']}, {settings['threads']} threads; "
        f"medians of {settings['repetitions']} repetitions\n"
        f"largest differences between contenders: log-probability {agreement['log_prob']:.1e}, "
        f"entropy {agreement['entropy']:.1e}, gradient {agreement['gradient']:.1e}\n"
    )
    for part, title in (("head", "head alone"), ("step", "whole step")):
        columns = ["wall ms", "of ours", "CPU ms", "of ours", "peak MiB", "of ours"]
        print(f"{title:<32}" + "".join(f"{column:>11}" for column in columns))
        for row in result["contenders"]:
            print(
                f"{row['name']:<32}{row[f'{part}_wall_ms']:>11.1f}{row[f'{part}_wall_over_ours']:>11.2f}"
                f"{row[f'{part}_cpu_ms']:>11.1f}{row[f'{part}_cpu_over_ours']:>11.2f}"
                f"{row[f'{part}_MiB']:>11.1f}{row[f'{part}_memory_over_ours']:>11.2f}"
            )
        print()
    best, reached = result["over_ours_of_the_better_peer"], result["targets_reached"]
    for key, name, target in (
        ("head_time", "time of the head", "at least 2"),
        ("head_memory", "memory of logits and intermediate results", "at least 5"),
        ("step_time", "time of the whole step", "never below 1"),
    ):
        verdict = "reached" if reached[key] else "MISSED"
        print(f"ratio to the better peer, {name}: {best[key]:.2f} (target: {target}; {verdict})")
    clock = "CPU time" if result["clock_of_ratios"] == "cpu" else "wall time"
    speed = result["contenders"][0]["sequence_tokens_per_s"]
    print(f"Times in these three lines are {clock}. Our step: {speed:.0f} positions per second.")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="middle", help="of the model; the vocabulary is full")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters instead of all weights")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    options = parser.parse_args(arguments)
    for name in ("batch", "repetitions", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, must be at least 1")
    return options


if __name__ == "__main__":
    if sys.argv[1:2] == ["flow"]:
        import flow

        flow.main(sys.argv[2:])
        sys.exit()
    options = parse()
    outcome = run(options)
    show(outcome)
    if options.output:
        options.output.write_text(json.dumps(outcome, indent=2) + "\n")
