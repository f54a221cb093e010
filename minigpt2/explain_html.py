"""A Trace as one page that opens from a file, with no library and no network.

The template data/explain.html holds all the HTML, CSS and JavaScript; this module puts the numbers
in. They travel as JSON in a script element that is not run, large ones as base64 of their bytes.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt2.checkpoint import replace_file
from minigpt2.figures import (
    cache_bytes,
    lower_triangles,
    next_token,
    parameter_table,
    vocabulary,
    what_followed,
    window,
)
from minigpt2.tokenizer import Tokenizer
from minigpt2.trace import Trace

TEMPLATE = Path(__file__).parent / "data" / "explain.html"
ATTENTION_BYTES, LOGITS_BYTES = 1_000_000, 3_000_000  # with vocabulary and page, below 5 MB
BEST_TOKENS = 20  # listed for positions whose scores are not all on the page


def write(
    file: Path,
    trace: Trace,
    tokenizer: Tokenizer,
    about: dict[str, Any],
    attention_tokens: int | None = None,
    logit_positions: int | None = None,
) -> None:
    """Render the page to `file`, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    page = render(trace, tokenizer, about, attention_tokens, logit_positions)
    replace_file(file, lambda path: path.write_text(page, encoding="utf-8", newline="\n"))


def render(
    trace: Trace,
    tokenizer: Tokenizer,
    about: dict[str, Any],
    attention_tokens: int | None = None,
    logit_positions: int | None = None,
) -> str:
    """The page.

    Args:
        about: model, revision, sha256, versions and command, for the footer.
        attention_tokens: how many tokens (`figures.window`) can be chosen and looked at.
        logit_positions: of how many of them, from the end, the page holds all V scores.
    """
    n = attention_tokens or fitting_tokens(trace)
    positions = window(len(trace.token_ids), n)
    full = positions[-(logit_positions or fitting_logits(trace)) :]
    data = _tokens(trace, tokenizer) | _numbers(trace, positions, full)
    data |= {"about": about, "generate": _generate_command(trace, about)}
    template = TEMPLATE.read_text(encoding="utf-8")
    # Replaced back to front: what is put in is never searched.
    head, marker, tail = template.partition("{{data}}")
    assert marker, f"{TEMPLATE} has no place for the data"
    return head.replace("{{policy}}", _policy(template)) + script_json(data) + tail


def fitting_tokens(trace: Trace) -> int:
    """How many tokens' attention fits ATTENTION_BYTES."""
    heads = trace.config.n_layer * trace.config.n_head
    return max(1, math.isqrt(ATTENTION_BYTES * 3 // 4 // heads))  # n * (n + 1) / 2 of 2 bytes each


def fitting_logits(trace: Trace) -> int:
    """How many positions' full logits fit LOGITS_BYTES."""
    return max(1, LOGITS_BYTES * 3 // 4 // (4 * trace.config.vocab_size))


def script_json(value: object) -> str:
    """JSON that nothing inside a script element can end or confuse."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))  # U+2028 and 2029 as well
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(template: str) -> str:
    """The Content-Security-Policy: nothing but this page's own script and style, by their hash."""

    def hashed(tag: str) -> str:
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
        digest = hashlib.sha256(text.encode("utf-8")).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    allowed = f"script-src {hashed('script')}; style-src {hashed('style')}"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _tokens(trace: Trace, tokenizer: Tokenizer) -> dict[str, Any]:
    T = len(trace.token_ids)
    raw = [b.hex() for b in trace.token_bytes]
    return {
        "tokens": list(zip(trace.token_ids, trace.pieces, raw, strict=True)),
        # Whether the text up to a token can be typed as a prompt and gives the same ids.
        "typed": [_can_be_typed(trace, tokenizer, end) for end in range(1, T + 1)],
        "vocabulary": vocabulary(tokenizer, trace.config.vocab_size),
    }


def _generate_command(trace: Trace, about: dict[str, Any]) -> str:
    """The command line that continues a text with the same weights."""
    flags = {"-m": about["model"], "--revision": about.get("revision")}
    flags["--dtype"] = trace.dtype if trace.dtype != "float32" else None
    given = [word for flag, value in flags.items() if value for word in (flag, value)]
    return shlex.join(["python", "-m", "minigpt2.generate", *given])


def _can_be_typed(trace: Trace, tokenizer: Tokenizer, end: int) -> bool:
    raw = b"".join(trace.token_bytes[:end])
    try:
        return 0 not in raw and tokenizer.encode(raw.decode("utf-8")) == trace.token_ids[:end]
    except UnicodeDecodeError:
        return False


def _numbers(trace: Trace, positions: Sequence[int], full: Sequence[int]) -> dict[str, Any]:
    at = torch.tensor(positions)
    lens = trace.lens_ids[:, at].tolist(), trace.lens_probs[:, at]
    answers = [next_token(trace, position, BEST_TOKENS) for position in positions]
    return {
        "config": trace.config.to_dict(),
        "positions": list(positions),
        "logits": {position: _pack(trace.logits[position]) for position in full},
        "answers": [dataclasses.asdict(answer) for answer in answers],
        "followed": [what_followed(trace, position) for position in positions],
        "stages": [
            [s.name, s.formula, s.in_shape, s.out_shape, s.parameters, s.line] for s in trace.stages
        ],
        "norms": _pack(torch.stack([s.norms[at] for s in trace.stages])),
        "residual": _pack(trace.residual[:, at].norm(dim=-1)),
        "parameters": [
            [row.name, row.shape, row.each, row.copies] for row in parameter_table(trace)
        ],
        "cache_bytes": cache_bytes(trace),
        "attention": _pack_shares(lower_triangles(trace, list(positions))),
        "lens_ids": lens[0],
        "lens_probs": _pack(lens[1]),
        "lens_ranks": trace.lens_ranks[:, at].tolist(),
        "path": [[step.token_id, step.candidates] for step in trace.path],
    }


def _pack(values: Tensor) -> str:
    """float32, little-endian, base64."""
    return base64.b64encode(values.contiguous().numpy().astype("<f4").tobytes()).decode()


def _pack_shares(values: Tensor) -> str:
    """Numbers from 0 to 1 as 16-bit fractions of 65535: off by 0.001 percent at most."""
    whole = (values.double() * 65535).round().numpy()
    return base64.b64encode(whole.astype("<u2").tobytes()).decode()
