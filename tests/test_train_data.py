"""Texts -> tokens: separated, kept, weighted, held out; and the blocks drawn from them."""

from __future__ import annotations

import gzip
import lzma
import os
import re
from pathlib import Path

import numpy as np
import pytest
import train_data
from train_data import Tokens, read_tokens

from minigpt2 import Tokenizer

TOKENIZER = Tokenizer.from_pretrained("gpt2")
END = 50256


def ids(*documents: str) -> list[int]:
    """What documents must become."""
    return [n for document in documents for n in (END, *TOKENIZER.encode(document))]


def read(folder: Path, *paths: Path) -> Tokens:
    return read_tokens(paths, TOKENIZER, folder / "cache")


def whole(count: int) -> Tokens:
    return Tokens(np.arange(count, dtype=np.uint16), [(0, count)])


def test_documents_are_separated_whatever_the_packing(tmp_path: Path) -> None:
    text = "one two\n<|endoftext|>\nthree\n<|endoftext|>\n\n<|endoftext|>"
    (tmp_path / "plain.txt").write_text("\ufeff" + text, encoding="utf-8")
    with lzma.open(tmp_path / "packed.txt.xz", "wt", encoding="utf-8") as file:
        file.write(text)
    with gzip.open(tmp_path / "packed.txt.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    for name in ("plain.txt", "packed.txt.xz", "packed.txt.gz"):
        tokens = read(tmp_path, tmp_path / name)
        assert isinstance(tokens.ids, np.memmap)
        assert tokens.ids.dtype == np.uint16  # int16 would make -15280 of 50256
        assert tokens.ids.tolist() == ids("one two", "three")


def test_a_folder_is_its_files_by_name_and_a_file_counts_as_often_as_it_is_named(
    tmp_path: Path,
) -> None:
    texts = tmp_path / "texts"
    (texts / "more").mkdir(parents=True)
    for name, text in (("b.txt", "two"), ("a.md", "one"), ("more/c", "three"), (".d", "hidden")):
        (texts / name).write_text(text)
    tokens = read(tmp_path, texts, texts / "b.txt", texts / ".." / "texts" / "b.txt")
    assert tokens.ids.tolist() == ids("one", "two", "three")
    assert tokens.spans == [(0, 2), (2, 4), (4, 6), (2, 4), (2, 4)]


def test_long_documents_are_encoded_in_pieces_that_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "It isn't  \n\n so; \t\n x1 ...\x1c \u3000 a\u00a0 b\u2028\n c   " * 7 + "end  "
    path = tmp_path / "long.txt"
    path.write_text(text, encoding="utf-8", newline="")
    for least in range(1, 40):
        pattern = train_data.PIECE.pattern.replace("1000000", str(least))
        monkeypatch.setattr(train_data, "PIECE", re.compile(pattern, re.DOTALL))
        assert len(train_data.PIECE.findall(text)) > 3
        assert np.concatenate([*train_data._encoded(text, TOKENIZER)]).tolist() == ids(text)


def test_tokens_are_kept_until_a_text_or_the_vocabulary_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "story.txt"
    path.write_text("one two")
    before = path.stat()
    first = read(tmp_path, path).ids.tolist()
    assert first == ids("one two")
    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "encode", lambda *_: pytest.fail("tokenised again"))
        assert read(tmp_path, path).ids.tolist() == first

    path.write_text("two one")  # as long and, by its date, as old
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(tmp_path, path).ids.tolist() == ids("two one")

    by_bytes = Tokenizer({bytes([n]): n for n in range(256)}, {"<|endoftext|>": 256})
    assert read_tokens([path], by_bytes, tmp_path / "cache").ids.tolist() == [256, *b"two one"]


@pytest.mark.parametrize("size", [0, 9, 11])
def test_a_cut_cache_is_made_anew(size: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The king and the queen went to the sea")
    ids = read_tokens([tmp_path / "a.txt"], TOKENIZER, tmp_path / "tokens").ids.tolist()
    (cache,) = (tmp_path / "tokens").iterdir()
    cache.write_bytes(cache.read_bytes()[:size])
    assert read_tokens([tmp_path / "a.txt"], TOKENIZER, tmp_path / "tokens").ids.tolist() == ids


def test_what_a_run_wrote_below_its_data_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The king")
    folder = tmp_path / "out" / "tokens"
    ids = read_tokens([tmp_path], TOKENIZER, folder).ids.tolist()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"\xff")
    assert read_tokens([tmp_path], TOKENIZER, folder).ids.tolist() == ids


def test_processes_that_tokenise_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("one two " * 20_000)
    expected = ids("one two " * 20_000)
    children = []
    for _ in range(3):
        if (child := os.fork()) == 0:
            same = read(tmp_path, path).ids.tolist() == expected
            os._exit(0 if same else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert len([*(tmp_path / "cache").iterdir()]) == 1


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("fine")
    bad.write_bytes(b"half a character: \xc3")
    with pytest.raises(ValueError, match=r"bad\.txt: not UTF-8"):
        read(tmp_path, good, bad)
    assert [*(tmp_path / "cache").iterdir()] == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, r"missing\.txt: no such file or folder"),
        ("empty.txt", b"", r"empty\.txt: no text"),
        ("blank.txt", b"\n<|endoftext|>\n\n", r"blank\.txt: no text"),
        ("torn.xz", lzma.compress(b"text" * 99)[:-20], r"torn\.xz: damaged"),
        ("false.xz", b"text", r"false\.xz: damaged"),
        ("torn.gz", gzip.compress(b"text" * 99)[:-12], r"torn\.gz: damaged"),
        ("false.gz", b"text", r"false\.gz: damaged"),
        ("rotten.gz", gzip.compress(b"text")[:10] + b"\xff" * 9, r"rotten\.gz: damaged"),
    ],
)
def test_a_text_that_is_none_is_named(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, tmp_path / name)


def test_a_folder_without_files_and_a_vocabulary_that_cannot_serve_are_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty" / ".hidden").mkdir(parents=True)
    with pytest.raises(ValueError, match="empty: no files in this folder"):
        read(tmp_path, tmp_path / "empty")
    endless = Tokenizer({bytes([n]): n for n in range(256)}, {"<x>": 256})
    with pytest.raises(ValueError, match=r"257 ids and no <\|endoftext\|>"):
        read_tokens([tmp_path], endless, tmp_path)
    huge = Tokenizer({bytes([n]): n for n in range(256)}, {"<|endoftext|>": 65536})
    with pytest.raises(ValueError, match=r"65537 ids: .* at most 65536"):
        read_tokens([tmp_path], huge, tmp_path)


@pytest.mark.parametrize(("count", "starts"), [(17, {0}), (18, {0, 1}), (19, {0, 1, 2})])
def test_a33_windows_of_short_data(count: int, starts: set[int]) -> None:
    blocks = whole(count).draw(200, 16, np.random.default_rng(0))
    assert blocks.shape == (200, 17)
    assert set(blocks[:, 0].tolist()) == starts
    assert (blocks.diff(dim=1) == 1).all()


def test_windows_start_where_the_weights_say() -> None:
    tokens = Tokens(np.arange(100, dtype=np.uint16), [(0, 60), (60, 100), (60, 100), (60, 100)])
    starts = tokens.draw(5000, 10, np.random.default_rng(0))[:, 0].numpy()
    assert set(starts) == set(range(90))
    assert np.mean(starts >= 60) == pytest.approx(90 / 150, abs=0.03)


def test_ids_above_the_signed_half_survive() -> None:
    tokens = Tokens(np.full(20, END, dtype=np.uint16), [(0, 20)])
    assert tokens.draw(1, 16, np.random.default_rng(0)).unique().tolist() == [END]


def test_what_is_held_out_is_the_end_and_is_never_drawn_however_often_it_is_named() -> None:
    tokens = Tokens(np.arange(200, dtype=np.uint16), [(0, 120), (120, 200), (120, 200), (190, 200)])
    kept, held_out = tokens.split(0.1)
    assert held_out.ids.tolist() == [*range(180, 200)]
    drawn = kept.draw(3000, 4, np.random.default_rng(0))
    assert drawn.min() == 0
    assert drawn.max() == 179
    assert (drawn[:, 0] >= 120).float().mean() == pytest.approx(112 / 232, abs=0.04)
