"""Prompts as LeRobot's processors write them, with the tokenizer that is saved beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from vla_common.plain import parse_json
from vla_policies.processing.prompts import pad_prompts


class LinePrompts:
    """Instructions, each ended by a line break, to at most ``max_length`` tokens (SmolVLA, pi0).

    ``files`` are those of a tokenizer's folder, ``tokenizer.json`` and ``tokenizer_config.json``, else ValueError.
    """

    def __init__(self, files: Mapping[str, bytes], max_length: int):
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"tokenizer.json is no tokenizer ({error}); copy it again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        named = parse_json(files.get("tokenizer_config.json", b"{}")).get("pad_token")
        text = named.get("content") if isinstance(named, dict) else named
        padding = None if text is None else self._tokenizer.token_to_id(text)
        if padding is None:
            raise ValueError(f"tokenizer_config.json names no pad_token of the tokenizer ({text!r}); copy it again")
        self.padding, self.max_length = int(padding), max_length
        self._cache: dict[str, list[int]] = {}

    def __call__(self, instructions: Sequence[str]) -> Tensor:
        """Return tokens int64 ``[N, L]``, padded with ``padding``.

        ValueError for an empty instruction, SettingError for a prompt longer than ``L``, which LeRobot cuts off.
        """
        return pad_prompts([self._tokens(text) for text in instructions], instructions, self.max_length, self.padding)

    def _tokens(self, text: str) -> list[int]:
        if text not in self._cache:
            self._cache[text] = self._tokenizer.encode(text if text.endswith("\n") else f"{text}\n").ids
        return self._cache[text]
