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

    Args:
        folder: has ``tokenizer.json``; nothing in it is executed and no network is used.
        max_length: ``L``, tokens of the longest prompt, ``<s>`` and the closing space included.

    Raises:
        FileNotFoundError, ValueError: the folder has no tokenizer, or one of another language model.
    """

    def __init__(self, folder: str | Path, max_length: int):
        from tokenizers import Tokenizer

        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no tokenizer.json; copy tokenizer.json of the checkpoint it was trained from into it"
            )
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

        Raises:
            ValueError: an instruction is empty.
            SettingError: a prompt is longer than ``L``.
        """
        return pad_prompts([self._tokens(text) for text in instructions], instructions, self.max_length, PAD)

    def _tokens(self, instruction: str) -> list[int]:
        if instruction not in self._cache:
            self._cache[instruction] = self._tokenize(instruction)
        return self._cache[instruction]

    def _tokenize(self, instruction: str) -> list[int]:
        if not instruction.strip():
            raise ValueError(
                "the instruction is empty; OpenVLA needs one: fill task_descriptions, for example 'push the puck'"
            )
        ids = self._tokenizer.encode(_TEMPLATE.format(instruction=instruction.lower())).ids
        if ids[0] != BOS:
            ids = [BOS, *ids]
        if ids[-1] != SPACE:
            ids = [*ids, SPACE]
        return ids


def prompt_lengths(tokens: Tensor) -> Tensor:
    """Return tokens int64 ``[N]`` of each prompt in ``[N, L]``, padding not counted."""
    return (tokens != PAD).sum(-1)
