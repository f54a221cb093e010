"""minigpt2.tokenizer against recorded cases (tests/facts/tokenizer_cases.json), against
transformers, and against public bug reports (A13 to A20)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import GPT2TokenizerFast

from minigpt2 import CheckpointError, Tokenizer
from minigpt2 import tokenizer as tokenizer_module
from minigpt2.tokenizer import END_OF_TEXT, VOCAB_BPE, StreamDecoder

CASES = json.loads((Path(__file__).parent / "facts" / "tokenizer_cases.json").read_text("utf-8"))
GPT2 = Tokenizer.from_pretrained("gpt2")
PLAIN_END = [27, 91, 437, 1659, 5239, 91, 29]  # <|endoftext|> as plain characters


def named(cases: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return [pytest.param(case, id=ascii(case[key])[1:-1]) for case in cases]


def unrolled(runs: Sequence[Sequence[int]]) -> list[int]:
    return [token_id for token_id, count in runs for _ in range(count)]


def digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.array(ids, dtype="<u2").tobytes()).hexdigest()


# --- GPT-2's vocabulary, derived a second time from vocab.bpe


def byte_names() -> list[str]:
    """The characters that stand for the bytes, by id: OpenAI's three printable ranges, then the
    others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]


MERGES = VOCAB_BPE.read_text(encoding="utf-8").removeprefix("#version: 0.2\n").splitlines()
TOKENS = [*byte_names(), *(merge.replace(" ", "") for merge in MERGES), END_OF_TEXT]
VOCAB = {token: token_id for token_id, token in enumerate(TOKENS)}


@pytest.fixture(scope="module")
def theirs() -> GPT2TokenizerFast:
    return GPT2TokenizerFast(vocab=VOCAB, merges=[tuple(merge.split(" ")) for merge in MERGES])


def test_derived_vocabulary_is_the_official_vocab_json() -> None:
    content = json.dumps(VOCAB).encode()
    official = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
    assert hashlib.sha256(content).hexdigest() == official


def test_ids_may_come_in_a_tensor() -> None:
    ids = GPT2.encode("The cat sat")
    assert GPT2.decode(torch.tensor(ids)) == GPT2.decode(np.array(ids)) == "The cat sat"
    with pytest.raises(TypeError):
        GPT2.decode(torch.tensor([1.5]))


def test_shape_of_the_vocabulary() -> None:
    assert (GPT2.n_vocab, GPT2.end_of_text_id) == (50257, 50256)
    assert GPT2.token_bytes(50256) == b"<|endoftext|>"
    assert sorted(GPT2.token_bytes(i) for i in range(256)) == [bytes([b]) for b in range(256)]
    assert Tokenizer.from_pretrained("gpt2-xl") is GPT2
    assert Tokenizer.from_pretrained("tales") is GPT2
    with pytest.raises(CheckpointError, match="a name that is no folder: no such folder"):
        Tokenizer.from_pretrained("a name that is no folder")


def test_every_token_one_by_one(theirs: GPT2TokenizerFast) -> None:
    """An ordinary token that is text alone encodes to itself; 344 are pieces of characters."""
    broken = 0
    their_names = theirs.convert_ids_to_tokens(list(range(50257)))
    assert their_names == TOKENS
    for token_id in range(50256):
        piece = GPT2.token_bytes(token_id)
        try:
            text = piece.decode("utf-8")
        except UnicodeDecodeError:
            broken += 1
            continue
        assert GPT2.encode(text) == [token_id]
        assert GPT2.decode([token_id]) == text
    assert broken == CASES["facts"]["tokens_not_valid_utf8_alone"] == 344


@pytest.mark.parametrize(
    ("token_id", "piece"),
    [(3797, " cat"), (198, "\\n"), (197, "\\t"), (187, "\\xff"), (447, "\\xe2\\x80")],
)
def test_piece_is_printable(token_id: int, piece: str) -> None:
    assert GPT2.piece(token_id) == piece


def test_every_piece_is_printable() -> None:
    assert all(GPT2.piece(token_id).isprintable() for token_id in range(50257))


# --- Recorded cases


@pytest.mark.parametrize("case", named(CASES["cases"], "id"))
def test_recorded_case(case: dict[str, Any], theirs: GPT2TokenizerFast) -> None:
    text = case["text"]
    assert GPT2.encode(text, special=False) == case["ids"]
    assert GPT2.encode(text) == case.get("ids_special", case["ids"])
    assert theirs(text)["input_ids"] == GPT2.encode(text)
    assert GPT2.decode(case["ids"]) == GPT2.decode(GPT2.encode(text)) == text


@pytest.mark.parametrize("case", named(CASES["surrogates"], "text"))
def test_a14_surrogates_are_paired_or_replaced(case: dict[str, Any]) -> None:
    assert GPT2.encode(case["text"], special=False) == case["ids"]
    assert GPT2.encode(case["text"]) == case.get("ids_special", case["ids"])
    assert GPT2.decode(case["ids"]) == case["decoded"]


@pytest.mark.parametrize("case", named(CASES["long"], "unit"))
def test_long_run(case: dict[str, Any]) -> None:
    text = case["unit"] * case["n"]
    ids = GPT2.encode(text, special=False)
    assert (len(ids), digest(ids)) == (case["n_ids"], case["sha256_le_u16"])
    assert GPT2.decode(ids) == text


@pytest.mark.parametrize("case", named(CASES["crash"], "unit"))
@pytest.mark.parametrize("special", [True, False])
def test_a16_a_million_of_one_character(case: dict[str, Any], special: bool) -> None:
    text = case["unit"] * case["n"] + case["tail"]
    ids = GPT2.encode(text, special)
    assert ids == unrolled(case["ids_rle"])
    assert GPT2.decode(ids) == text


@pytest.mark.parametrize("case", named(CASES["decode"], "ids"))
def test_decode(case: dict[str, Any]) -> None:
    assert b"".join(map(GPT2.token_bytes, case["ids"])).hex() == case["bytes_hex"]
    assert GPT2.decode(case["ids"]) == case["text"]
    assert GPT2.decode(iter(case["ids"])) == case["text"]


@pytest.mark.parametrize("case", named(CASES["streaming"], "ids"))
def test_a15_streaming(case: dict[str, Any]) -> None:
    decoder = StreamDecoder(GPT2)
    deltas = [decoder.push(token_id) for token_id in case["ids"]]
    assert (deltas, decoder.flush()) == (case["deltas"], case["flush"])
    assert "".join(deltas) + case["flush"] == case["text"] == GPT2.decode(case["ids"])


@given(st.lists(st.integers(0, 50256), max_size=30))
@settings(deadline=None)
def test_a15_streamed_text_is_the_decoded_text(ids: list[int]) -> None:
    decoder = StreamDecoder(GPT2)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == GPT2.decode(ids)


@pytest.mark.parametrize("token_id", CASES["invalid_ids"])
def test_invalid_id_is_named(token_id: int) -> None:
    message = rf"token id {token_id} is not in the vocabulary 0\.\.50256"
    decoder = StreamDecoder(GPT2)
    calls: list[Callable[[], object]] = [
        lambda: GPT2.decode([464, token_id]),
        lambda: GPT2.token_bytes(token_id),
        lambda: GPT2.piece(token_id),
        lambda: decoder.push(token_id),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The meaning of life is", [464, 3616, 286, 1204, 318]),
        ("The meaning of life is not", [464, 3616, 286, 1204, 318, 407]),
        ("The cat sat on the", [464, 3797, 3332, 319, 262]),
        ("The best thing about PyTorch is", [464, 1266, 1517, 546, 9485, 15884, 354, 318]),
        ("What is the capital of France?", [2061, 318, 262, 3139, 286, 4881, 30]),
        ("Tokenization isn't magic.", [30642, 1634, 2125, 470, 5536, 13]),
        ("Tokenization isn\u2019t magic.", [30642, 1634, 2125, 447, 247, 83, 5536, 13]),
        ("Hello world!", [15496, 995, 0]),
        ("", []),
    ],
)
def test_texts_of_the_articles(text: str, ids: list[int]) -> None:
    assert GPT2.encode(text) == ids
    assert GPT2.decode(ids) == text


# --- Any text

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60)  # surrogates included
SNIPPETS = st.sampled_from(
    [
        "<|endoftext|>",
        "<|endoftext",
        "'s",
        "'LL",
        "don't",
        " 1234",
        "\u0663",
        "\xbd",
        "\xe9",
        "_",
        "\r\n",
        "\n\n\n",
        "    ",
        "\u3000",
        "\x1c",
        "\u200d",
        "\x00",
        "\ufffd",
        "\ud83d",
        "e\u0301",
        "\u4f60\u597d",
        "\U0001f600",
    ]
)
MIXED = st.lists(st.one_of(SNIPPETS, ANY_TEXT), max_size=8).map("".join)


def repaired(text: str) -> str:
    """Surrogates paired, or replaced where they have no partner."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@given(st.one_of(ANY_TEXT, MIXED), st.booleans())
@example("\ud83d\ude00", True)
@example("\ude00\ud83d", False)
@example("<|endoftext|>\ud83d", True)
@settings(max_examples=400, deadline=None)
def test_any_text_comes_back(text: str, special: bool) -> None:
    assert GPT2.decode(GPT2.encode(text, special)) == repaired(text)


@given(st.one_of(st.text(max_size=60), MIXED.map(repaired)))
@settings(max_examples=400, deadline=None)
def test_any_text_has_the_ids_of_transformers(theirs: GPT2TokenizerFast, text: str) -> None:
    assert GPT2.encode(text) == theirs(text)["input_ids"]


def test_every_white_space_is_cut_right(
    theirs: GPT2TokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A16's way around long runs gives the ids that are given without it."""
    texts = [
        f"{before}{space * n}{after}"
        for space in (
            *map(chr, [*range(9, 14), 0x1C, 0x85, 0xA0, 0x1680]),
            " ",
            " \n",
            "\t ",
            "\u3000",
        )
        for n in (1, 2, 3, 7)
        for before in ("", "a", "!", END_OF_TEXT)
        for after in ("", "x", " x", "'s", "1", "...", END_OF_TEXT, "\u3000y")
    ]
    short = tokenizer_module.LONG_WHITESPACE.pattern.replace("{100000,}", "{3,}")
    monkeypatch.setattr(tokenizer_module, "LONG_WHITESPACE", re.compile(short))
    for text in texts:
        assert GPT2.encode(text) == theirs(text)["input_ids"], ascii(text)


def test_long_runs_are_of_the_pattern_s_white_space() -> None:
    """Of U+001C and its like, white space for Python alone, a run is cut as any other text is."""
    spaces = ""
    for code_points in CASES["facts"]["whitespace_code_points_of_the_pattern"]:
        first, _, last = code_points.removeprefix("U+").partition("-")
        spaces += "".join(map(chr, range(int(first, 16), int(last or first, 16) + 1)))
    one = re.compile(tokenizer_module.LONG_WHITESPACE.pattern.removesuffix("{100000,}"))
    matched = [c for c in map(chr, range(0x110000)) if one.fullmatch(c)]
    assert "".join(matched) == spaces


# --- Public bug reports


@pytest.mark.parametrize(
    ("text", "plain", "special"),
    [
        ("a<|endoftext|>b", [64, *PLAIN_END, 65], [64, 50256, 65]),
        ("<|endoftext|", PLAIN_END[:-1], PLAIN_END[:-1]),
        (
            "<|endoftext|><|endoftext|>",
            [*PLAIN_END[:-1], 6927, *PLAIN_END[1:]],
            [50256, 50256],
        ),
    ],
)
def test_a13_text_that_mentions_end_of_text(
    text: str, plain: list[int], special: list[int]
) -> None:
    assert GPT2.encode(text, special=False) == plain
    assert GPT2.encode(text, special=True) == GPT2.encode(text) == special


@pytest.mark.parametrize("unit", ["a", "lol", " ", "-", "ab ", "é", "\n"])
def test_a17_time_is_linear(unit: str) -> None:
    """100 kB of one piece in well under a second; ten times the text in about ten times the time.

    The bounds are generous: a quadratic merge would take a hundred times as long, and minutes.
    """

    def seconds(n: int) -> float:
        text, start = unit * (n // len(unit)), time.process_time()
        GPT2.encode(text)
        return time.process_time() - start

    small = min(seconds(20_000) for _ in range(3))
    large = min(seconds(200_000) for _ in range(3))
    assert large < 5
    assert large < 40 * small + 0.2


@pytest.mark.parametrize(
    "text",
    [
        "y is ?",
        " 'you'",
        "Is this restaurant family-friendly ? Yes",
        "a , b . c ! n't 's",
        " \n . ",
    ],
)
def test_a18_spaces_before_punctuation_stay(text: str) -> None:
    assert GPT2.decode(GPT2.encode(text)) == text


def in_a_process(code: str, **environment: str) -> str:
    root = Path(__file__).parent.parent
    keep = {key: os.environ[key] for key in ("PATH", "SYSTEMROOT") if key in os.environ}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=keep | {"PYTHONPATH": str(root)} | environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr.decode("utf-8", "replace")
    return run.stdout.decode("ascii")


ENCODE = """
import json, pathlib, sys
from minigpt2.tokenizer import Tokenizer
texts = ["Hello, world", "caf\\u00e9 \\u4f60", "\\U0001f600", "caf\\udce9"]
print(json.dumps([Tokenizer.from_pretrained(sys.argv[1]).encode(text) for text in texts]))
"""


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
        {"PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1", "LC_ALL": "C"},
        {"PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"},
        {"PYTHONUTF8": "1"},
    ],
    ids=["C", "C latin-1", "latin-1", "utf-8"],
)
def test_a19_ids_do_not_depend_on_the_locale(environment: dict[str, str], tmp_path: Path) -> None:
    texts = ["Hello, world", "café 你", "😀", "caf\udce9"]
    expected = [GPT2.encode(text) for text in texts]
    assert expected[0] == [15496, 11, 995]
    write_vocabulary(tmp_path / "files", VOCAB, MERGES)
    for name in ("gpt2", str(tmp_path / "files")):
        code = ENCODE.replace("sys.argv[1]", repr(name))
        assert json.loads(in_a_process(code, **environment)) == expected


OFFLINE = """
import os, socket
def refuse(*arguments, **options):
    raise AssertionError("asked the network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from minigpt2.tokenizer import Tokenizer
print(Tokenizer.from_pretrained("gpt2").encode("Hello, world"))
"""


def test_a20_no_network_and_no_cache(tmp_path: Path) -> None:
    """tiktoken's own loader asks the network, and deletes a cached file with a wrong hash."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for sha1_of_url in (
        "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
    ):
        (cache / sha1_of_url).write_text("cut short")
    before = {path.name: path.read_bytes() for path in cache.iterdir()}
    names = {"TIKTOKEN_CACHE_DIR": str(cache), "DATA_GYM_CACHE_DIR": str(cache)}
    printed = in_a_process(OFFLINE, **names, HOME=str(tmp_path / "home"), TMPDIR=str(tmp_path))
    assert printed == "[15496, 11, 995]\n"
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_damaged_package_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = tmp_path / "vocab.bpe"
    damaged.write_bytes(VOCAB_BPE.read_bytes()[:-10])
    monkeypatch.setattr(tokenizer_module, "VOCAB_BPE", damaged)
    with pytest.raises(ValueError, match=r"vocab\.bpe is damaged: install minigpt2 again"):
        tokenizer_module._gpt2.__wrapped__()


# --- Vocabularies of checkpoint folders


def test_a16_long_run_before_a_special_token() -> None:
    """The text ends there, and the run is not parted from its last character."""
    run = "\n" * 100_000
    assert GPT2.encode(run + END_OF_TEXT) == [628] * 50_000 + [50256]
    assert GPT2.encode(run + "x") == [628] * 49_999 + [198, 198, 87]


def write_vocabulary(
    folder: Path, vocab: dict[str, int], merges: Sequence[str], end: str = "\n"
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    text = "".join(line + end for line in ("#version: 0.2", *merges))
    (folder / "merges.txt").write_text(text, encoding="utf-8", newline="")
    return folder


def small_vocabulary() -> tuple[dict[str, int], list[str]]:
    """A vocabulary as Hugging Face's trainer writes it: <|endoftext|> first, then the bytes in
    another order than GPT-2's, then the merges."""
    merges = ["Ġ t", "h e", "Ġt he", "a t", "c at", "Ġ cat", "l o", "lo w"]
    tokens = [END_OF_TEXT, *sorted(byte_names()), *(merge.replace(" ", "") for merge in merges)]
    return {token: token_id for token_id, token in enumerate(tokens)}, merges


SMALL_TEXTS = ["the cat sat", "low low the", f"a{END_OF_TEXT}b cat", "", "\n  the", "é😀"]


def same_as_transformers(folder: Path, texts: Sequence[str]) -> Tokenizer:
    """The folder's tokenizer, once it has given transformers' ids for the texts."""
    ours = Tokenizer.from_pretrained(folder)
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    reference = GPT2TokenizerFast(vocab=vocab, merges=[tuple(line.split()) for line in lines])
    for text in texts:
        assert ours.encode(text) == reference(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text
    return ours


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_official_files_in_a_folder(tmp_path: Path, end: str) -> None:
    ours = Tokenizer.from_pretrained(write_vocabulary(tmp_path, VOCAB, MERGES, end))
    assert (ours.n_vocab, ours.end_of_text_id) == (50257, 50256)
    for case in CASES["cases"]:
        assert ours.encode(case["text"]) == case.get("ids_special", case["ids"])
    assert all(ours.token_bytes(i) == GPT2.token_bytes(i) for i in range(50257))


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_ids_in_the_trainer_s_order(tmp_path: Path, end: str) -> None:
    vocab, merges = small_vocabulary()
    ours = same_as_transformers(write_vocabulary(tmp_path, vocab, merges, end), SMALL_TEXTS)
    assert (ours.n_vocab, ours.end_of_text_id) == (265, 0)
    assert ours.token_bytes(vocab["Ġ"]) == b" "


def test_ids_in_any_order_of_the_bytes(tmp_path: Path) -> None:
    vocab, merges = small_vocabulary()
    bytes_only = list(vocab)[1:257]
    random.Random(0).shuffle(bytes_only)
    tokens = [END_OF_TEXT, *bytes_only, *list(vocab)[257:]]
    shuffled = {token: token_id for token_id, token in enumerate(tokens)}
    same_as_transformers(write_vocabulary(tmp_path, shuffled, merges), SMALL_TEXTS)


def test_merges_without_a_version_line_and_with_hashes(tmp_path: Path) -> None:
    """A merge may start with #; only the line #version is none."""
    merges = ["# #", "## #"]
    tokens = [*byte_names(), "##", "###", END_OF_TEXT]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    write_vocabulary(tmp_path, vocab, merges)
    (tmp_path / "merges.txt").write_text("# #\n## #\n", encoding="utf-8")
    assert Tokenizer.from_pretrained(tmp_path).encode("###", special=False) == [257]


def test_added_tokens_are_special(tmp_path: Path) -> None:
    vocab, merges = small_vocabulary()
    write_vocabulary(tmp_path, vocab, merges)
    added = {"<|user|>": 265, "<|pad|>": 266}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.n_vocab == 267
    the, cat = vocab["Ġthe"], vocab["Ġcat"]
    assert ours.encode(" the<|user|> cat") == [the, 265, cat]
    assert 265 not in ours.encode(" the<|user|> cat", special=False)
    assert ours.decode([265, 266]) == "<|user|><|pad|>"


def test_the_longest_special_token_wins(tmp_path: Path) -> None:
    vocab, merges = small_vocabulary()
    write_vocabulary(tmp_path, vocab, merges)
    added = {"<|a|>": 265, "<|a|><|b|>": 266, "(.*)": 267}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.encode("<|a|><|a|><|b|><|a|>(.*)") == [265, 266, 265, 267]


def test_tokenizer_json_alone(tmp_path: Path) -> None:
    """As transformers 5 saves it."""
    vocab, merges = small_vocabulary()
    pairs = [tuple(merge.split()) for merge in merges]
    saved = GPT2TokenizerFast(vocab=vocab, merges=pairs)
    saved.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    saved.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    assert not (tmp_path / "vocab.json").exists()
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.n_vocab == 266
    for text in (*SMALL_TEXTS, " the<|user|> cat"):
        assert ours.encode(text) == saved(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text


def test_tokenizer_json_with_merges_as_strings(tmp_path: Path) -> None:
    """As transformers 4 saved it."""
    vocab, merges = small_vocabulary()
    write_tokenizer_json(tmp_path)
    folder = write_vocabulary(tmp_path / "files", vocab, merges)
    ours, same = Tokenizer.from_pretrained(tmp_path), Tokenizer.from_pretrained(folder)
    assert [ours.encode(text) for text in SMALL_TEXTS] == [same.encode(t) for t in SMALL_TEXTS]


def test_vocab_json_comes_before_tokenizer_json(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, *small_vocabulary())
    (tmp_path / "tokenizer.json").write_text("damaged", encoding="utf-8")
    assert Tokenizer.from_pretrained(tmp_path).n_vocab == 265


def write_tokenizer_json(folder: Path, **changes: Any) -> None:
    """A tokenizer.json as transformers 4 wrote it, with other values under "key" or "key__key"."""
    vocab, merges = small_vocabulary()
    before = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content = {
        "added_tokens": [{"id": 0, "content": END_OF_TEXT, "special": True}],
        "normalizer": None,
        "pre_tokenizer": before,
        "post_processor": before | {"add_prefix_space": True},
        "model": {"type": "BPE", "dropout": None, "vocab": vocab, "merges": merges},
    }
    for name, value in changes.items():
        node: Any = content
        *path, last = name.split("__")
        for key in path:
            node = node[key]
        node[last] = value
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


FLAGS = ("single_word", "lstrip", "rstrip")


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("normalizer", {"normalizer": {"type": "Lowercase"}}),
        ("pre_tokenizer", {"pre_tokenizer__add_prefix_space": True}),
        ("pre_tokenizer", {"pre_tokenizer__use_regex": False}),
        ("pre_tokenizer", {"pre_tokenizer": {"type": "Whitespace", "add_prefix_space": False}}),
        ("pre_tokenizer", {"pre_tokenizer": None}),
        (
            "post_processor",
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": END_OF_TEXT}}, {"Sequence": {"id": "A"}}],
                }
            },
        ),
        ("model type", {"model__type": "WordPiece"}),
        ("dropout", {"model__dropout": 0.1}),
        ("continuing_subword_prefix", {"model__continuing_subword_prefix": "##"}),
        ("end_of_word_suffix", {"model__end_of_word_suffix": "</w>"}),
        ("byte_fallback", {"model__byte_fallback": True}),
        ("ignore_merges", {"model__ignore_merges": True}),
        *((f, {"added_tokens": [{"id": 0, "content": END_OF_TEXT, f: True}]}) for f in FLAGS),
    ],
)
def test_a_tokenizer_json_that_asks_for_other_ids_is_refused(
    named: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    write_tokenizer_json(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).n_vocab == 265
    write_tokenizer_json(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: .*{named}"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("content", ["", "\ud800"])
def test_a_token_that_no_text_holds_is_refused(content: str, tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path, added_tokens=[{"id": 265, "content": content}])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .* cannot be a token"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_one_of_the_pair_is_not_enough(name: str, tmp_path: Path) -> None:
    write_vocabulary(tmp_path, *small_vocabulary())
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} is missing"):
        Tokenizer.from_pretrained(tmp_path)
    write_tokenizer_json(tmp_path)  # which says it all
    assert Tokenizer.from_pretrained(tmp_path).n_vocab == 265


def test_a_folder_without_a_vocabulary_speaks_gpt2(tmp_path: Path) -> None:
    assert Tokenizer.from_pretrained(tmp_path) is GPT2
    assert Tokenizer.from_pretrained(str(tmp_path)) is GPT2


def test_no_end_of_text(tmp_path: Path) -> None:
    vocab, merges = small_vocabulary()
    del vocab[END_OF_TEXT]
    ours = Tokenizer.from_pretrained(write_vocabulary(tmp_path, vocab, merges))
    assert ours.end_of_text_id is None
    assert ours.decode(ours.encode(END_OF_TEXT)) == END_OF_TEXT
    with pytest.raises(ValueError, match=r"token id 0 is not in the vocabulary"):
        ours.decode([0])


VOCAB_JSON, MERGES_TXT = "vocab.json", "merges.txt"
SMALL_JSON = json.dumps(small_vocabulary()[0]).encode()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (VOCAB_JSON, b""),
        (VOCAB_JSON, SMALL_JSON[:-5]),
        (VOCAB_JSON, b"\xff\xfe"),
        (VOCAB_JSON, b"[]"),
        (VOCAB_JSON, b"17"),
        (VOCAB_JSON, b"null"),
        (VOCAB_JSON, SMALL_JSON.replace(b": 0,", b': "zero",')),
        (VOCAB_JSON, SMALL_JSON.replace(b": 0,", b": 0.5,")),
        (VOCAB_JSON, SMALL_JSON.replace(b": 1,", b": true,")),
        (VOCAB_JSON, SMALL_JSON.replace(b": 0,", b": -1,")),
        (VOCAB_JSON, SMALL_JSON.replace(b": 0,", b": 2147483648,")),
        (VOCAB_JSON, SMALL_JSON.replace(b": 0,", b": 264,")),  # low's
        (VOCAB_JSON, SMALL_JSON.replace(b'"low"', b'"lov"')),
        (VOCAB_JSON, SMALL_JSON.replace(b'"A": ', b'"AA": ')),
        (VOCAB_JSON, b"version https://git-lfs.github.com/spec/v1\n"),
        (VOCAB_JSON, b"[" * 100_000),
        (MERGES_TXT, b"\xff\xfe\x00"),
        (MERGES_TXT, "#version: 0.2\nh e\nĠ t\n".encode()),  # another order than the ids
        (MERGES_TXT, b"#version: 0.2\nq x\n"),
        (MERGES_TXT, "Ġ t\nh e\nĠ the\n".encode()),  # a part that is no token yet
        (MERGES_TXT, "Ġ t\nhe\n".encode()),
        (MERGES_TXT, "Ġ t x\n".encode()),
        (MERGES_TXT, "Ġ t\n\nh e\n".encode()),
        (MERGES_TXT, b"<!DOCTYPE html>\n<html></html>\n"),
        ("added_tokens.json", b"["),
        ("added_tokens.json", b"17"),
        ("added_tokens.json", b'{"<|user|>": "x"}'),
        ("added_tokens.json", b'{"<|user|>": 5}'),  # a byte's
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, file: str, content: bytes) -> None:
    write_vocabulary(tmp_path, *small_vocabulary())
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"vocab\.json and merges\.txt|" + re.escape(file)):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("kept", [7, 5, 0])
def test_merges_cut_short_at_a_line_are_refused(kept: int, tmp_path: Path) -> None:
    """No line is odd, and Hugging Face reads them; only tokens that nothing makes tell."""
    vocab, merges = small_vocabulary()
    write_vocabulary(tmp_path, vocab, merges[:kept])
    with pytest.raises(CheckpointError, match=r"no merge makes the token '.*': the merges are cut"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_token_longer_than_any_text_makes_is_refused(tmp_path: Path) -> None:
    vocab, merges = small_vocabulary()
    write_vocabulary(tmp_path, vocab | {"x" * 20_000: 999}, merges)
    with pytest.raises(CheckpointError, match=r"vocab\.json .*: x+ cannot be a token$") as caught:
        Tokenizer.from_pretrained(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"17",
        b"{}",
        b'{"model": null}',
        b'{"model": {"vocab": [], "merges": []}}',
        b'{"model": {"vocab": {"a": 0}, "merges": []}}',
        b'{"model": {"vocab": {"a": 0}, "merges": [1, 2]}}',
        b'{"model": {"vocab": {"a": 0}, "merges": [[1, 2]]}}',
        b'{"model": {"vocab": {"a": 0}, "merges": [{"a": 1, "b": 2}]}}',
        b'{"model": {"vocab": {"a": 0}, "merges": 5}}',
        b'{"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": [5]}',
        b'{"model": {"type": "WordPiece", "vocab": {"[UNK]": 0, "##ing": 1}}}',
        b"[" * 100_000,
    ],
)
def test_damaged_tokenizer_json_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)
