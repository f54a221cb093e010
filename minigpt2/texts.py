"""Texts under way: what prefill and decode, beam search and speculative decoding have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minigpt2.cache import KVCache
from minigpt2.model import GPT2, positions
from minigpt2.options import GenerationOptions
from minigpt2.sampling import Processor, processors

# How many generations go on with a model, and the mode it was in before them.
_EVALUATING: WeakKeyDictionary[GPT2, tuple[int, bool]] = WeakKeyDictionary()
_LOCK = threading.Lock()


@contextlib.contextmanager
def evaluating(*models: GPT2) -> Iterator[None]:
    """The models in evaluation mode; afterwards, when no thread needs that any more, each is in its
    former one again."""
    with _LOCK:
        for model in models:
            users, was_training = _EVALUATING.get(model, (0, model.training))
            _EVALUATING[model] = users + 1, was_training
            model.eval()
    try:
        yield
    finally:
        with _LOCK:
            for model in models:
                users, was_training = _EVALUATING.pop(model)
                if users > 1:
                    _EVALUATING[model] = users - 1, was_training
                else:
                    model.train(was_training)


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be continued, and how."""

    model: GPT2
    token_ids: Tensor  # (B, T)
    options: GenerationOptions
    # (B, T), 0 where left padding stands. By default there is none, unless pad_token_id is given,
    # is not an end of text, and occurs in token_ids (Hugging Face's rule).
    attention_mask: Tensor | None = None
    generator: torch.Generator | None = None  # the source of chance; None: PyTorch's global one
    # The caller's own rules, applied after the penalties and before temperature.
    processors: Sequence[Processor] = ()
    assistant_model: GPT2 | None = None  # a smaller one with the same vocabulary guesses ahead
    # False where nobody reads Step.logits: they may then be -inf for any token, and cost less.
    all_logits: bool = True


@dataclasses.dataclass
class Step:
    """One token for every row of the batch."""

    token_ids: Tensor  # (B,); pad_token_id in rows that had finished before
    logits: Tensor  # (B, V) float32, as the model gave them
    finished: Tensor  # (B,) booleans: this token, or an earlier one, ended the text
    last: bool  # no step follows, whether the rows have finished or not


class Texts:
    """The texts under way, row by row: ids, left padding and cache, which move together.

    ids: (B, S) prompt and output so far. T: the prompt's length, padding included. steps: how many
    tokens may follow. eos: the ids that end a text. pads: (B,) left-padding counts, None without.
    """

    def __init__(self, request: Request) -> None:
        model, options = request.model, request.options
        self.steps = _count_steps(model, request.token_ids, options)
        self.eos = _end_ids(model, options)
        _check_vocabulary(model.config.vocab_size, options)
        self.ids = request.token_ids
        B, self.T = self.ids.shape
        self.pads = _left_padding(request, self.eos)
        self._request = request
        self._cache = model.new_cache(B, min(self.T + self.steps, model.config.n_positions))

    def rules(self, min_tokens_to_keep: int = 1) -> list[Processor]:
        """What the options and the caller do to the scores of these rows; see sampling."""
        options, own = self._request.options, self._request.processors
        return processors(options, self.T, self.pads, self.eos, own, min_tokens_to_keep)

    def next_logits(self, top: int = 0) -> Tensor:
        """Feed what the cache has not seen; the (B, V) float32 logits of the token that follows.
        top: as in GPT2.forward."""
        return self.logits_after(self.ids[:, :0], top)[:, -1]

    def logits_after(self, guesses: Tensor, top: int = 0) -> Tensor:
        """The logits of what follows the text, and the text and one, two, ... of (B, n) guesses:
        (B, 1 + n, V). Those of the guesses that are not appended have to be trimmed."""
        model, past = self._request.model, self._cache.length
        ids = torch.cat([self.ids, guesses], dim=1)
        S, window = ids.shape[1], model.config.n_positions
        mask = None  # (B, S)
        if self.pads is not None:
            mask = torch.arange(S, device=ids.device) >= self.pads[:, None]
        cache: KVCache | None = self._cache
        if S > window:
            # Positions are learned and baked into the cached keys: with the oldest dropped, the
            # rest would lie at the wrong ones. So the window is read anew.
            ids, past, cache = ids[:, -window:], 0, None
            mask = None if mask is None else mask[:, -window:]
        position_ids = None if mask is None else positions(mask)[:, past:]
        keep = 1 + guesses.shape[1]
        logits: Tensor = model(ids[:, past:], mask, position_ids, cache, keep, top)
        return logits.float()

    def append(self, token_ids: Tensor) -> None:
        """One more token, (B,), to every text."""
        self.ids = torch.cat([self.ids, token_ids[:, None]], dim=1)

    def trim(self) -> None:
        """Forget what is cached beyond the text, whose last token is yet to be fed."""
        self._cache.crop(self.ids.shape[1] - 1)

    def select(self, rows: Tensor) -> None:
        """Row i goes on from what row rows[i] was."""
        self.ids = self.ids[rows]
        self._cache.select(rows)
        self.pads = None if self.pads is None else self.pads[rows]


def _count_steps(model: GPT2, token_ids: Tensor, options: GenerationOptions) -> int:
    """How many tokens can be made: the last is not fed back, so the window may be passed by one."""
    if token_ids.dim() != 2 or token_ids.numel() == 0:
        raise ValueError(f"token_ids must be (B, T), not empty, got {tuple(token_ids.shape)}")
    T, window = token_ids.shape[1], model.config.n_positions
    if options.context_overflow == "slide":
        return options.max_new_tokens
    if T > window:
        raise ValueError(
            f"the prompt's {T} tokens exceed n_positions {window}: "
            "shorten it, or let the window slide (context_overflow)"
        )
    if options.context_overflow == "error" and T + options.max_new_tokens > window + 1:
        total = f"{T} prompt tokens + {options.max_new_tokens} new ones"
        raise ValueError(f"{total} exceed n_positions {window} by more than one: ask for fewer")
    return min(options.max_new_tokens, window + 1 - T)


def _check_vocabulary(vocab_size: int, options: GenerationOptions) -> None:
    named = {"pad_token_id": [options.pad_token_id or 0]}
    named |= {f"bad_words_ids {list(word)}": list(word) for word in options.bad_words_ids}
    for name, token_ids in named.items():
        if max(token_ids) >= vocab_size:
            last = vocab_size - 1
            raise ValueError(f"{name}: {max(token_ids)} is outside the vocabulary 0..{last}")


def _end_ids(model: GPT2, options: GenerationOptions) -> list[int]:
    """The ids that end a text; one that is no token of the model's can never come up."""
    ids = options.eos_token_id if options.eos_token_id is not None else model.config.eos_token_ids
    listed = list(ids) if isinstance(ids, Sequence) else [ids]
    return [token_id for token_id in listed if 0 <= token_id < model.config.vocab_size]


def _left_padding(request: Request, eos: Sequence[int]) -> Tensor | None:
    """(B,): how many tokens of padding each row begins with; None where nothing is padded."""
    token_ids, mask, pad = request.token_ids, request.attention_mask, request.options.pad_token_id
    if mask is None and pad is not None and pad not in eos:
        mask = token_ids != pad
    if mask is None:
        return None
    if mask.shape != token_ids.shape:
        have, need = tuple(mask.shape), tuple(token_ids.shape)
        raise ValueError(f"attention_mask is {have}, token_ids are {need}: they must be the same")
    if mask.all():
        return None
    mask = (mask != 0).long()
    if not mask[:, -1].all() or (mask.diff(dim=1) < 0).any():
        raise ValueError(
            "attention_mask must be 0s, then 1s, in every row: pad prompts on the left"
        )
    return (mask == 0).sum(dim=1)
