"""The loop: one pass over the prompt (prefill), then one pass per token (decode)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from minigpt2.beam import beam_steps
from minigpt2.model import GPT2
from minigpt2.options import GenerationOptions
from minigpt2.packed import Exact, PackedOps
from minigpt2.sampling import Processor, apply, deciding, pick
from minigpt2.speculative import speculate
from minigpt2.texts import Request, Step, Texts, evaluating

LOOKUP = 10  # tokens guessed by prompt lookup where a packed model decodes greedily


def generate(
    model: GPT2,
    token_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    processors: Sequence[Processor] = (),
    assistant_model: GPT2 | None = None,
    **options: Any,
) -> Tensor:
    """Continue (B, T) ids: (B * num_return_sequences, T + new), as Hugging Face's generate does.

    Rows that end early are filled up behind.

    Args:
        attention_mask, generator, processors, assistant_model: as in texts.Request.
        options: the fields of GenerationOptions.

    Raises:
        ValueError, TypeError: as in GenerationOptions and `decode`; an option that does not exist.
    """
    chosen = GenerationOptions(**options)
    rest = (attention_mask, generator, processors, assistant_model)
    steps = decode(Request(model, token_ids, chosen, *rest, all_logits=False))
    rows = token_ids.repeat_interleave(chosen.num_return_sequences, dim=0)
    return torch.cat([rows, *(step.token_ids[:, None] for step in steps)], dim=1)


def decode(request: Request) -> Iterator[Step]:
    """Continue (B, T) ids token by token, until every row has ended or max_new_tokens are made.

    Greedy or sampled; by beam search with num_beams above 1, whose steps come when it has ended;
    speculatively with prompt_lookup_num_tokens or an assistant.

    A text may grow to n_positions + 1 tokens, since the last one is never fed back;
    context_overflow says what happens then. Between the first step and the last the model is in
    evaluation mode, afterwards in its former one.

    Raises:
        ValueError: no tokens, an id outside the vocabulary, a prompt longer than n_positions, a
            mask that is not left padding, or options that exclude each other.
    """
    options, ops = request.options, request.model.ops
    guesses = options.prompt_lookup_num_tokens
    if guesses is None:
        one = options.num_beams == len(request.token_ids) * options.num_return_sequences == 1
        fast = isinstance(ops, PackedOps) and not isinstance(ops.head, Exact)
        guesses = LOOKUP if one and fast and not options.samples else 0
        guesses = 0 if request.assistant_model else guesses
        options = dataclasses.replace(options, prompt_lookup_num_tokens=guesses)
        request = dataclasses.replace(request, options=options)
    if request.assistant_model is not None or guesses:
        return speculate(request)
    if options.num_beams > 1:
        return beam_steps(request)
    return one_by_one(request)


@torch.inference_mode()
def one_by_one(request: Request) -> Iterator[Step]:
    """The plain loop; errors as in `decode`."""
    options, device = request.options, request.token_ids.device
    texts = Texts(request)
    pad = options.pad_token_id if options.pad_token_id is not None else [*texts.eos, 0][0]
    rows = torch.arange(len(request.token_ids), device=device)
    rows = rows.repeat_interleave(options.num_return_sequences)
    top = 0 if request.all_logits else deciding(options, request.processors)
    finished = torch.zeros(len(rows), dtype=torch.bool, device=device)
    with evaluating(request.model):
        for count in range(1, texts.steps + 1):
            logits = texts.next_logits(top)  # (B, V)
            if count == 1:  # each prompt is read once, and then goes on in as many rows as asked
                texts.select(rows)
                logits = logits[rows]
                rules = texts.rules()
            next_ids = pick(apply(rules, texts.ids, logits), options.samples, request.generator)
            next_ids = next_ids.masked_fill(finished, pad)
            texts.append(next_ids)
            finished = finished | torch.isin(next_ids, next_ids.new_tensor(texts.eos))
            last = count == texts.steps or bool(finished.all())
            yield Step(next_ids, logits, finished, last)
            if last:
                return
