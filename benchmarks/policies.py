"""OpenVLA-OFT of any size with random weights, and what an update of it costs where logits are of the whole vocabulary.

Implementations that take logits from the model's forward pass compute float32 logits of all rows at every position and
mask those that are no action tokens; ours are of 256 rows at the action positions: see :mod:`cost`.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from vla_common import keys
from vla_policies import make_example
from vla_policies.checkpoint.lora import add_lora
from vla_policies.nn.dino_siglip import TransformerConfig, VisionConfig
from vla_policies.nn.llama import LlamaConfig
from vla_policies.openvla.checkpoint import SPACE, OpenVLACheckpoint
from vla_policies.openvla.model import BOS, Prismatic, PrismaticConfig
from vla_policies.openvla.oft import OpenVLAOFT, OpenVLAOFTConfig

PROMPT_LENGTH = 24  # tokens, that of a short instruction
ENTROPY_BONUS = 0.01
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


def all_states(policy: OpenVLAOFT, batch: TensorDictBase) -> Tensor:
    """Hidden states ``[B, S, hidden]`` at every position: the policy's own pass, caught before it drops the others."""
    caught = []
    hook = policy.model.language_model.model.norm.register_forward_hook(lambda *call: caught.append(call[-1]))
    policy.action_states(batch)
    hook.remove()
    return caught[0]


def action_positions(policy: OpenVLAOFT, sequence: Tensor) -> Tensor:
    """What predicts an action token of ``[B, S, ...]``; behind are a token that predicts nothing, and maybe a stop."""
    count, end = policy.chunk_size * policy.token_dim, 2 if policy.config.layout == "official" else 1
    return sequence[:, -end - count : -end]


def masked(policy: OpenVLAOFT, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy ``[B, C, A]`` of logits of the whole vocabulary at every position."""
    logits = action_positions(policy, policy.model.language_model.lm_head(hidden).float())
    window = policy.model.config.action_window
    forbidden = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
    forbidden[window] = False
    log_probs = logits.masked_fill(forbidden, -torch.inf).log_softmax(-1).unflatten(1, tokens.shape[1:])
    log_prob = log_probs.gather(-1, (tokens + window.start).unsqueeze(-1)).squeeze(-1)
    return log_prob, -(log_probs.exp() * log_probs.masked_fill(forbidden, 0.0)).sum(-1)


def of_all_rows(policy: OpenVLAOFT, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    """The first two that :meth:`OpenVLAOFT.evaluate_actions` returns, in the other way."""
    return masked(policy, all_states(policy, batch), batch[keys.ACTION_TOKENS])


def step(policy: OpenVLAOFT, batch: TensorDictBase, evaluate: Callable[..., Any]) -> None:
    """A forward and backward pass from images."""
    policy.zero_grad(set_to_none=True)
    log_prob, entropy, *_ = evaluate(policy, batch)
    (-log_prob.mean() - ENTROPY_BONUS * entropy.mean()).backward()


def make_policy(
    size: str,
    device: str,
    dtype: torch.dtype,
    lora: int,
    checkpointing: bool,
    family: Any = OpenVLAOFT,
    config_class: Any = OpenVLAOFTConfig,
) -> Any:
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
        policy = family(model, folder, config_class(benchmark="libero", max_prompt_length=PROMPT_LENGTH))
    if lora:
        add_lora(policy, lora)
    policy.model.set_gradient_checkpointing(checkpointing)
    prompt = torch.tensor([[BOS, 290, 300, 310, SPACE]], device=device)
    policy.prompts = lambda texts: prompt.repeat(len(texts), 1)
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
