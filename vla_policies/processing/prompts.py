"""Tokens of prompts as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vla_policies.checkpoint.settings import SettingError

_BINS = 256


def one_line(text: str) -> str:
    """Return an instruction as openpi cleans it."""
    return text.strip().replace("_", " ").replace("\n", " ")


def list_states(instructions: Sequence[str], states: Tensor) -> list[str]:
    """Return pi0.5's prompts, which openpi and LeRobot write alike.

    Normalised ``states`` ``[N, S]``, not padded, are listed as bins of -1 to 1: 0 to 255, and -1 for less.
    """
    edges = torch.linspace(-1, 1, _BINS + 1, dtype=torch.float64)[:-1]
    bins = torch.bucketize(states.detach().cpu().double(), edges, right=True) - 1
    return [
        f"Task: {one_line(text)}, State: {' '.join(map(str, row.tolist()))};\nAction: "
        for text, row in zip(instructions, bins, strict=True)
    ]


def pad_prompts(prompts: Sequence[Sequence[int]], texts: Sequence[str], length: int, padding: int) -> Tensor:
    """Fill prompts up to ``length`` (``max_prompt_length``) tokens: int64 ``[N, length]``.

    ``texts`` are their instructions. ValueError: one is empty. SettingError: a prompt is longer; says how long the
    longest is.
    """
    if not all(text.strip() for text in texts):
        raise ValueError("the instruction is empty; fill task_descriptions, for example 'push the puck'")
    longest, text = max(zip(map(len, prompts), texts, strict=True), default=(0, ""))
    if longest > length:
        raise SettingError(
            f"max_prompt_length={length}: the prompt of {text[:80]!r} has {longest} tokens; "
            f"type policy.max_prompt_length={longest}, or use shorter instructions"
        )
    return torch.tensor([[*prompt, *[padding] * (length - len(prompt))] for prompt in prompts])
