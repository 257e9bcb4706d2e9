"""Prompts of pi0 and pi0.5, tokenised with PaliGemma's sentencepiece file."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vla_policies.pi0.checkpoint import TOKENIZERS
from vla_policies.processing.prompts import list_states, one_line, pad_prompts

BOS, PAD = 2, 0


class Pi0Prompts:
    """Instructions (and, for some pi0.5 checkpoints, states) to at most ``max_length`` tokens.

    ``model`` is the content of the sentencepiece file, else ValueError.
    """

    def __init__(self, model: bytes, max_length: int):
        from sentencepiece import SentencePieceProcessor

        try:
            self._tokenizer = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"{' or '.join(TOKENIZERS)} is no sentencepiece file ({error}); copy it again") from error
        if self._tokenizer.bos_id() != BOS:
            raise ValueError(f"the tokenizer is not PaliGemma's: <bos> is {self._tokenizer.bos_id()}, must be {BOS}")
        self.max_length = max_length
        self._cache: dict[str, list[int]] = {}

    def __call__(self, instructions: Sequence[str], states: Tensor | None = None) -> Tensor:
        """Return tokens int64 ``[N, L]``, padded with 0; normalised ``states`` ``[N, S]`` are listed in the prompt.

        ValueError for an empty instruction, SettingError for a prompt longer than ``L``, which openpi cuts off.
        """
        if states is None:
            rows = [self._cached(text) for text in instructions]
        else:
            rows = [self._tokens([text]) for text in list_states(instructions, states)]
        return pad_prompts(rows, instructions, self.max_length, PAD)

    def _cached(self, text: str) -> list[int]:
        if text not in self._cache:
            # The line break is tokenised by itself, as the "start of answer".
            self._cache[text] = self._tokens([one_line(text), "\n"])
        return self._cache[text]

    def _tokens(self, parts: list[str]) -> list[int]:
        return [BOS, *(token for part in parts for token in self._tokenizer.encode(part))]
