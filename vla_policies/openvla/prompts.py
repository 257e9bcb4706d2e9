"""OpenVLA's prompt, tokenised with the tokenizer that comes with a checkpoint."""

from pathlib import Path

from vla_policies.processing.prompts import PromptTokens, read_tokenizer

BOS, PAD, SPACE = 1, 32000, 29871  # Llama-2's ids, with the padding token that OpenVLA adds
_TEMPLATE = "In: What action should the robot take to {instruction}?\nOut: "


class Prompts(PromptTokens):
    """Instructions to prompt tokens.

    ``folder`` has Llama-2's ``tokenizer.json``, else FileNotFoundError or ValueError; nothing in it is executed.
    ``max_length`` is ``L``, tokens of the longest prompt, ``<s>`` and the closing space included.
    """

    def __init__(self, folder: str | Path, max_length: int):
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json; copy that of the original checkpoint into it")
        self._tokenizer = read_tokenizer(file.read_bytes(), str(file))
        if self._tokenizer.token_to_id("▁") != SPACE or self._tokenizer.token_to_id("<s>") != BOS:
            raise ValueError(f"{file} is not Llama-2's tokenizer: '▁' must be token {SPACE} and <s> {BOS}")
        super().__init__(max_length, PAD)

    def tokenize(self, text: str, listed: bool = False) -> list[int]:
        """Return ``<s>``, the prompt and a final space (29871)."""
        ids = self._tokenizer.encode(_TEMPLATE.format(instruction=text.lower())).ids
        before, after = [BOS] if ids[0] != BOS else [], [SPACE] if ids[-1] != SPACE else []
        return [*before, *ids, *after]
