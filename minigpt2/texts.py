"""Texts under way: what prefill and decode, beam search and speculative decoding have in common."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt2.cache import KVCache
from minigpt2.model import GPT2, positions
from minigpt2.options import GenerationOptions


@contextlib.contextmanager
def evaluating(*models: GPT2) -> Iterator[None]:
    """The models in evaluation mode; afterwards each is in its former one again."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, was_training in zip(models, modes, strict=True):
            model.train(was_training)


@dataclasses.dataclass
class Step:
    """One token for every row of the batch."""

    token_ids: Tensor  # (B,); pad_token_id in rows that had finished before
    logits: Tensor  # (B, V) float32, as the model gave them
    finished: Tensor  # (B,) booleans: this token, or an earlier one, ended the text
    last: bool  # no step follows, whether the rows have finished or not


class Texts:
    """The texts under way, row by row: ids, padding mask and cache, which grow and move together.

    ids: (B, S) prompt and output so far. T: the prompt's length, padding included. steps: how many
    tokens may follow. eos: the ids that end a text. pads: (B,) left-padding counts, None without.
    """

    def __init__(
        self,
        model: GPT2,
        token_ids: Tensor,
        options: GenerationOptions,
        attention_mask: Tensor | None = None,
    ) -> None:
        self.steps = _count_steps(model, token_ids, options)
        self.eos = _end_ids(model, options)
        _check_vocabulary(model.config.vocab_size, options)
        self.ids = token_ids
        self.T = token_ids.shape[1]
        self._model = model
        self._mask = _left_padding(token_ids, attention_mask, options, self.eos)  # (B, S)
        self.pads = None if self._mask is None else (self._mask == 0).sum(dim=1)
        room = min(self.T + self.steps, model.config.n_positions)
        weight = model.wte.weight
        self._cache = KVCache(model.config, len(token_ids), room, weight.dtype, weight.device)

    def next_logits(self, top: int = 0) -> Tensor:
        """Feed what the cache has not seen; the (B, V) float32 logits of the token that follows.
        top: as in GPT2.forward."""
        return self.logits_after(self.ids[:, :0], top)[:, -1]

    def logits_after(self, guesses: Tensor, top: int = 0) -> Tensor:
        """The logits of what follows the text, and the text and one, two, ... of (B, n) guesses:
        (B, 1 + n, V). Those of the guesses that are not appended have to be trimmed."""
        window = self._model.config.n_positions
        ids, mask, past = torch.cat([self.ids, guesses], dim=1), self._mask, self._cache.length
        cache: KVCache | None = self._cache
        if ids.shape[1] > window:
            # Positions are learned and baked into the cached keys: with the oldest dropped, the
            # rest would lie at the wrong ones. So the window is read anew.
            ids, past, cache = ids[:, -window:], 0, None
            mask = None if mask is None else mask[:, -window:]
        position_ids = None if mask is None else positions(mask)[:, past:]
        keep = 1 + guesses.shape[1]
        logits: Tensor = self._model(ids[:, past:], mask, position_ids, cache, keep, top)
        return logits.float()

    def append(self, token_ids: Tensor) -> None:
        """One more token, (B,), to every text."""
        self.ids = torch.cat([self.ids, token_ids[:, None]], dim=1)
        if self._mask is not None:
            self._mask = F.pad(self._mask, (0, 1), value=1)

    def trim(self) -> None:
        """Forget what is cached beyond the text, whose last token is yet to be fed."""
        self._cache.crop(self.ids.shape[1] - 1)

    def select(self, rows: Tensor) -> None:
        """Row i goes on from what row rows[i] was."""
        self.ids = self.ids[rows]
        self._cache.select(rows)
        if self._mask is not None and self.pads is not None:
            self._mask, self.pads = self._mask[rows], self.pads[rows]


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
    listed = [ids] if isinstance(ids, int) else list(ids)
    return [token_id for token_id in listed if token_id < model.config.vocab_size]


def _left_padding(
    token_ids: Tensor, attention_mask: Tensor | None, options: GenerationOptions, eos: Sequence[int]
) -> Tensor | None:
    """The (B, T) mask in force, None where nothing is padded."""
    pad = options.pad_token_id
    if attention_mask is None and pad is not None and pad not in eos:
        attention_mask = (token_ids != pad).long()
    if attention_mask is None:
        return None
    if attention_mask.shape != token_ids.shape:
        have, need = tuple(attention_mask.shape), tuple(token_ids.shape)
        raise ValueError(f"attention_mask is {have}, token_ids are {need}: they must be the same")
    if attention_mask.all():
        return None
    mask = (attention_mask != 0).long()
    if not mask[:, -1].all() or (mask.diff(dim=1) < 0).any():
        raise ValueError(
            "attention_mask must be 0s, then 1s, in every row: pad prompts on the left"
        )
    return mask
