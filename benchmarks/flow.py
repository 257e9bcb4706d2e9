"""pi0 of any size with random weights, and what it costs where nothing is kept of its prefix: see :mod:`cost`.

Training code that has only one forward pass computes images and prompt at every denoising step, and in every minibatch.
"""

import io
from pathlib import Path

import torch
from sentencepiece import SentencePieceTrainer
from tensordict import TensorDictBase
from torch import Tensor

from vla_policies.checkpoint.lora import add_lora
from vla_policies.checkpoint.weights import cast
from vla_policies.flow.steps import euler, times
from vla_policies.nn.gemma import GemmaConfig
from vla_policies.nn.siglip import SiglipConfig
from vla_policies.pi0.checkpoint import Pi0Checkpoint
from vla_policies.pi0.model import Pi0Model, Pi0ModelConfig, published_sizes
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


def make_policy(
    size: str,
    steps: int,
    frozen: bool,
    device: str = "cpu",
    *,
    dtype: torch.dtype = torch.float32,
    lora: int = 0,
    checkpointing: bool = False,
    pi05: bool = False,
) -> Pi0:
    """A policy with random weights, and everything of a checkpoint folder that it needs to exist."""
    torch.manual_seed(0)
    entry = {"mean": [0.0] * 32, "std": [1.0] * 32, "q01": [-1.0] * 32, "q99": [1.0] * 32}
    statistics_ = {"random": {"state": entry, "actions": entry}}
    folder = Pi0Checkpoint(Path("."), {}, {}, statistics_, tokenizer(), {})
    settings = {"num_steps": steps, "num_images_in_input": 2, "action_horizon": 10, "train_expert_only": frozen}
    settings["max_prompt_length"] = 100  # its tokenizer knows few words
    config = Pi0Config(benchmark="libero", config_name="pi05_libero" if pi05 else "pi0_libero", **settings)
    with torch.device(device):
        policy = Pi0(Pi0Model(published_sizes(pi05=True) if pi05 else SIZES[size]), folder, config)
    cast(policy.model, dtype, float32=policy.needs_float32)
    if lora:
        add_lora(policy, lora)
    policy.model.set_gradient_checkpointing(checkpointing)
    return policy.to(device)


def sample_again(policy: Pi0, batch: TensorDictBase, noise: Tensor) -> Tensor:
    """Actions ``[N, H, A_model]``; the prefix is computed at every step."""
    schedule, x = times(policy.flow.num_steps).to(noise.device), noise
    for number in range(policy.flow.num_steps):
        now, then = schedule[number].expand(len(x)), schedule[number + 1].expand(len(x))
        x = euler(x, policy.velocity(policy.observe(batch), x, now)[0], now, then)
    return x


def sample_once(policy: Pi0, batch: TensorDictBase, noise: Tensor) -> Tensor:
    """Actions ``[N, H, A_model]`` as the policy samples them."""
    chain, _, _, _ = policy._denoise(policy.observe(batch), noise, stochastic=False)
    return chain[:, -1]


def update(policy: Pi0, batch: TensorDictBase) -> Tensor:
    """Log-probability, and its gradients."""
    policy.zero_grad(set_to_none=True)
    log_prob, *_ = policy.evaluate_actions(batch)
    log_prob.mean().backward()
    return log_prob.detach()
