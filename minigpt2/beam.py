"""Beam search: the K best continuations of every prompt, kept side by side.

The rules are those of Hugging Face's generate (transformers 5.24), length penalty and early
stopping included. Shapes: B prompts, K = num_beams, S tokens so far, V vocabulary, N candidates of
a step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt2.options import GenerationOptions
from minigpt2.sampling import FORBIDDEN, NOT_NUMBERS, apply
from minigpt2.texts import Request, Step, Texts, evaluating


@dataclasses.dataclass(frozen=True)
class Measure:
    """How texts are scored that may grow to `steps` tokens."""

    options: GenerationOptions
    steps: int

    @functools.cached_property
    def impossible(self) -> float:
        """Added to a score that must not win; finite, since -inf times 0 is not a number.

        Hugging Face's -1e9, times what the options may stretch a score by: with a length_penalty of
        -2 texts of a thousand tokens come below -1e9, and Hugging Face then returns none.
        """
        o = self.options
        longest = min(max(1, self.steps), 1_000_000)  # so that its 50th power is still a float
        grown: float = longest ** -float(o.length_penalty)
        cooled = 1 / min(1.0, float(o.temperature)) if o.samples else 1
        return max(-1e9 * max(1.0, grown, float(o.repetition_penalty)) * cooled, -1e37)

    def score(self, sums: Tensor, length: int) -> Tensor:
        """Sums of log-probabilities / length ** length_penalty; never less than impossible."""
        scores = sums / length ** float(self.options.length_penalty)
        least = self.impossible / 2
        return torch.where(sums < least, scores, scores.clamp(min=least))


@dataclasses.dataclass
class Finished:
    """The best finished texts of every prompt so far, best first."""

    ids: Tensor  # (B, K, T + steps), filled up behind
    scores: Tensor  # (B, K), by Measure
    ended: Tensor  # (B, K) booleans; False in places still free
    lengths: Tensor  # (B, K): generated tokens, the end of text included

    def best_of(self, other: Finished, k: int) -> Finished:
        """The k best of both."""
        pairs = zip(self._tensors(), other._tensors(), strict=True)
        both = Finished(*(torch.cat(pair, dim=1) for pair in pairs))
        return both.at(both.scores.topk(k).indices)

    def at(self, places: Tensor) -> Finished:
        """Those that (B, N) places name."""
        return Finished(*(take(tensor, places) for tensor in self._tensors()))

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """(B, M, ...) and (B, N) -> (B, N, ...): in every row, the entries that index names."""
    return tensor[torch.arange(len(index), device=index.device)[:, None], index]


@torch.inference_mode()
def beam_search(request: Request) -> tuple[Tensor, Tensor]:
    """The num_return_sequences best continuations of each of (B, T) prompts.

    Returns:
        (B * num_return_sequences, T + new) ids, shorter texts filled up behind, and their scores.

    Raises:
        ValueError: as in decoding.decode.
    """
    texts = Texts(request)
    with evaluating(request.model):
        finished = _search(texts, request.options, request.generator)
    # Where fewer texts were found than asked for, the last again; Hugging Face returns empty ones.
    found = finished.at((~finished.ended).byte().argsort(dim=1, stable=True))
    last = found.ended.sum(dim=1, keepdim=True).clamp(min=1) - 1  # (B, 1)
    n = request.options.num_return_sequences
    finished = found.at(torch.arange(n, device=last.device).minimum(last))
    longest = texts.T + int(finished.lengths.max())
    return finished.ids[:, :, :longest].flatten(0, 1), finished.scores.flatten()


@torch.inference_mode()
def beam_steps(request: Request) -> Iterator[Step]:
    """The texts that beam search found, token by token; with all_logits they are read once more."""
    found, _ = beam_search(request)
    texts = Texts(request)
    rows = torch.arange(len(request.token_ids), device=found.device)
    texts.select(rows.repeat_interleave(request.options.num_return_sequences))
    finished = torch.zeros(len(found), dtype=torch.bool, device=found.device)
    logits = torch.full((), -torch.inf, device=found.device)
    logits = logits.expand(len(found), request.model.config.vocab_size)
    with evaluating(request.model):
        for column in range(texts.T, found.shape[1]):
            if request.all_logits:
                logits = texts.next_logits()
                texts.append(found[:, column])
            finished = finished | torch.isin(found[:, column], found.new_tensor(texts.eos))
            yield Step(found[:, column], logits, finished, last=column + 1 == found.shape[1])


def _search(
    texts: Texts, options: GenerationOptions, generator: torch.Generator | None
) -> Finished:
    B, K = len(texts.ids), options.num_beams
    measure = Measure(options, texts.steps)
    finished = _nothing_finished(texts, measure)
    if texts.steps == 0:
        return finished
    logits = texts.next_logits().repeat_interleave(K, dim=0)  # (B * K, V): each prompt is read once
    texts.select(torch.arange(B, device=logits.device).repeat_interleave(K))
    rules = texts.rules(min_tokens_to_keep=len(texts.eos) + 1 if texts.eos else 2)
    running = torch.zeros(B, K, device=logits.device)  # sums of log-probabilities
    running[:, 1:] = measure.impossible  # beams start alike: the first step chooses within one
    hopeful = torch.ones(B, 1, dtype=torch.bool, device=logits.device)  # running may beat finished
    first_row = K * torch.arange(B, device=logits.device)[:, None]  # (B, 1): of each prompt's beams
    for length in range(1, texts.steps + 1):
        log_probs = apply(rules, texts.ids, logits.log_softmax(dim=-1))
        scores, parents, tokens = _candidates(log_probs, running, options, texts.eos, generator)
        ends = torch.isin(tokens, tokens.new_tensor(texts.eos)) | (length == texts.steps)  # (B, N)
        ids = torch.cat([take(texts.ids.view(B, K, -1), parents), tokens[:, :, None]], dim=-1)
        ended = _ended(ids, scores, ends, length, finished, hopeful, measure)
        finished = finished.best_of(ended, K)
        running, chosen = (scores + ends * measure.impossible).topk(K)
        hopeful = hopeful & _can_improve(running, finished, length, measure)
        full = bool(finished.ended.all()) and options.early_stopping is True
        if full or not hopeful.any() or ends.all():
            break
        texts.select((first_row + take(parents, chosen)).flatten())
        texts.append(take(tokens, chosen).flatten())
        logits = texts.next_logits()
    return finished


def _nothing_finished(texts: Texts, measure: Measure) -> Finished:
    B, K = len(texts.ids), measure.options.num_beams
    # A pad_token_id of 0 counts as none: Hugging Face's `pad or eos`.
    fill = (measure.options.pad_token_id or texts.eos[0]) if texts.eos else -1
    ids = F.pad(texts.ids, (0, texts.steps), value=fill)[:, None].repeat(1, K, 1)
    nothing = torch.zeros(B, K, dtype=torch.long, device=ids.device)
    return Finished(ids, nothing + measure.impossible, nothing.bool(), nothing)


def _candidates(
    log_probs: Tensor,
    running: Tensor,
    options: GenerationOptions,
    eos: Sequence[int],
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The N best next tokens over all beams of a prompt, or N drawn without replacement.

    N is large enough for K beams to go on even if the best candidates all end their text.

    Returns:
        (B, N) scores, best first; the beam that each continues; its token.
    """
    (B, K), V = running.shape, log_probs.shape[-1]
    if log_probs.isnan().any():
        raise ValueError(NOT_NUMBERS)
    total = (log_probs.view(B, K, V) + running[:, :, None]).flatten(1)  # (B, K * V)
    if torch.isneginf(total.amax(dim=-1)).any():
        raise ValueError(FORBIDDEN)
    n = min(max(2, 1 + len(eos)) * K, K * V)
    if options.samples:
        index = torch.multinomial(total.softmax(dim=-1), n, generator=generator)
        scores, order = total.gather(1, index).sort(dim=-1, descending=True)
        index = index.gather(1, order)
    else:
        scores, index = total.topk(n)
    return scores, index // V, index % V


def _ended(
    ids: Tensor,
    scores: Tensor,
    ends: Tensor,
    length: int,
    finished: Finished,
    hopeful: Tensor,
    measure: Measure,
) -> Finished:
    """This step's candidates as finished texts; those that may not be one get an impossible
    score."""
    ended = ends.clone()
    ended[:, measure.options.num_beams :] = False  # the other candidates only stand by
    closed = finished.ended.all(dim=-1, keepdim=True) & (measure.options.early_stopping is True)
    final = measure.score(scores, length)
    for excluded in (closed, ~hopeful, ~ended):
        final = final + excluded * measure.impossible
    width = finished.ids.shape[-1]
    filler = (
        finished.ids[:, :1, ids.shape[-1] - width :] if ids.shape[-1] < width else ids[:, :1, :0]
    )
    whole = torch.cat([ids, filler.expand(-1, ids.shape[1], -1)], dim=-1)
    return Finished(whole, final, ended, torch.full_like(ended, length, dtype=torch.long))


def _can_improve(running: Tensor, finished: Finished, length: int, measure: Measure) -> Tensor:
    """(B, 1): whether the best running beam could still displace the worst finished text.

    Its sum only falls, but its length may grow: early_stopping="never" reckons with the longest
    text where that helps, False with the present length (a heuristic), True likewise.
    """
    if measure.options.early_stopping == "never" and measure.options.length_penalty > 0:
        length = measure.steps
    best = measure.score(running[:, :1], length)
    worst = finished.scores.amin(dim=1, keepdim=True)
    worst = worst.where(finished.ended, measure.impossible)  # (B, K)
    improves: Tensor = (best > worst).any(dim=-1, keepdim=True)
    return improves
