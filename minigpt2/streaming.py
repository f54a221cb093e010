"""Text out of the loop, piece by piece: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from minigpt2.decoding import decode
from minigpt2.model import GPT2
from minigpt2.options import GenerationOptions
from minigpt2.sampling import Processor, forbid
from minigpt2.texts import Request, Step
from minigpt2.tokenizer import StreamDecoder, Tokenizer


@dataclasses.dataclass(frozen=True)
class TextStep:
    """One generated token and the text it brought out.

    text: what can be shown now, "" inside a character or while it may be the start of a stop
    string. The texts of all steps, joined, are the whole text. finish_reason, in the last step
    only: eos_token, stop_sequence or length.
    """

    text: str
    token_id: int
    logprob: float | None  # natural log of the model's own probability; None if not asked for
    top_logprobs: tuple[tuple[int, float], ...] = ()  # the most probable ids, best first
    finish_reason: str | None = None


class TextBuilder:
    """Token ids -> text that is safe to show."""

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] = ()) -> None:
        self._stop = [stop] if isinstance(stop, str) else stop
        if "" in self._stop:
            raise ValueError("a stop string must not be empty")
        self._decoder = StreamDecoder(tokenizer)
        self._held = ""  # decoded, but possibly the start of a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token completes; `stopped` is set when a stop string has come up."""
        return self._release(self._decoder.push(token_id))

    def flush(self) -> str:
        """What is left when no more tokens come."""
        text = self._release(self._decoder.flush()) + self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        starts = range(max(0, len(text) - longest), len(text))
        cut = next(
            (at for at in starts if any(s.startswith(text[at:]) for s in self._stop)), len(text)
        )
        self._held = text[cut:]
        return text[:cut]


def stream(
    model: GPT2,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    stop: str | Sequence[str] = (),
    top_logprobs: int | None = 0,
    generator: torch.Generator | None = None,
    processors: Sequence[Processor] = (),
    assistant_model: GPT2 | None = None,
    **options: Any,
) -> Iterator[TextStep]:
    """Continue a prompt, one step per token.

    Args:
        prompt: text or ids. An empty one starts from <|endoftext|>, which is not part of the
            output.
        stop: strings that end the text, wherever they lie across tokens; neither they nor what
            follows is given out. The prompt does not count.
        top_logprobs: how many alternatives to report with each token; None reports no
            log-probabilities at all, which a packed model can make use of.
        generator, processors, assistant_model: as in texts.Request.
        options: the fields of GenerationOptions, num_return_sequences excepted. With num_beams
            above 1 nothing is given out before the search has ended.

    Raises:
        ValueError: as in decoding.decode; an empty stop string; several texts are asked for.
    """
    ids = torch.tensor([prompt_ids(tokenizer, prompt)], device=model.wte.weight.device)
    chosen = GenerationOptions(**options)
    if chosen.num_return_sequences != 1:
        raise ValueError("stream() gives out one text: call it for each, or use generate()")
    request = Request(model, ids, chosen, None, generator, processors, assistant_model)
    for step in stream_rows(request, tokenizer, stop, top_logprobs):
        yield step[0]


def stream_rows(
    request: Request,
    tokenizer: Tokenizer,
    stop: str | Sequence[str] = (),
    top_logprobs: int | None = 0,
) -> Iterator[dict[int, TextStep]]:
    """As `stream`, for all continuations of a request at once: each step's {row: TextStep}, without
    the rows that have ended."""
    builders = [
        TextBuilder(tokenizer, stop)
        for _ in range(len(request.token_ids) * request.options.num_return_sequences)
    ]
    running = dict(enumerate(builders))
    # A model's vocabulary that was rounded up for speed has ids that no text can hold.
    unused = tokenizer.unused_ids(request.model.config.vocab_size)
    rules = [*request.processors, lambda _, scores: forbid(scores, unused)]
    asked = top_logprobs is not None
    request = dataclasses.replace(
        request, processors=rules if unused else request.processors, all_logits=asked
    )
    for step in decode(request):
        log_probs = step.logits.log_softmax(dim=-1) if asked else None
        rows = {
            row: _text_step(builder, step, row, log_probs, top_logprobs or 0)
            for row, builder in running.items()
        }
        for row, text_step in rows.items():
            if text_step.finish_reason:
                del running[row]
        yield rows
        if not running:
            return


def _text_step(
    builder: TextBuilder, step: Step, row: int, log_probs: Tensor | None, top_logprobs: int
) -> TextStep:
    """What one row's token brings out; log_probs: (B, V)."""
    token_id = int(step.token_ids[row])
    ended = bool(step.finished[row])
    text = "" if ended else builder.push(token_id)
    reason = "stop_sequence" if builder.stopped else "eos_token" if ended else None
    if reason is None and step.last:
        reason = "length"
    if reason in ("eos_token", "length"):
        text += builder.flush()
        reason = "stop_sequence" if builder.stopped else reason
    if log_probs is None:
        return TextStep(text, token_id, None, (), reason)
    best = log_probs[row].topk(top_logprobs)
    alternatives = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TextStep(text, token_id, float(log_probs[row, token_id]), alternatives, reason)


def prompt_ids(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """A prompt's ids; an empty one is <|endoftext|>, which is how the training texts began.

    Raises:
        ValueError: the prompt is empty and the vocabulary has no <|endoftext|>.
    """
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if ids:
        return ids
    if tokenizer.end_of_text_id is None:
        raise ValueError(
            "the prompt is empty, and the vocabulary has no <|endoftext|> to start from"
        )
    return [tokenizer.end_of_text_id]
