"""Watch one prompt go through: python -m minigpt2.explain "Once upon a time" --html page.html

The terminal view goes to standard output, or JSON with --json; --html writes a page instead. torch
is imported once the options are known to be good.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt2 import __version__, cli, hub
from minigpt2.cli import (
    Parser,
    add_prompt,
    commit_of,
    find_model,
    importing,
    new_parser,
    note,
    pick_device,
    read_prompt,
    wants_color,
)

if TYPE_CHECKING:
    from minigpt2.tokenizer import Tokenizer
    from minigpt2.trace import Trace, explain

__all__ = ["Trace", "explain", "main"]

PROG = "minigpt2.explain"
EPILOG = """\
The page is one file that opens without a server and without a network. It holds every score
of the last positions, and attention among the first token and the last ones; what a long
prompt leaves out is said on the page. Layers, heads and positions count from 0.

Exit status: 0 fine, 1 failure, 2 wrong usage, 130 interrupted, 141 the reader went away."""


def __getattr__(name: str) -> object:
    """`explain` and `Trace`, imported with torch when first asked for."""
    if name in ("Trace", "explain"):
        return getattr(importlib.import_module("minigpt2.trace"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_parser() -> Parser:
    """The options; the prompt's and the model's are generate's."""
    parser = new_parser(PROG, "Show what GPT-2 does with a text, number by number.", EPILOG)
    add_prompt(parser)
    add = parser.add_argument
    add("--html", type=Path, metavar="FILE", help="write a page to play with")
    add("--json", action="store_true", help="print one JSON object instead of the terminal view")
    add("-n", "--greedy-steps", type=int, default=12, help="tokens to continue by; default 12")
    help_text = "tokens whose attention the page and the JSON hold; default: what fits 1 MB"
    add("--max-tokens-attention", type=int, metavar="N", help=help_text)
    help_text = "positions of which the page holds all scores; default: what fits 3 MB"
    add("--max-tokens-logits", type=int, metavar="N", help=help_text)
    return parser


def check_usage(args: argparse.Namespace) -> None:
    """What argparse cannot see.

    Raises:
        ValueError: a number is out of range, or a page could not be written where it should go.
    """
    for name, lowest in (
        ("greedy_steps", 0),
        ("max_tokens_attention", 1),
        ("max_tokens_logits", 1),
    ):
        value = getattr(args, name)
        if value is not None and value < lowest:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least {lowest}, got {value}")
    if args.html is not None and args.html.is_dir():
        raise ValueError(f"--html {args.html} is a folder, not a file")
    if args.html is not None and not args.html.absolute().parent.is_dir():
        raise ValueError(f"--html {args.html}: there is no folder {args.html.parent}")


def load_and_trace(args: argparse.Namespace, folder: Path, text: str) -> tuple[Trace, Tokenizer]:
    """The trace, and the tokenizer that it speaks."""
    with importing():
        import torch

        from minigpt2.model import GPT2
        from minigpt2.tokenizer import Tokenizer
        from minigpt2.trace import explain

    dtype = getattr(torch, args.dtype)
    model = GPT2.from_pretrained(folder, dtype=dtype, device=pick_device(args))
    tokenizer = Tokenizer.from_pretrained(folder)
    options = {"greedy_steps": args.greedy_steps, "special": not args.plain_special}
    return explain(model, tokenizer, text, **options), tokenizer


def describe(name: str, folder: Path, dtype: str) -> dict[str, Any]:
    """Where the numbers come from: enough to make them again."""
    import torch

    return {
        "model": name,
        "revision": commit_of(folder),
        "sha256": weights_hash(folder),
        "versions": f"minigpt2 {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "arithmetic": f"{dtype}, explicit",
    }


def weights_hash(folder: Path) -> str:
    """The sha256 of the file that the weights were read from, or of each shard."""
    from minigpt2.checkpoint import weight_files

    return ", ".join(hub.sha256(file) for file in weight_files(folder))


def work(args: argparse.Namespace, text: str, command: str) -> int:
    """Trace the prompt and show it the way that was asked for."""
    name, folder = find_model(args, PROG)
    if not text:
        note(args, PROG, "empty prompt: showing <|endoftext|>")
    trace, tokenizer = load_and_trace(args, folder, text)
    about = describe(name, folder, trace.dtype)
    from minigpt2 import explain_html, explain_text, figures

    if args.html is not None:
        sizes = args.max_tokens_attention, args.max_tokens_logits
        explain_html.write(args.html, trace, tokenizer, about | {"command": command}, *sizes)
        note(args, PROG, f"{args.html}: {args.html.stat().st_size / 1e6:.1f} MB")
    if args.json:
        n = args.max_tokens_attention or explain_html.fitting_tokens(trace)
        sys.stdout.write(json.dumps(figures.to_json(trace, tokenizer, about, n)) + "\n")
    elif args.html is None:
        bar = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
        sys.stdout.write(explain_text.render(trace, tokenizer, about, wants_color(args), bar))
    sys.stdout.flush()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    cli.open_streams()
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        check_usage(args)
    except ValueError as error:
        parser.error(str(error))
    command = shlex.join(["python", "-m", PROG, *(sys.argv[1:] if argv is None else argv)])
    return cli.run(args, PROG, lambda: work(args, read_prompt(args, parser), command))


if __name__ == "__main__":
    sys.exit(main())
