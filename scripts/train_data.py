"""Text files -> one memory-mapped row of tokens, and blocks drawn from it."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minigpt2 import Tokenizer
from minigpt2.checkpoint import replace_file
from minigpt2.evaluate import read_text
from minigpt2.tokenizer import END_OF_TEXT

# A long document is encoded in pieces: a list of all its ids would take 36 bytes a token. No token
# reaches from a visible character into a space or a new line behind it.
PIECE = re.compile(r".{1000000,}?\S(?=[ \n])|.+", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The ids of several files behind one another, (N,) uint16.

    spans: where the files lie, one (start, stop) for every time a file was named: one that is named
    twice is drawn from twice as often.
    """

    ids: np.ndarray
    spans: Sequence[tuple[int, int]]

    def split(self, share: float) -> tuple[Tokens, Tokens]:
        """All but the last `share` of the ids, and that."""
        cut = len(self.ids) - round(len(self.ids) * share)
        kept = [(start, min(stop, cut)) for start, stop in self.spans]
        return Tokens(self.ids[:cut], kept), Tokens(self.ids[cut:], [(0, len(self.ids) - cut)])

    def draw(self, count: int, length: int, rng: np.random.Generator) -> Tensor:
        """(count, length + 1) windows that start anywhere: inputs and, one later, their targets."""
        starts, stops = np.array(self.spans).T
        sizes = np.maximum(0, np.minimum(stops, len(self.ids) - length) - starts)
        ends = np.cumsum(sizes)
        drawn = rng.integers(0, ends[-1], size=count)
        span = np.searchsorted(ends, drawn, side="right")
        drawn += (starts + sizes - ends)[span]
        windows = [self.ids[start : start + length + 1] for start in drawn]
        return torch.from_numpy(np.stack(windows).astype(np.int64))


def read_tokens(paths: Sequence[Path], tokenizer: Tokenizer, folder: Path) -> Tokens:
    """The tokens of text files, and of all files in folders; tokenised once, and kept in `folder`
    under a name that is made of the content of the files and of the vocabulary.

    Raises:
        ValueError: a file is missing, damaged or not UTF-8, or all are empty; the ids do not fit.
    """
    if tokenizer.end_of_text_id is None or tokenizer.n_vocab > 65536:
        have = f"{tokenizer.n_vocab} ids" + " and no <|endoftext|>" * (not tokenizer.end_of_text_id)
        raise ValueError(f"a vocabulary of {have}: {END_OF_TEXT} and at most 65536 ids are needed")
    named = [file for path in paths for file in _files(path, folder.parent)]
    distinct = list({file.resolve(): file for file in named}.values())
    cache = folder / f"{_key(distinct, tokenizer)}.bin"
    if not _is_whole(cache, len(distinct)):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(cache, lambda path: _write(path, distinct, tokenizer))
    lengths = np.fromfile(cache, np.int64, len(distinct))
    ends = [0, *np.cumsum(lengths).tolist()]
    spans = {file.resolve(): (ends[n], ends[n + 1]) for n, file in enumerate(distinct)}
    ids = np.memmap(cache, np.uint16, "r", offset=lengths.nbytes)
    return Tokens(ids, [spans[file.resolve()] for file in named])


def _files(path: Path, out: Path) -> list[Path]:
    """The file itself, or all files below the folder by name, without hidden ones and OUT's."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    below = [file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file()]
    if path.resolve() in out.resolve().parents:
        below = [file for file in below if out.resolve() not in (path / file).resolve().parents]
    visible = [path / file for file in below if not any(p.startswith(".") for p in file.parts)]
    if not visible:
        raise ValueError(f"{path}: no files in this folder")
    return visible


def _key(files: Sequence[Path], tokenizer: Tokenizer) -> str:
    unused = set(tokenizer.unused_ids(tokenizer.n_vocab))
    ids = [n for n in range(tokenizer.n_vocab) if n not in unused]
    vocabulary = repr([(n, tokenizer.token_bytes(n)) for n in ids])
    key = hashlib.sha256(vocabulary.encode())
    for path in files:
        content = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                content.update(part)
        key.update(content.digest() + path.suffix.encode())
    return key.hexdigest()[:16]


def _is_whole(cache: Path, n_files: int) -> bool:
    """Whether it is there, and as long as it says."""
    if not cache.is_file() or cache.stat().st_size < 8 * n_files:
        return False
    lengths = np.fromfile(cache, np.int64, n_files)
    return bool(cache.stat().st_size == lengths.nbytes + 2 * lengths.sum())


def _write(target: Path, files: Sequence[Path], tokenizer: Tokenizer) -> None:
    """The number of ids of each file, int64, and then all ids, uint16."""
    lengths = np.zeros(len(files), np.int64)
    with target.open("wb") as out:
        lengths.tofile(out)
        for n, path in enumerate(files):
            for ids in _encoded(read_text(path), tokenizer):
                ids.tofile(out)
                lengths[n] += len(ids)
        out.seek(0)
        lengths.tofile(out)
    if not lengths.any():
        raise ValueError(f"{', '.join(map(str, files))}: no text to train on")


def _encoded(text: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The ids of a text, part by part; each document is opened by <|endoftext|>."""
    for document in text.removeprefix("\ufeff").split(END_OF_TEXT):
        if document := document.strip("\n"):
            yield np.array([tokenizer.end_of_text_id], np.uint16)
            for piece in PIECE.findall(document):
                yield np.array(tokenizer.encode(piece), np.uint16)
