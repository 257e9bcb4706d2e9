"""Tokens of prompts as one batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

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


def make_bpe(
    vocabulary: dict[str, int], merged: Sequence[str], special: dict[str, int], model: dict[str, Any], **parts: Any
) -> dict[str, Any]:
    """Return a ``tokenizer.json`` of byte pairs with other ``parts`` and entries of its ``model``.

    A ``merged`` token is made of the one without its last letter and that letter, so that merges never compete.
    """
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": number, "content": text, **plain} for text, number in special.items()]
    merges = [[text[:-1], text[-1]] for text in merged]
    bpe = {"type": "BPE", **model, "vocab": vocabulary, "merges": merges}
    return {"version": "1.0", "added_tokens": added, **parts, "model": bpe}


def read_tokenizer(content: bytes, name: str) -> Any:
    """Make a tokenizer, which neither cuts nor fills up, of a ``tokenizer.json``; ValueError if it is none."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(content)
        if tokenizer.normalizer and len(tokenizer.normalizer.__getstate__()) > 250:  # a few steps multiply a text
            raise ValueError("its normalizer is long")
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{name} is no tokenizer ({error}); copy it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class PromptTokens(ABC):
    """Prompts to at most ``max_length`` tokens, filled up with ``padding``; an instruction is tokenised once."""

    def __init__(self, max_length: int, padding: int):
        self.max_length, self.padding = min(max_length, 8192), padding
        self._cache: dict[str, list[int]] = {}

    @abstractmethod
    def tokenize(self, text: str, listed: bool = False) -> list[int]:
        """Return the tokens of an instruction; ``listed``: of a whole prompt of :func:`list_states`."""

    def __call__(self, instructions: Sequence[str], states: Tensor | None = None) -> Tensor:
        """Return tokens int64 ``[N, max_length]``; normalised ``states`` ``[N, S]`` are listed in the prompt.

        ValueError: an instruction is empty. SettingError: a prompt is longer, which others cut off; says how long.
        """
        if states is None:
            self._cache = self._cache if len(self._cache) < 10_000 else {}  # a server hears new ones all the time
            self._cache |= {text: self.tokenize(text) for text in set(instructions) - self._cache.keys()}
            prompts = [self._cache[text] for text in instructions]
        else:
            prompts = [self.tokenize(text, listed=True) for text in list_states(instructions, states)]
        if not all(text.strip() for text in instructions):
            raise ValueError("the instruction is empty; fill task_descriptions, for example 'push the puck'")
        longest, text = max(zip(map(len, prompts), instructions, strict=True), default=(0, ""))
        if longest > self.max_length:
            raise SettingError(
                f"max_prompt_length={self.max_length}: the prompt of {text[:80]!r} has {longest} tokens; "
                f"type policy.max_prompt_length={longest}, or use shorter instructions"
            )
        return torch.tensor([[*prompt, *[self.padding] * (self.max_length - len(prompt))] for prompt in prompts])
