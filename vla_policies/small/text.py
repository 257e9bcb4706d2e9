"""A text encoder that needs no download: words and word pairs are hashed into an embedding table."""

import itertools
import re
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_PADDING, _MAX_WORDS = 0, 24


class HashedText(nn.Module):
    """Mean embedding of the words and adjacent word pairs of an instruction (as fastText does for n-grams).

    Words that share one of ``num_buckets`` cannot be told apart; instructions are cut after 24 words.
    """

    def __init__(self, num_buckets: int, dim: int):
        super().__init__()
        self.num_buckets = num_buckets
        self.table = nn.Embedding(num_buckets, dim, padding_idx=_PADDING)

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Return bucket ids int64 ``[N, 48]``, padded with 0."""
        tokens = torch.full((len(texts), 2 * _MAX_WORDS), _PADDING)
        for row, text in zip(tokens, texts, strict=True):
            words = re.findall(r"[\w-]+", text.lower())[:_MAX_WORDS]
            grams = words + [f"{a} {b}" for a, b in itertools.pairwise(words)]
            buckets = [1 + zlib.crc32(gram.encode()) % (self.num_buckets - 1) for gram in grams]
            row[: len(buckets)] = torch.tensor(buckets, dtype=torch.int64)
        return tokens

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings ``[N, dim]`` of tokens ``[N, L]``."""
        count = (tokens != _PADDING).sum(-1, keepdim=True).clamp_min(1)
        return self.table(tokens).sum(-2) / count
