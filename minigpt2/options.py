"""GenerationOptions: everything a caller may say about how the next tokens are picked, checked in
one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from numbers import Integral, Real

KINDS = ("exact", "float32", "bfloat16", "float16", "int8", "int4")  # of packed model; see packed


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """The options of generate, under Hugging Face's names.

    Two defaults are not Hugging Face's: top_k is off (theirs is a silent 50 whenever do_sample is
    set), and num_return_sequences above one is allowed with greedy decoding, where all are equal.

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: int = 20
    min_new_tokens: int = 0  # no end of text before so many
    do_sample: bool = False  # False: always the highest score
    temperature: float = 1.0  # divides the scores; 0 means do_sample=False
    top_k: int = 0  # keep the k highest scores (and ties with the last of them); 0: all
    top_p: float = 1.0  # keep the smallest set of tokens whose probabilities reach p
    min_p: float = 0.0  # drop tokens less probable than min_p times the most probable
    repetition_penalty: float = 1.0  # above 1: tokens already seen become less likely
    no_repeat_ngram_size: int = 0  # no n-gram twice
    bad_words_ids: Sequence[Sequence[int]] = ()  # sequences that may not come up
    num_return_sequences: int = 1  # texts per prompt; with beams, the best so many
    num_beams: int = 1  # above 1: beam search
    length_penalty: float = 1.0  # of beams: above 0 favours long texts, below 0 short ones
    early_stopping: bool | str = False  # of beams: True, False (a heuristic) or "never"
    # Guess so many tokens from the text itself, and verify them at once; 0: none; None: 10 where a
    # packed model decodes one text greedily, else none.
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int = 2  # of prompt lookup: how many last tokens to look for
    num_assistant_tokens: int = 5  # how many tokens an assistant model guesses at once
    eos_token_id: int | Sequence[int] | None = None  # None: the model's; (): none
    pad_token_id: int | None = None  # fills rows that finished early; None: the first eos_token_id
    # Past n_positions: stop; slide (the last n_positions tokens, recomputed); error.
    context_overflow: str = "stop"

    def __post_init__(self) -> None:
        for name, (low, high) in COUNTS.items():
            value = getattr(self, name)
            if value is None and name == "prompt_lookup_num_tokens":
                continue
            if not _is_whole(value, low, high):
                raise ValueError(
                    f"{name} must be a whole number from {low} to {high}, got {value!r}"
                )
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, Real) or not least <= float(value) <= most:
                raise ValueError(f"{name} must be a number from {least} to {most}, got {value!r}")
        if not isinstance(self.do_sample, bool):
            raise ValueError(f"do_sample must be True or False, got {self.do_sample!r}")
        early, overflow = self.early_stopping, self.context_overflow
        if not isinstance(early, bool) and early != "never":
            raise ValueError(f'early_stopping must be True, False or "never", got {early!r}')
        if overflow not in ("stop", "slide", "error"):
            raise ValueError(f"context_overflow must be stop, slide or error, got {overflow!r}")
        words, eos, pad = self.bad_words_ids, self.eos_token_id, self.pad_token_id
        listed = isinstance(words, list | tuple)
        if not listed or not all(word and _are_ids(word) for word in words):
            raise ValueError(f"bad_words_ids must be non-empty lists of token ids, got {words!r}")
        if eos is not None and not _is_id(eos) and not _are_ids(eos):
            raise ValueError(f"eos_token_id must be a token id or a list of them, got {eos!r}")
        if pad is not None and not _is_id(pad):
            raise ValueError(f"pad_token_id must be a token id, got {pad!r}")
        if 1 < self.num_beams < self.num_return_sequences:
            texts = f"num_return_sequences {self.num_return_sequences}"
            raise ValueError(f"{texts} exceeds num_beams {self.num_beams}")

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn; at temperature 0 the highest score is always taken."""
        return self.do_sample and self.temperature > 0


# Of the options that count something, and of those that are measured: what they may be.
COUNTS = {
    "max_new_tokens": (0, 2**31 - 1),
    "min_new_tokens": (0, 2**31 - 1),
    "top_k": (0, 2**31 - 1),
    "no_repeat_ngram_size": (0, 2**31 - 1),
    "num_return_sequences": (1, 10_000),
    "num_beams": (1, 10_000),
    "prompt_lookup_num_tokens": (0, 2**31 - 1),
    "max_matching_ngram_size": (1, 2**31 - 1),
    "num_assistant_tokens": (1, 2**31 - 1),
}
RANGES = {
    "temperature": (0, 1e30),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-4, 1e4),
    "length_penalty": (-50, 50),
}


def _is_whole(value: object, low: int, high: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, Integral):  # which numpy's numbers are too
        return False
    return low <= int(value) <= high


def _is_id(value: object) -> bool:
    return _is_whole(value, 0, 2**31 - 1)


def _are_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_id, value))
