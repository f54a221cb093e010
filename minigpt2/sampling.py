"""From scores to a token: small functions on (B, V) float32 scores, in Hugging Face's order.

The order: repetition penalty, no repeated n-grams, bad words, minimum length, the caller's own;
then, when sampling, temperature, top-k, top-p, min-p. Forbidden tokens get -inf. No function
changes its argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minigpt2.options import GenerationOptions

NOT_NUMBERS = "the model's scores are not numbers: try it in float32"
FORBIDDEN = "every token is forbidden: allow some of bad_words_ids or a larger no_repeat_ngram_size"

# ids (B, S) of prompt and output so far, scores (B, V) -> scores
Processor = Callable[[Tensor, Tensor], Tensor]


def repetition_penalty(
    scores: Tensor, ids: Tensor, penalty: float, pads: Tensor | None = None
) -> Tensor:
    """Make every token of `ids` (B, S) less likely, once however often it occurs (Keskar et al.
    2019, 4.1).

    A positive score is divided, a negative one multiplied: dividing a negative score would raise
    it. pads: (B,) counts of left-padding tokens, which do not count as seen.
    """
    V = scores.shape[-1]
    if pads is not None:
        padding = torch.arange(ids.shape[-1], device=ids.device) < pads[:, None]  # (B, S)
        ids = ids.masked_fill(padding, V)  # a column that is cut off again below
    seen = torch.zeros(scores.shape[0], V + 1, dtype=torch.bool, device=ids.device).scatter(
        1, ids, True
    )[:, :V]
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def no_repeat_ngram(scores: Tensor, ids: Tensor, n: int) -> Tensor:
    """Forbid every token that would complete an n-gram that `ids` (B, S) already holds, padding
    included."""
    scores = scores.clone()
    for row, tokens in enumerate(ids.tolist()):
        ending = tokens[len(tokens) - n + 1 :]
        starts = range(len(tokens) - n + 1)
        banned = [
            tokens[start + n - 1] for start in starts if tokens[start : start + n - 1] == ending
        ]
        scores[row, banned] = -math.inf
    return scores


def forbid_words(scores: Tensor, ids: Tensor, words: Sequence[Sequence[int]]) -> Tensor:
    """Forbid the last token of each word wherever `ids` (B, S) ends with the tokens before it."""
    scores = scores.clone()
    for *start, last in words:
        if len(start) <= ids.shape[-1]:
            ending = ids[:, ids.shape[-1] - len(start) :]
            matches = (ending == ids.new_tensor(start)).all(dim=-1)  # (B,); all of nothing is True
            scores[matches, last] = -math.inf
    return scores


def forbid(scores: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Forbid these tokens."""
    scores = scores.clone()
    scores[:, list(token_ids)] = -math.inf
    return scores


def temperature(scores: Tensor, t: float) -> Tensor:
    """Divide by t > 0: below 1 sharpens, above 1 flattens."""
    if t < 1e-30:  # would overflow; shifted so that the highest score is 0, the division cannot
        best = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
        return (scores - best) / 1e-30
    return scores / t


def top_k(scores: Tensor, k: int, min_tokens_to_keep: int = 1) -> Tensor:
    """Keep the k highest scores, and every tie with the k-th."""
    kth = scores.topk(min(max(k, min_tokens_to_keep), scores.shape[-1])).values[:, -1:]  # (B, 1)
    return scores.masked_fill(scores < kth, -math.inf)


def top_p(scores: Tensor, p: float, min_tokens_to_keep: int = 1) -> Tensor:
    """Keep the smallest set whose probabilities sum to at least p (Holtzman et al. 2019, 3.1).

    Summed from the improbable end, as Hugging Face does, for the same set at the boundary.
    """
    ascending, order = scores.sort(dim=-1)
    drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - p
    drop[:, -min_tokens_to_keep:] = False
    return scores.masked_fill(drop.scatter(1, order, drop), -math.inf)


def min_p(scores: Tensor, p: float, min_tokens_to_keep: int = 1) -> Tensor:
    """Drop every token less probable than p times the most probable one (Nguyen et al. 2024)."""
    probs = scores.softmax(dim=-1)
    drop = probs < p * probs.amax(dim=-1, keepdim=True)
    drop.scatter_(1, probs.topk(min(min_tokens_to_keep, probs.shape[-1])).indices, False)
    return scores.masked_fill(drop, -math.inf)


def processors(
    options: GenerationOptions,
    prompt_length: int,
    pads: Tensor | None,
    eos: Sequence[int],
    user: Sequence[Processor] = (),
    min_tokens_to_keep: int = 1,
) -> list[Processor]:
    """The rules that `options` switch on, in order. pads: (B,) left-padding counts; eos: the ids
    that end a text."""
    o, keep = options, min_tokens_to_keep
    words = [word for word in o.bad_words_ids if list(word) not in [[token_id] for token_id in eos]]
    shortest = prompt_length + o.min_new_tokens
    rules: list[tuple[bool, Processor]] = [
        (
            o.repetition_penalty != 1,
            lambda ids, s: repetition_penalty(s, ids, o.repetition_penalty, pads),
        ),
        (
            o.no_repeat_ngram_size > 0,
            lambda ids, s: no_repeat_ngram(s, ids, o.no_repeat_ngram_size),
        ),
        (len(words) > 0, lambda ids, s: forbid_words(s, ids, words)),
        (o.min_new_tokens > 0, lambda ids, s: forbid(s, eos) if ids.shape[-1] < shortest else s),
        *((True, processor) for processor in user),
        (o.samples and o.temperature != 1, lambda _, s: temperature(s, o.temperature)),
        (o.samples and o.top_k > 0, lambda _, s: top_k(s, o.top_k, keep)),
        (o.samples and o.top_p < 1, lambda _, s: top_p(s, o.top_p, keep)),
        (o.samples and o.min_p > 0, lambda _, s: min_p(s, o.min_p, keep)),
    ]
    return [rule for active, rule in rules if active]


def deciding(options: GenerationOptions, user: Sequence[Processor]) -> int:
    """How many of the best scores decide what `pick` gives; 0 where any score may."""
    o = options
    moved = o.repetition_penalty != 1 or o.no_repeat_ngram_size or o.bad_words_ids
    if user or moved or o.min_new_tokens:
        return 0
    return o.top_k if o.samples else 1


def apply(rules: Sequence[Processor], ids: Tensor, scores: Tensor) -> Tensor:
    """The scores after all rules."""
    for rule in rules:
        scores = rule(ids, scores)
    return scores


def pick(scores: Tensor, sample: bool, generator: torch.Generator | None = None) -> Tensor:
    """(B, V) scores -> (B,) ids: the first highest score, or a draw from their softmax.

    Raises:
        ValueError: the rules forbid every token of a row, or a score is not a number.
    """
    best = scores.amax(dim=-1)
    if not (best < math.inf).all():  # infinite or not a number
        raise ValueError(NOT_NUMBERS)
    if torch.isneginf(best).any():
        raise ValueError(FORBIDDEN)
    if not sample:
        return scores.argmax(dim=-1)
    # One draw for the whole batch, finished rows included: the order in which Hugging Face uses up
    # the generator.
    return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator).squeeze(1)
