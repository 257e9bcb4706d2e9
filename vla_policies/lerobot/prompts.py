"""Prompts as LeRobot's processors write them, with the tokenizer that is saved beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from vla_common.plain import parse_json
from vla_policies.processing.prompts import list_states, pad_prompts


class LinePrompts:
    """Instructions, each ended by a line break or with the state (pi0.5), to at most ``max_length`` tokens.

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

    def __call__(self, instructions: Sequence[str], states: Tensor | None = None) -> Tensor:
        """Return tokens int64 ``[N, L]``, padded with ``padding``; pi0.5's list the normalised ``states`` ``[N, S]``.

        ValueError for an empty instruction, SettingError for a prompt longer than ``L``, which LeRobot cuts off.
        """
        if states is None:
            rows = [self._cached(text) for text in instructions]
        else:
            rows = [self._tokenizer.encode(text).ids for text in list_states(instructions, states)]
        return pad_prompts(rows, instructions, self.max_length, self.padding)

    def _cached(self, text: str) -> list[int]:
        if text not in self._cache:
            self._cache[text] = self._tokenizer.encode(text if text.endswith("\n") else f"{text}\n").ids
        return self._cache[text]
