"""Speculative decoding: guess several tokens cheaply, verify them all in one pass of the model.

Guesses come from the text itself (prompt lookup: what followed the last words when they stood there
before) or from a smaller model. Greedy ids are unchanged wherever the two best logits are further
apart than rounding, since several rows round differently from one. Sampled text is distributed
exactly as without: a guess is kept with probability min(1, p/q), and one that is not is replaced
by a draw from what the guesser missed, max(0, p - q) (Leviathan et al. 2023, section 2.3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt2.model import GPT2
from minigpt2.options import GenerationOptions
from minigpt2.sampling import apply, deciding, pick
from minigpt2.texts import Request, Step, Texts, evaluating

# ids (1, S), k -> up to k guesses (1, n), and the probabilities (n, V) they were drawn from; None
# where there was no draw, so that each was certain.
Guesser = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]


def lookup(ids: Tensor, k: int, longest: int) -> Tensor:
    """What followed the last words where they stood before: (1, S) ids -> (1, n) guesses, n <= k.

    The longest ending of at most `longest` tokens that occurs earlier decides, and of its places
    the last one that k tokens follow, or else the first.
    """
    S = ids.shape[1]
    for n in range(min(longest, S - 1), 0, -1):
        windows = ids[0, :-1].unfold(0, n, 1)  # (S - n, n), all but the ending itself
        starts = (windows == ids[0, -n:]).all(dim=1).nonzero().flatten() + n
        if len(starts):
            full = starts[starts + k <= S]
            start = int(full[-1] if len(full) else starts[0])
            return ids[:, start : start + k]
    return ids[:, :0]


class ModelGuesser:
    """Guesses of a smaller model with the same vocabulary, drawn under the same rules."""

    def __init__(self, request: Request, model: GPT2) -> None:
        # Sliding, as far as Texts is concerned: beyond its window the small model is not asked.
        free = dataclasses.replace(request.options, context_overflow="slide")
        self._texts = Texts(dataclasses.replace(request, model=model, options=free))
        self._rules = self._texts.rules()
        self._samples, self._generator = request.options.samples, request.generator
        self._window = model.config.n_positions

    def __call__(self, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Up to k guesses; none where they would not fit the small model's window."""
        texts = self._texts
        texts.ids = ids
        texts.trim()
        probs: list[Tensor] = []
        for _ in range(min(k, self._window - ids.shape[1])):
            scores = apply(self._rules, texts.ids, texts.next_logits())
            probs.append(scores.softmax(dim=-1))
            texts.append(pick(scores, self._samples, self._generator))
        guesses = texts.ids[:, ids.shape[1] :]
        return guesses, torch.cat(probs) if probs else guesses.new_zeros(0, 1).float()


@torch.inference_mode()
def speculate(request: Request) -> Iterator[Step]:
    """As decoding.decode for one (1, T) text, in fewer passes.

    Each pass verifies num_assistant_tokens guesses of the assistant, or without one
    prompt_lookup_num_tokens from the text.

    Raises:
        ValueError: as decode; more than one text; both kinds of guesses; an assistant with another
            vocabulary.
    """
    _check(request)
    model, options, generator = request.model, request.options, request.generator
    texts = Texts(request)
    rules = texts.rules()
    top = 0 if request.all_logits else deciding(options, request.processors)
    guess, count = _guesser(request)
    made = 0
    with evaluating(*filter(None, (model, request.assistant_model))):
        while made < texts.steps:
            room = min(texts.steps - made - 1, model.config.n_positions - texts.ids.shape[1])
            guesses, q = guess(texts.ids, max(0, min(count, room)))
            for row, logits in enumerate(texts.logits_after(guesses, top)[0]):  # (V,)
                scores = apply(rules, texts.ids, logits[None])
                if row < guesses.shape[1]:
                    drawn_from = None if q is None else q[row]
                    token_id, kept = _judge(scores, guesses[0, row], drawn_from, options, generator)
                else:
                    token_id, kept = pick(scores, options.samples, generator), False
                texts.append(token_id)
                made += 1
                finished = torch.isin(token_id, token_id.new_tensor(texts.eos))
                last = made == texts.steps or bool(finished.all())
                yield Step(token_id, logits[None], finished, last)
                if last:
                    return
                if not kept:
                    break
            texts.trim()


def _check(request: Request) -> None:
    options, assistant = request.options, request.assistant_model
    rows = len(request.token_ids) * options.num_return_sequences
    if rows != 1:
        raise ValueError(f"speculative decoding continues one text at a time, got {rows}")
    if options.num_beams != 1:
        raise ValueError(f"speculative decoding takes no num_beams, got {options.num_beams}")
    if assistant is not None:
        if options.prompt_lookup_num_tokens:
            raise ValueError("guesses come from an assistant or from prompt lookup, not from both")
        ours, theirs = request.model.config.vocab_size, assistant.config.vocab_size
        if ours != theirs:
            raise ValueError(f"the assistant's vocab_size {theirs} is not the model's {ours}")


def _guesser(request: Request) -> tuple[Guesser, int]:
    """What guesses, and how many tokens at once."""
    options = request.options
    if request.assistant_model is not None:
        return ModelGuesser(request, request.assistant_model), options.num_assistant_tokens

    def from_the_text(ids: Tensor, k: int) -> tuple[Tensor, None]:
        return lookup(ids, k, options.max_matching_ngram_size), None

    return from_the_text, options.prompt_lookup_num_tokens or 0


def _judge(
    scores: Tensor,
    guess: Tensor,
    q: Tensor | None,
    options: GenerationOptions,
    generator: torch.Generator | None,
) -> tuple[Tensor, bool]:
    """The token in the guess's place, (1,), and whether it is the guess."""
    if not options.samples:
        best = pick(scores, False)
        return best, bool(best == guess)
    p = scores.softmax(dim=-1)[0]  # (V,)
    if q is None:
        q = F.one_hot(guess, len(p)).float()
    chance = torch.rand(1, generator=generator, device=p.device)
    if chance * q[guess] < p[guess]:
        return guess[None], True
    missed = (p - q).clamp(min=0)
    return torch.multinomial(missed if missed.sum() > 0 else p, 1, generator=generator), False
