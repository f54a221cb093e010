"""The loop: one pass over the prompt (prefill), then one pass per token (decode)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt2.cache import KVCache
from minigpt2.model import GPT2, positions
from minigpt2.options import GenerationOptions
from minigpt2.sampling import Processor, pick, processors


@dataclasses.dataclass
class Step:
    """One token for every row of the batch."""

    token_ids: Tensor  # (B,); pad_token_id in rows that had finished before
    logits: Tensor  # (B, V) float32, as the model gave them
    finished: Tensor  # (B,) booleans: this token, or an earlier one, ended the text
    last: bool  # no step follows, whether the rows have finished or not


def generate(
    model: GPT2,
    token_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    processors: Sequence[Processor] = (),
    **options: Any,
) -> Tensor:
    """Continue (B, T) ids: (B * num_return_sequences, T + new), as Hugging Face's generate does.

    Args:
        options: the fields of GenerationOptions.
        attention_mask, generator, processors: as in `decode`.

    Raises:
        ValueError, TypeError: as in GenerationOptions and `decode`; an option that does not exist.
    """
    chosen = GenerationOptions(**options)
    steps = decode(model, token_ids, chosen, attention_mask, generator, processors)
    rows = token_ids.repeat_interleave(chosen.num_return_sequences, dim=0)
    return torch.cat([rows, *(step.token_ids[:, None] for step in steps)], dim=1)


@torch.inference_mode()
def decode(
    model: GPT2,
    token_ids: Tensor,
    options: GenerationOptions,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    user_processors: Sequence[Processor] = (),
) -> Iterator[Step]:
    """Continue (B, T) ids token by token, until every row has ended or max_new_tokens are made.

    A text may grow to n_positions + 1 tokens, since the last one is never fed back;
    context_overflow says what happens then. Between the first step and the last the model is in
    evaluation mode, afterwards in its former one.

    Args:
        attention_mask: (B, T), 0 where left padding stands. By default there is none, unless
            pad_token_id is given, is not an end of text, and occurs in token_ids: Hugging Face's
            rule.
        generator: the source of chance; by default PyTorch's global one.
        user_processors: the caller's own rules, applied after the penalties and before temperature.

    Raises:
        ValueError: no tokens, an id outside the vocabulary, a prompt longer than n_positions, or a
            mask that is not left padding.
    """
    steps = _count_steps(model, token_ids, options)
    eos = _end_ids(model, options)
    mask = _left_padding(token_ids, attention_mask, options, eos)  # (B, T) or None
    B, T = token_ids.shape
    n = options.num_return_sequences
    pads = None if mask is None else (mask == 0).sum(dim=1).repeat_interleave(n)
    rules = processors(options, T, pads, eos, user_processors)
    pad = options.pad_token_id if options.pad_token_id is not None else eos[0] if eos else 0
    ids = F.pad(token_ids, (0, steps), value=pad)  # (B, T + steps)
    mask = None if mask is None else F.pad(mask, (0, steps), value=1)
    weight = model.wte.weight
    room = min(T + steps, model.config.n_positions)
    cache = KVCache(model.config, B, room, weight.dtype, weight.device)
    finished = torch.zeros(B * n, dtype=torch.bool, device=ids.device)
    was_training = model.training
    model.eval()
    try:
        for S in range(T, T + steps):
            logits = _next_logits(model, ids[:, :S], None if mask is None else mask[:, :S], cache)
            if S == T and n > 1:  # the prompts were read once; from here on each has n rows
                rows = torch.arange(B, device=ids.device).repeat_interleave(n)
                ids, logits, mask = ids[rows], logits[rows], None if mask is None else mask[rows]
                cache.select(rows)
            scores = logits
            for rule in rules:
                scores = rule(ids[:, :S], scores)
            ids[:, S] = pick(scores, options.samples, generator).masked_fill(finished, pad)
            finished = finished | torch.isin(ids[:, S], ids.new_tensor(eos))
            last = S + 1 == T + steps or bool(finished.all())
            yield Step(ids[:, S], logits, finished, last)
            if last:
                return
    finally:
        model.train(was_training)


def _next_logits(model: GPT2, ids: Tensor, mask: Tensor | None, cache: KVCache) -> Tensor:
    """Feed what the cache has not seen of (B, S) ids; the (B, V) float32 logits of what follows
    them."""
    window = model.config.n_positions
    if ids.shape[1] > window:
        # Positions are learned and baked into cached keys, so that dropping the oldest ones would
        # leave the rest at the wrong place: the window is read anew.
        ids, past, into = ids[:, -window:], 0, None
        mask = None if mask is None else mask[:, -window:]
    else:
        past, into = cache.length, cache
    position_ids = None if mask is None else positions(mask)[:, past:]
    logits: Tensor = model(ids[:, past:], mask, position_ids, into, logits_to_keep=1)
    return logits[:, -1].float()


def _count_steps(model: GPT2, token_ids: Tensor, options: GenerationOptions) -> int:
    """How many tokens can be made. The last one is not fed back, so a text may hold n_positions +
    1."""
    if token_ids.dim() != 2 or token_ids.numel() == 0:
        raise ValueError(
            f"token_ids must be (B, T) with at least one token, got {tuple(token_ids.shape)}"
        )
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
    if attention_mask is None or attention_mask.all():
        return None
    if attention_mask.shape != token_ids.shape:
        have, need = tuple(attention_mask.shape), tuple(token_ids.shape)
        raise ValueError(f"attention_mask is {have}, token_ids are {need}: they must be the same")
    mask = (attention_mask != 0).long()
    if not mask[:, -1].all() or (mask.diff(dim=1) < 0).any():
        raise ValueError(
            "attention_mask must be 0s, then 1s, in every row: pad prompts on the left"
        )
    return mask
