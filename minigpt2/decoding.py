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
from minigpt2.sampling import Processor, apply, deciding, pick, processors
from minigpt2.speculative import speculate
from minigpt2.texts import Step, Texts, evaluating

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
        options: the fields of GenerationOptions.
        attention_mask, generator, processors, assistant_model: as in `decode`.

    Raises:
        ValueError, TypeError: as in GenerationOptions and `decode`; an option that does not exist.
    """
    chosen = GenerationOptions(**options)
    steps = decode(
        model, token_ids, chosen, attention_mask, generator, processors, assistant_model, False
    )
    rows = token_ids.repeat_interleave(chosen.num_return_sequences, dim=0)
    return torch.cat([rows, *(step.token_ids[:, None] for step in steps)], dim=1)


def decode(
    model: GPT2,
    token_ids: Tensor,
    options: GenerationOptions,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    user_processors: Sequence[Processor] = (),
    assistant_model: GPT2 | None = None,
    all_logits: bool = True,
) -> Iterator[Step]:
    """Continue (B, T) ids token by token, until every row has ended or max_new_tokens are made.

    Greedy or sampled; by beam search with num_beams above 1, whose steps come when it has ended;
    speculatively with prompt_lookup_num_tokens or an assistant.

    A text may grow to n_positions + 1 tokens, since the last one is never fed back;
    context_overflow says what happens then. Between the first step and the last the model is in
    evaluation mode, afterwards in its former one.

    Args:
        attention_mask: (B, T), 0 where left padding stands. By default there is none, unless
            pad_token_id is given, is not an end of text, and occurs in token_ids (Hugging Face's
            rule).
        generator: the source of chance; by default PyTorch's global one.
        user_processors: the caller's own rules, applied after the penalties and before temperature.
        assistant_model: a smaller GPT-2 with the same vocabulary that guesses ahead.
        all_logits: False where the caller reads no Step.logits: of a packed model they may then be
            -inf for all tokens but those that could have been picked.

    Raises:
        ValueError: no tokens, an id outside the vocabulary, a prompt longer than n_positions, a
            mask that is not left padding, or options that exclude each other.
    """
    alone = options.num_beams == 1 and attention_mask is None
    if options.prompt_lookup_num_tokens is None:
        one = alone and len(token_ids) * options.num_return_sequences == 1
        fast = isinstance(model.ops, PackedOps) and not isinstance(model.ops.head, Exact)
        count = LOOKUP if one and fast and not options.samples else 0
        options = dataclasses.replace(options, prompt_lookup_num_tokens=count)
    speculative = assistant_model is not None or options.prompt_lookup_num_tokens
    if speculative and not alone:
        raise ValueError("speculative decoding takes neither num_beams nor an attention_mask")
    given = (model, token_ids, options)
    if speculative:
        return speculate(*given, generator, user_processors, assistant_model, all_logits)
    if options.num_beams > 1:
        return beam_steps(*given, attention_mask, generator, user_processors)
    return one_by_one(*given, attention_mask, generator, user_processors, all_logits)


@torch.inference_mode()
def one_by_one(
    model: GPT2,
    token_ids: Tensor,
    options: GenerationOptions,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    user_processors: Sequence[Processor] = (),
    all_logits: bool = True,
) -> Iterator[Step]:
    """The plain loop; arguments and errors as in `decode`."""
    texts = Texts(model, token_ids, options, attention_mask)
    pad = options.pad_token_id if options.pad_token_id is not None else [*texts.eos, 0][0]
    rows = torch.arange(len(token_ids), device=token_ids.device)
    rows = rows.repeat_interleave(options.num_return_sequences)
    top = 0 if all_logits else deciding(options, user_processors)
    finished = torch.zeros(len(rows), dtype=torch.bool, device=token_ids.device)
    with evaluating(model):
        for count in range(1, texts.steps + 1):
            logits = texts.next_logits(top)  # (B, V)
            if count == 1:  # each prompt is read once, and then goes on in as many rows as asked
                texts.select(rows)
                logits = logits[rows]
                rules = processors(options, texts.T, texts.pads, texts.eos, user_processors)
            next_ids = pick(apply(rules, texts.ids, logits), options.samples, generator)
            next_ids = next_ids.masked_fill(finished, pad)
            texts.append(next_ids)
            finished = finished | torch.isin(next_ids, next_ids.new_tensor(texts.eos))
            last = count == texts.steps or bool(finished.all())
            yield Step(next_ids, logits, finished, last)
            if last:
                return
