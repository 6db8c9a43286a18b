"""Files that Megatron-LM's tests read: vocabularies of the right size, and a little synthetic text.

GPT needs none: it has mock data and a tokenizer without words. BERT, T5 and fill-in-the-middle read
an indexed data set through a real tokenizer. Tokens are drawn evenly; no memory depends on them.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

GPT_2, BERT_UNCASED, BERT_CASED = 50_257, 30_522, 28_996
"""Words of the tokenizers that the tests name."""
_FOLDERS = ("text/common_pile/v01_filtered_data", "text/the_pile/shard00")
_MAGIC, _UINT16 = b"MMIDIDX\x00\x00", 8
_SPECIAL = ("[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make(root: Path) -> None:
    """Fill ``root``: what the tests call ``DATA_PATH``, and tokenizers by the names under which a
    program finds them in the folder where it runs."""
    if root.exists():
        return
    for name in _FOLDERS:
        folder = root / name
        _byte_pairs(folder / "bpe")
        _words(folder / "vocab.txt", BERT_UNCASED)
        _words(folder / "bert-large-cased-vocab.txt", BERT_CASED)
        _data_set(folder / "my-gpt3_00_text_document", documents=2000, sentences=1, tokens=1100)
        for prefix in ("my-bert_00_text_sentence", "my-t5_00_text_document"):
            _data_set(folder / prefix, documents=3000, sentences=16, tokens=64)
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
