"""Prompts of pi0 and pi0.5, tokenised with PaliGemma's sentencepiece file."""

from vla_policies.pi0.checkpoint import TOKENIZERS
from vla_policies.processing.prompts import PromptTokens, one_line

BOS, PAD = 2, 0


class Pi0Prompts(PromptTokens):
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
        super().__init__(max_length, PAD)

    def tokenize(self, text: str, listed: bool = False) -> list[int]:
        # The line break is tokenised by itself, as the "start of answer".
        parts = [text] if listed else [one_line(text), "\n"]
        return [BOS, *(token for part in parts for token in self._tokenizer.encode(part))]
