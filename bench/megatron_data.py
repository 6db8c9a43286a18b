"""Files that Megatron-LM's tests read: vocabularies of the right size, and a little synthetic text.

Some GPTs need none: they have mock data and a tokenizer without words. The others, BERT and T5 read
an indexed data set through a real tokenizer. Tokens are drawn evenly; no memory depends on them.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from sentencepiece import sentencepiece_model_pb2

GPT_2, BERT_UNCASED, BERT_CASED = 50_257, 30_522, 28_996
"""Words of the tokenizers that the tests name."""
NEMOTRON, MIXTRAL = 256_000, 32_000
"""Pieces of the tokenizers that the tests give as a file of SentencePiece."""
_FOLDERS = (
    *("text/common_pile/v01_filtered_data", "text/the_pile/shard00", "text/the_pile/bert_shard00"),
    "utils",
)
"""Where the tests look for the files, beside the folder itself."""
GPT_DATA, BERT_DATA = "my-gpt3_00_text_document", "my-bert_00_text_sentence"
_MAGIC, _UINT16 = b"MMIDIDX\x00\x00", 8
_SPECIAL = ("[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make(root: Path) -> None:
    """Fill ``root``: what the tests call ``DATA_PATH``, and tokenizers by the names under which a
    program finds them in the folder where it runs."""
    if root.exists():
        return
    _byte_pairs(root / "bpe")
    _words(root / "vocab.txt", BERT_UNCASED)
    _words(root / "bert-large-cased-vocab.txt", BERT_CASED)
    _pieces(root / "nemotron_2_256k.model", NEMOTRON)
    _pieces(root / "tokenizer.model", MIXTRAL)
    _data_set(root / GPT_DATA, documents=2000, sentences=1, tokens=1100)
    _data_set(root / BERT_DATA, documents=3000, sentences=16, tokens=64)
    # 9 in 100,000 of the documents are for validation, and as many for the test.
    _data_set(root / "my-t5_00_text_document", documents=20_000, sentences=8, tokens=64)
    for name in _FOLDERS:
        folder = root / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(root)
    _byte_pairs(root / "gpt2")
    _describe(root / "gpt2", "gpt2", "GPT2Tokenizer")
    for case, size in (("uncased", BERT_UNCASED), ("cased", BERT_CASED)):
        folder = root / f"bert-large-{case}"
        _words(folder / "vocab.txt", size)
        _describe(folder, "bert", "BertTokenizer")


def _describe(folder: Path, model: str, tokenizer: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer}))


def _words(path: Path, size: int) -> None:
    """WordPiece's vocabulary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = [*_SPECIAL, *(f"w{i}" for i in range(size - len(_SPECIAL)))]
    path.write_text("\n".join(words) + "\n")


def _byte_pairs(folder: Path) -> None:
    """GPT-2's: its bytes, pairs of bytes, and the end of a text."""
    folder.mkdir(parents=True, exist_ok=True)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [chr(256 + i) for i in range(256 - len(printable))]
    single = [*map(chr, printable), *others]
    pairs = [(first, second) for first in single for second in single][: GPT_2 - 257]
    words = [*single, *(first + second for first, second in pairs), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    merges = "\n".join(f"{first} {second}" for first, second in pairs)
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")


def _pieces(path: Path, size: int) -> None:
    """SentencePiece's model: unigrams."""
    model = sentencepiece_model_pb2.ModelProto()
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    words = [*kinds, *(f"▁w{i}" for i in range(size - len(kinds)))]
    for i, word in enumerate(words):
        model.pieces.add(piece=word, score=-float(i), type=kinds.get(word, 1))
    path.write_bytes(model.SerializeToString())


def _data_set(prefix: Path, *, documents: int, sentences: int, tokens: int) -> None:
    """Megatron-LM's indexed format: tokens one after another, and where each sentence begins."""
    count = documents * sentences
    drawn = np.random.default_rng(1).integers(len(_SPECIAL), BERT_CASED, count * tokens)
    drawn.astype(np.uint16).tofile(prefix.with_suffix(".bin"))
    lengths = np.full(count, tokens, np.int32)
    starts = np.arange(count, dtype=np.int64) * tokens * 2
    ends = np.arange(0, count + 1, sentences, dtype=np.int64)
    header = _MAGIC + struct.pack("<QBQQ", 1, _UINT16, count, len(ends))
    arrays = b"".join(array.tobytes() for array in (lengths, starts, ends))
    prefix.with_suffix(".idx").write_bytes(header + arrays)
