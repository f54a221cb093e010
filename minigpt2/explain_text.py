"""A Trace for the terminal: 80 columns, with or without colour.

The token comes last in every row: its characters may be two columns wide or none, and nothing to
the right of them can be pushed out of line.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any

from minigpt2.figures import (
    NUCLEUS,
    SINK,
    cache_bytes,
    largest_elsewhere,
    next_token,
    parameter_table,
    piece,
    sinks,
)
from minigpt2.tokenizer import Tokenizer
from minigpt2.trace import Trace

WIDTH = 80
BAR = 20
TOKENS_SHOWN = 40  # of a longer prompt, the first and the last


def render(
    trace: Trace, tokenizer: Tokenizer, about: dict[str, Any], color: bool = False, bar: str = "#"
) -> str:
    """The whole view. about: model, revision, sha256, versions, as the command line knows them.

    bar: one character of a bar; "#" where the terminal has no other.
    """
    sections = {
        "Tokens": _tokens(trace),
        "Stages": _stages(trace),
        "Parameters": _parameters(trace),
        "Next token": _next_token(trace, tokenizer, bar),
        "Attention": _attention(trace),
        "Logit lens": _lens(trace, tokenizer),
        "Greedy path": _path(trace, tokenizer),
        "Made with": (f"  {name}: {value}" for name, value in about.items() if value),
    }
    bold, dim, off = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if color else ("", "", "")
    out = []
    for title, lines in sections.items():
        body = list(lines)
        if body:
            out += [f"{bold}{title}{off}", *(_paint(line, dim, off) for line in body), ""]
    return "\n".join(out)


def quoted(text: str, room: int) -> str:
    """A piece in quotes, so that its spaces show, cut to `room` columns."""
    columns = 2
    for at, character in enumerate(text):
        columns += _columns(character)
        if columns > room or (columns == room and at + 1 < len(text)):
            return f'"{text[:at]}…"' if columns - _columns(character) < room else f'"{text[:at]}"'
    return f'"{text}"'


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _row(left: str, text: str) -> str:
    return left + quoted(text, WIDTH - len(left))


def _paint(line: str, dim: str, off: str) -> str:
    """Lines that explain, which begin with two spaces and a bracket, are dimmed."""
    return f"{dim}{line}{off}" if line.startswith("  (") else line


def _tokens(trace: Trace) -> Iterator[str]:
    T = len(trace.token_ids)
    yield "  pos     id  bytes                     token"
    for position, token_id in enumerate(trace.token_ids):
        if T > TOKENS_SHOWN and TOKENS_SHOWN // 2 <= position < T - TOKENS_SHOWN // 2:
            if position == TOKENS_SHOWN // 2:
                yield f"  ({T - TOKENS_SHOWN // 2 * 2} more tokens here)"
            continue
        raw = trace.token_bytes[position]
        shown = raw.hex(" ") if len(raw) <= 8 else raw[:7].hex(" ") + " .."
        yield _row(f"  {position:3}  {token_id:5}  {shown:24}  ", trace.pieces[position])


def _stages(trace: Trace) -> Iterator[str]:
    yield f"  {'stage':18} {'in':>18} {'out':>18} {'parameters':>11} {'norm':>9}"
    for stage in trace.stages:
        if stage.name.startswith("h.") and not stage.name.startswith("h.0."):
            continue
        shapes = [" x ".join(map(str, shape)) for shape in (stage.in_shape, stage.out_shape)]
        numbers = f"{stage.parameters:11,} {stage.norms[-1]:9.2f}"
        yield f"  {stage.name:18} {shapes[0]:>18} {shapes[1]:>18} {numbers}"
    yield "  (h.0 stands for every block; norm: the length of the last position's vector)"


def _parameters(trace: Trace) -> Iterator[str]:
    rows = parameter_table(trace)
    total = sum(row.total for row in rows)
    for row in rows:
        shape = " x ".join(map(str, row.shape))
        yield (
            f"  {row.name:24} {shape:>14} {row.each:>13,} {f'x {row.copies}':>5} {row.total:>13,}"
        )
    yield f"  {'total':24} {'':34} {total:>13,}"
    each, T = cache_bytes(trace), len(trace.token_ids)
    yield f"  (key-value cache: {each:,} bytes a token, {each * T:,} for these {T})"


def _next_token(trace: Trace, tokenizer: Tokenizer, bar: str) -> Iterator[str]:
    answer = next_token(trace, -1, 10)
    V = trace.config.vocab_size
    span = f"logits from {answer.lowest:.2f} to {answer.highest:.2f}"
    yield f"  {span}; entropy {answer.entropy_bits:.2f} bits"
    yield f"  top-p {NUCLEUS} keeps {answer.nucleus:,} of {V:,} tokens"
    yield f"  rank    prob  {'':{BAR}}   logit      id  token"
    for rank, (token_id, logit, probability) in enumerate(answer.best, start=1):
        length = round(probability / answer.best[0][2] * BAR)
        left = f"  {rank:4} {probability:7.2%}  {bar * length:{BAR}} {logit:7.2f}  {token_id:6}  "
        yield _row(left, piece(tokenizer, token_id))


def _attention(trace: Trace) -> Iterator[str]:
    L, H = trace.attention.shape[:2]
    yield "  Share of the last position's attention on token 0, in percent; * above half"
    for start in range(0, H, 12):
        heads = range(start, min(start + 12, H))
        yield "  layer" + "".join(f"{f'h{head}':>6}" for head in heads)
        for layer in range(L):
            shares = trace.attention[layer, start : start + 12, -1, 0].tolist()
            cells = (f"{share * 100:5.0f}{'*' if share > SINK else ' '}" for share in shares)
            yield f"  {layer:5}" + "".join(cells).rstrip()
    yield f"  {sinks(trace)} of {L * H} heads put more than half of it on token 0"
    found = largest_elsewhere(trace)
    if found is not None:
        layer, head, token, share = found
        left = (
            f"  largest share elsewhere: {share:.1%}, layer {layer} head {head}, on token {token} "
        )
        yield _row(left, trace.pieces[token])


def _lens(trace: Trace, tokenizer: Tokenizer) -> Iterator[str]:
    yield "  stream after      norm    prob  final's rank  best token there"
    for layer, norm in enumerate(trace.residual[:, -1].norm(dim=-1).tolist()):
        name = f"h.{layer - 1}" if layer else "embedding"
        token_id, probability = trace.lens_ids[layer, -1, 0], trace.lens_probs[layer, -1, 0]
        rank = int(trace.lens_ranks[layer, -1])
        left = f"  {name:12} {norm:9.2f} {probability:7.2%} {rank:13,}  "
        yield _row(left, piece(tokenizer, int(token_id)))


def _path(trace: Trace, tokenizer: Tokenizer) -> Iterator[str]:
    for number, step in enumerate(trace.path, start=1):
        left = f"  {number:4} {step.candidates[0][1]:7.2%}  {step.token_id:6}  "
        yield _row(left, piece(tokenizer, step.token_id))
