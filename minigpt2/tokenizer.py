"""GPT-2's byte-level BPE: tiktoken over the vocabulary that ships in the package, so nothing is
downloaded."""

from __future__ import annotations

import codecs
import functools
import hashlib
import itertools
import operator
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

from minigpt2.hub import OFFICIAL, CheckpointError, find, read_json, read_text

END_OF_TEXT = "<|endoftext|>"
VOCAB_BPE = Path(__file__).parent / "data" / "vocab.bpe"
# tiktoken pins the same.
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

# The pattern's \s, spelled out because Python's \s is a larger set. tiktoken's regex gives up
# inside a run of a million, so long runs are cut before it sees them.
LONG_WHITESPACE = re.compile(
    "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{100000,}"
)


class Tokenizer:
    """Text to ids and back, without loss: every byte has a token of its own.

    n_vocab: one more than the highest id. end_of_text_id: the id of <|endoftext|>, or None where
    the vocabulary has none. special_tokens: text and id of every token that is no merge of bytes.
    """

    def __init__(self, ranks: dict[bytes, int], special_tokens: dict[str, int]) -> None:
        """ranks: every ordinary token's bytes and id, where a lower id merges first."""
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special_tokens
        )
        self.special_tokens = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._bytes = {token_id: token for token, token_id in ranks.items()}
        self._bytes |= {token_id: token.encode() for token, token_id in special_tokens.items()}
        self.n_vocab = max(self._bytes) + 1
        self.end_of_text_id = special_tokens.get(END_OF_TEXT)

    @property
    def ids(self) -> list[int]:
        """All ids in ascending order, which may have gaps."""
        return sorted(self._bytes)

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | Path = "gpt2",
        revision: str | None = None,
        local_files_only: bool = False,
    ) -> Tokenizer:
        """The tokenizer of a checkpoint.

        A folder's own vocab.json and merges.txt (or tokenizer.json) are used where it has them.
        Everything else speaks GPT-2's vocabulary, which is in the package: for gpt2 and its
        siblings nothing is downloaded.

        Args:
            name_or_folder, revision, local_files_only: as in hub.find.

        Raises:
            CheckpointError: the checkpoint cannot be found, or its vocabulary files are damaged,
                are not a byte-level BPE like GPT-2's, or one of the pair is missing.
        """
        if str(name_or_folder) in (*OFFICIAL, "tales"):
            return _gpt2()
        folder = find(name_or_folder, revision, local_files_only)
        pair = (folder / "vocab.json", folder / "merges.txt")
        missing = [path for path in pair if not path.is_file()]
        if not missing:
            return cls(*_read_vocab(*pair))
        if (folder / "tokenizer.json").is_file():
            return cls(*_read_tokenizer_json(folder / "tokenizer.json"))
        if len(missing) == 1:
            raise CheckpointError(f"{missing[0]} is missing, without which the other says nothing")
        return _gpt2()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Text to ids. <|endoftext|> in the text is the special token, or plain characters with
        special=False.

        Surrogates, which no UTF-8 text holds, are paired up where they can be and replaced by
        U+FFFD elsewhere.
        """
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # Special tokens are cut out first; every second part is one.
        parts = self._special_pattern.split(text) if special and self.special_tokens else [text]
        ids: list[int] = []
        for n, part in enumerate(parts):
            ids += [self.special_tokens[part]] if n % 2 else self._encode_ordinary(part)
        return ids

    def _encode_ordinary(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for run in LONG_WHITESPACE.finditer(text):
            if run.end() == len(text):
                break
            end = run.end() - 1  # the last character may belong to the word behind it
            ids += self._encoding.encode_ordinary(text[start : run.start()])
            ids += self._encoding._encode_single_piece(text[run.start() : end])
            start = end
        return ids + self._encoding.encode_ordinary(text[start:])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which need not be a whole character.

        Raises:
            ValueError: no such id.
        """
        try:
            return self._bytes[operator.index(token_id)]
        except KeyError:
            raise ValueError(
                f"token id {token_id} is not in the vocabulary 0..{self.n_vocab - 1}"
            ) from None

    def unused_ids(self, vocab_size: int) -> list[int]:
        """The ids below vocab_size that stand for nothing."""
        if len(self._bytes) == self.n_vocab == vocab_size:
            return []
        return [token_id for token_id in range(vocab_size) if token_id not in self._bytes]

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text; bytes that are not UTF-8 become U+FFFD. decode(encode(text)) == text.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def piece(self, token_id: int) -> str:
        """One token for display: control characters and bytes that are not a whole character as
        escapes."""
        text = self.token_bytes(token_id).decode("utf-8", errors="backslashreplace")
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class StreamDecoder:
    """Ids to text one at a time, holding back no more than the bytes of an unfinished character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes; "" inside a character."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What was held back, as U+FFFD, when nothing follows any more."""
        return self._decoder.decode(b"", final=True)


def byte_characters() -> dict[int, str]:
    """The character that stands for each byte in vocabulary files: itself where it prints,
    U+0100... where not.

    The order is that of the bytes' ids (OpenAI's bytes_to_unicode).
    """
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + n) for n, byte in enumerate(others)
    }


@functools.cache
def _gpt2() -> Tokenizer:
    content = VOCAB_BPE.read_bytes()
    if hashlib.sha256(content).hexdigest() != VOCAB_BPE_SHA256:
        raise ValueError(f"{VOCAB_BPE} is damaged: install minigpt2 again")
    # A version line, then "first second" by priority.
    merges = content.decode("utf-8").split("\n")[1:-1]
    tokens = [*byte_characters().values(), *(merge.replace(" ", "") for merge in merges)]
    return Tokenizer(_to_bytes(tokens, range(len(tokens))), {END_OF_TEXT: len(tokens)})


def _to_bytes(tokens: Sequence[str], ids: Iterable[int]) -> dict[bytes, int]:
    byte_of = {ord(character): byte for byte, character in byte_characters().items()}
    return {
        token.translate(byte_of).encode("latin-1"): token_id
        for token, token_id in zip(tokens, ids, strict=True)
    }


def _read_vocab(vocab_json: Path, merges_txt: Path) -> tuple[dict[bytes, int], dict[str, int]]:
    lines = read_text(merges_txt).rstrip("\r\n").splitlines()
    merges = [line for line in lines if not line.startswith("#version")]
    vocab = read_json(vocab_json)
    added_file = vocab_json.with_name("added_tokens.json")
    added = read_json(added_file) if added_file.is_file() else {}
    return _ranks_and_specials(vocab | added, merges, added, f"{vocab_json} and {merges_txt.name}")


def _read_tokenizer_json(path: Path) -> tuple[dict[bytes, int], dict[str, int]]:
    content = read_json(path)
    try:
        if others := _other_rules(content):
            raise CheckpointError(
                f"{path}: {', '.join(others)}: not implemented, only GPT-2's byte-level BPE"
            )
        model = content["model"]
        merges = [_merge(merge) for merge in model["merges"]]
        added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
        vocab = model["vocab"] | added
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a BPE tokenizer: {error!r}") from None
    return _ranks_and_specials(vocab, merges, added, str(path))


def _merge(written: str | list[str]) -> str:
    """A merge as merges.txt has it; tokenizer.json has that, or lists of two."""
    if isinstance(written, str):
        return written
    if not isinstance(written, list) or [type(part) for part in written] != [str, str]:
        raise TypeError(f"{written!r} is no merge")
    return " ".join(written)


def _other_rules(content: dict[str, Any]) -> list[str]:
    """What a tokenizer.json asks for that would give other ids."""
    before, after = content.get("pre_tokenizer") or {}, content.get("post_processor")
    model = content["model"]
    as_gpt2 = {
        "normalizer": content.get("normalizer") is None,
        "pre_tokenizer": before.get("type") == "ByteLevel"
        and before.get("add_prefix_space") is False
        and before.get("use_regex", True) is True,
        "post_processor": after is None
        or after["type"] == "ByteLevel"
        or [list(piece) for piece in after["single"]] == [["Sequence"]],
        "model type": model.get("type", "BPE") == "BPE",
    }
    for name in (
        "dropout",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "ignore_merges",
    ):
        as_gpt2[name] = not model.get(name)
    for name in ("single_word", "lstrip", "rstrip"):
        as_gpt2[name] = not any(token.get(name) for token in content.get("added_tokens", []))
    return [name for name, harmless in as_gpt2.items() if not harmless]


def _ranks_and_specials(
    vocab: dict[str, int], merges: Sequence[str], added: Collection[str], files: str
) -> tuple[dict[bytes, int], dict[str, int]]:
    """Split a vocabulary file into byte-level tokens and special ones, and see that ids follow the
    merges' order, since tiktoken takes the id for the priority. added: tokens said to be special.
    """
    ids = vocab.values()
    if others := [token for token in vocab if not isinstance(token, str) or len(token) > 10_000]:
        raise CheckpointError(f"{files}: {str(others[0])[:99]} cannot be a token")
    if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
        raise CheckpointError(f"{files}: token ids must be whole numbers from 0 to 2**31 - 1")
    if len(set(ids)) < len(ids):
        raise CheckpointError(f"{files}: two tokens have the same id")
    known = set(byte_characters().values())
    for merge in merges:
        first, _, second = merge.partition(" ")
        if first not in known or second not in known:
            raise CheckpointError(
                f"{files}: the merge {merge!r} does not join two earlier tokens: download it again"
            )
        known.add(first + second)
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*byte_characters().values(), *merged]
    missing = [token for token in tokens if token not in vocab]
    if missing:
        raise CheckpointError(
            f"{files}: {len(missing)} tokens have no id, {missing[0]!r} first: not a byte-level BPE"
        )
    merged_ids = [vocab[token] for token in merged]
    if any(later <= earlier for earlier, later in itertools.pairwise(merged_ids)):
        raise CheckpointError(
            f"{files}: token ids do not follow the order of the merges: not a GPT-2 vocabulary"
        )
    special = {token: token_id for token, token_id in vocab.items() if token not in known}
    for token in special:
        halves = ((token[:n], token[n:]) for n in range(1, len(token)))
        if token not in added and any(a in vocab and b in vocab for a, b in halves):
            raise CheckpointError(
                f"{files}: no merge makes the token {token!r}: the merges are cut short, download "
                "them again"
            )
        if not token or token != token.encode("utf-8", "replace").decode():
            raise CheckpointError(f"{files}: {token!r} cannot be a token: no text holds it")
    return _to_bytes(tokens, [vocab[token] for token in tokens]), special
