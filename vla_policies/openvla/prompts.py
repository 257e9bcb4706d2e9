"""OpenVLA's prompt, tokenised with the tokenizer that comes with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from vla_policies.processing.prompts import pad_prompts

BOS, STOP, PAD, SPACE = 1, 2, 32000, 29871  # Llama-2's ids, with the padding token that OpenVLA adds
_TEMPLATE = "In: What action should the robot take to {instruction}?\nOut: "


class Prompts:
    """Instructions to prompt tokens; every text is tokenised once.

    ``folder`` has Llama-2's ``tokenizer.json``, else FileNotFoundError or ValueError; nothing in it is executed.
    ``max_length`` is ``L``, tokens of the longest prompt, ``<s>`` and the closing space included.
    """

    def __init__(self, folder: str | Path, max_length: int):
        from tokenizers import Tokenizer

        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json; copy that of the original checkpoint into it")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"{file} is no tokenizer ({error}); copy it again") from error
        if self._tokenizer.token_to_id("▁") != SPACE or self._tokenizer.token_to_id("<s>") != BOS:
            raise ValueError(f"{file} is not Llama-2's tokenizer: '▁' must be token {SPACE} and <s> {BOS}")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.max_length = max_length
        self._cache: dict[str, list[int]] = {}

    def __call__(self, instructions: Sequence[str]) -> Tensor:
        """Return tokens int64 ``[N, L]``: ``<s>``, the prompt, a final space (29871), then padding (32000).

        ValueError for an empty instruction, SettingError for a prompt longer than ``L``.
        """
        return pad_prompts([self._tokens(text) for text in instructions], instructions, self.max_length, PAD)

    def _tokens(self, instruction: str) -> list[int]:
        if instruction not in self._cache:
            self._cache[instruction] = self._tokenize(instruction)
        return self._cache[instruction]

    def _tokenize(self, instruction: str) -> list[int]:
        ids = self._tokenizer.encode(_TEMPLATE.format(instruction=instruction.lower())).ids
        before, after = [BOS] if ids[0] != BOS else [], [SPACE] if ids[-1] != SPACE else []
        return [*before, *ids, *after]
