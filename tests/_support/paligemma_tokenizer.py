"""A sentencepiece file of PaliGemma's kind as the ``tokenizer.json`` that LeRobot has of it: the same tokens."""

import json

from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, models, normalizers, processors


def as_tokenizer_json(file, folder):
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` of a sentencepiece ``file`` into a new ``folder``."""
    pieces = SentencePieceProcessor(model_file=str(file))
    names = [pieces.id_to_piece(index) for index in range(pieces.vocab_size())]
    whole = [index for index in range(4, len(names)) if not pieces.is_byte(index)]
    steps = [normalizers.Replace(" ", "▁")]
    if not pieces.encode(
        "\n"
    ):  # of the tiny checkpoints: words and letters; line breaks are blanks, a blank comes first
        steps = [normalizers.Replace("\n", " "), normalizers.Strip(), normalizers.Prepend("▁"), *steps]
        scores = [(name, -10.0 * (len(name) == 1)) for name in names]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=3, byte_fallback=True))
    else:
        known = {names[index] for index in whole}
        parts = [(name[:cut], name[cut:]) for name in map(names.__getitem__, whole) for cut in range(1, len(name))]
        merges = [part for part in parts if known.issuperset(part)]
        vocabulary = {name: index for index, name in enumerate(names)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.add_tokens(["\n"])
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.add_special_tokens(["<pad>", "</s>", "<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    return folder
