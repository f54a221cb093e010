"""What a Trace says, as the numbers that the terminal, the page and the JSON all show."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import torch
from torch import Tensor

from minigpt2.sampling import top_p
from minigpt2.tokenizer import Tokenizer
from minigpt2.trace import Trace

SINK = 0.5  # a head whose weight on token 0 is above this is called a sink
NUCLEUS = 0.9


@dataclasses.dataclass(frozen=True)
class ParameterRow:
    """Parameters that occur once, or once in every block (name h.*.)."""

    name: str
    shape: tuple[int, ...]
    each: int
    copies: int

    @property
    def total(self) -> int:
        """All copies together."""
        return self.each * self.copies


def parameter_table(trace: Trace) -> list[ParameterRow]:
    """The model's parameters in the order of the pass; the rows' totals add up to the model's."""
    rows: dict[str, ParameterRow] = {}
    for key, shape, each in trace.parameters:
        name = re.sub(r"^h\.\d+\.", "h.*.", key)
        copies = rows[name].copies + 1 if name in rows else 1
        rows[name] = ParameterRow(name, shape, each, copies)
    return list(rows.values())


def cache_bytes(trace: Trace) -> int:
    """What a KVCache spends on one token: a key and a value of n_embd numbers in every layer."""
    dtype: torch.dtype = getattr(torch, trace.dtype)
    return 2 * trace.config.n_layer * trace.config.n_embd * dtype.itemsize


@dataclasses.dataclass(frozen=True)
class NextToken:
    """The model's answer after one position, before any sampling rule."""

    lowest: float  # logits
    highest: float
    log_sum: float  # logsumexp of the logits: logit - log_sum is the logarithm of the probability
    entropy_bits: float
    nucleus: int  # how many tokens top-p 0.9 keeps
    best: list[tuple[int, float, float]]  # id, logit, probability


def next_token(trace: Trace, position: int, n: int) -> NextToken:
    """What comes after `position`, with the n best tokens."""
    logits = trace.logits[position].double()  # (V,)
    log_probs = logits.log_softmax(dim=-1)
    probs = log_probs.exp()
    order = logits.sort(descending=True, stable=True).indices[:n]
    kept = top_p(trace.logits[position][None], NUCLEUS)
    return NextToken(
        lowest=logits.min().item(),
        highest=logits.max().item(),
        log_sum=logits.logsumexp(dim=-1).item(),
        entropy_bits=-(probs * log_probs).nan_to_num().sum().item() / math.log(2),
        nucleus=int((kept > -math.inf).sum()),
        best=list(zip(order.tolist(), logits[order].tolist(), probs[order].tolist(), strict=True)),
    )


def what_followed(trace: Trace, position: int) -> tuple[int, int, float] | None:
    """The token that stands behind a position: id, its rank among the guesses (1: the best) and its
    probability; None behind the last."""
    if position + 1 >= len(trace.token_ids):
        return None
    token_id = trace.token_ids[position + 1]
    logits = trace.logits[position].double()
    rank = int((logits > logits[token_id]).sum()) + 1
    return token_id, rank, logits.softmax(dim=-1)[token_id].item()


def sinks(trace: Trace, position: int = -1, threshold: float = SINK) -> int:
    """How many heads spend more than `threshold` of a position's attention on token 0."""
    return int((trace.attention[:, :, position, 0] > threshold).sum())


def largest_elsewhere(trace: Trace, position: int = -1) -> tuple[int, int, int, float] | None:
    """Layer, head, token and share of the largest weight that is on another token than 0; None
    for the first position, which sees nothing else."""
    rows = trace.attention[:, :, position, 1:]  # (L, H, T - 1)
    if rows.numel() == 0 or not rows.any():
        return None
    layer, head, token = (int(at) for at in torch.unravel_index(rows.argmax(), rows.shape))
    return layer, head, token + 1, rows[layer, head, token].item()


def window(length: int, n: int) -> list[int]:
    """The positions that a page of n tokens shows of a prompt: the first, where attention sinks,
    and the last n - 1."""
    return list(range(length)) if length <= n else [0, *range(length - n + 1, length)]


def lower_triangles(trace: Trace, positions: list[int]) -> Tensor:
    """(L * H, n * (n + 1) / 2): each head's weights among n positions, row by row, without the
    zeros above the diagonal."""
    at = torch.tensor(positions)
    square = trace.attention[:, :, at][..., at].flatten(0, 1)  # (L * H, n, n)
    rows, columns = torch.tril_indices(len(positions), len(positions))
    return square[:, rows, columns]


def vocabulary(tokenizer: Tokenizer, size: int) -> list[str]:
    """Every token's piece; an id that only the model has is shown as a number."""
    return [piece(tokenizer, token_id) for token_id in range(size)]


def piece(tokenizer: Tokenizer, token_id: int) -> str:
    """A token for display, whether the tokenizer knows it or not."""
    try:
        return tokenizer.piece(token_id)
    except ValueError:
        return f"[{token_id}]"


def to_json(trace: Trace, tokenizer: Tokenizer, about: dict[str, Any], n: int) -> dict[str, Any]:
    """What --json prints: everything but the full logits, attention among n tokens (`window`)."""
    kept = window(len(trace.token_ids), n)
    at = torch.tensor(kept)
    tokens = zip(trace.token_ids, trace.pieces, trace.token_bytes, strict=True)
    rows = [dataclasses.asdict(row) | {"total": row.total} for row in parameter_table(trace)]
    lens = zip(*(t[:, at].tolist() for t in (trace.lens_ids, trace.lens_probs)), strict=True)
    attention = trace.attention[:, :, at][..., at].double().round(decimals=7)
    return {
        **about,
        "text": trace.text,
        "config": trace.config.to_dict(),
        "tokens": [{"id": i, "piece": p, "bytes": b.hex(" ")} for i, p, b in tokens],
        "stages": [{**dataclasses.asdict(s), "norms": s.norms.tolist()} for s in trace.stages],
        "residual_norms": trace.residual.norm(dim=-1).tolist(),
        "parameters": {"rows": rows, "total": sum(row["total"] for row in rows)},
        "cache_bytes_per_token": cache_bytes(trace),
        "positions": kept,
        "left_out": len(trace.token_ids) - len(kept),
        "next_token": [_answer(trace, tokenizer, position) for position in kept],
        "attention": attention.tolist(),
        "sinks": {"threshold": SINK, "heads": sinks(trace)},
        "lens": [{"ids": ids, "probabilities": probs} for ids, probs in lens],
        "lens_ranks": trace.lens_ranks[:, at].tolist(),
        "path": [
            {
                "id": step.token_id,
                "piece": piece(tokenizer, step.token_id),
                "candidates": [[i, piece(tokenizer, i), p] for i, p in step.candidates],
            }
            for step in trace.path
        ],
    }


def _answer(trace: Trace, tokenizer: Tokenizer, position: int) -> dict[str, Any]:
    found = next_token(trace, position, 10)
    best = [
        {"id": i, "piece": piece(tokenizer, i), "logit": logit, "probability": probability}
        for i, logit, probability in found.best
    ]
    return {"position": position, **dataclasses.asdict(found), "best": best}
