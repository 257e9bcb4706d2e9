"""Prompts as LeRobot's processors write them, with the tokenizer that is saved beside them."""

from collections.abc import Mapping

from vla_common.plain import parse_json
from vla_policies.processing.prompts import PromptTokens, read_tokenizer


class LinePrompts(PromptTokens):
    """Instructions, each ended by a line break or with the state (pi0.5), to at most ``max_length`` tokens.

    ``files`` are those of a tokenizer's folder, ``tokenizer.json`` and ``tokenizer_config.json``, else ValueError.
    """

    def __init__(self, files: Mapping[str, bytes], max_length: int):
        self._tokenizer = read_tokenizer(files["tokenizer.json"], "tokenizer.json")
        named = parse_json(files.get("tokenizer_config.json", b"{}")).get("pad_token")
        text = named.get("content") if isinstance(named, dict) else named
        padding = None if text is None else self._tokenizer.token_to_id(text)
        if padding is None:
            raise ValueError(f"tokenizer_config.json names no pad_token of the tokenizer ({text!r}); copy it again")
        super().__init__(max_length, int(padding))

    def tokenize(self, text: str, listed: bool = False) -> list[int]:
        return self._tokenizer.encode(text if listed or text.endswith("\n") else f"{text}\n").ids
