"""Tokens of prompts as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vla_policies.checkpoint.settings import SettingError


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
