"""What the command lines have in common: prompt, model, notes, errors and exit codes.

It imports no torch: --help, and a mistake in the options, are answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from minigpt2 import __version__, hub
from minigpt2.options import KINDS

if TYPE_CHECKING:
    from minigpt2.model import GPT2


DEVICES = "cpu, cuda, mps; default: the fastest there is"


class Parser(argparse.ArgumentParser):
    """argparse, with one line for a mistake."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {hub.one_line(message)} (see --help)\n")


def open_streams() -> None:
    """A standard stream that the caller closed reads as empty, and swallows what is written; what
    the terminal's encoding lacks is shown escaped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for good)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def from_argument(text: str) -> str:
    """An argument as the UTF-8 that the shell passed, whatever the locale made of it."""
    try:
        return os.fsencode(text).decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # not from a shell: main(argv) was called with other surrogates
        return text


def new_parser(prog: str, description: str, epilog: str) -> Parser:
    """A parser with the model's options."""
    parser = Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    plain = "take <|endoftext|> in the text as plain characters"
    add("--plain-special", action="store_true", help=plain)
    add(
        "-m",
        "--model",
        default="auto",
        help="gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2, tales (ships with minigpt2), "
        "a folder or a Hub id; default: gpt2 where it can be had, else tales",
    )
    add("--revision", help="a commit, tag or branch of the model; default: a pinned commit")
    add("--offline", action="store_true", help="open no connection")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--device", type=device, default="auto", help=DEVICES)
    add("--color", choices=("auto", "always", "never"), default="auto")
    add("-q", "--quiet", action="store_true", help="no notes on standard error")
    add("-v", "--verbose", action="store_true", help="more notes, and a traceback with an error")
    add("--version", action="version", version=f"minigpt2 {__version__}")
    return parser


def device(text: str) -> str:
    """The argument of --device."""
    if not re.fullmatch(r"auto|cpu|(cuda|mps|xpu)(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is none of cpu, cuda, cuda:1, mps, xpu")
    return text


def add_prompt(parser: Parser) -> None:
    """The three ways to give a prompt."""
    add = parser.add_argument
    add("text", nargs="?", metavar="PROMPT", help="the text to start from; - reads standard input")
    add("-p", "--prompt", help="the same, for a prompt that starts with a dash")
    add("-f", "--file", type=Path, help="read the prompt from a file")


def add_fast(parser: Parser) -> None:
    """The choice of a packed form."""
    help_text = (
        "repack the matrices for this CPU in this form; exact keeps every bit and saves work "
        "at the head alone"
    )
    parser.add_argument("--fast", choices=KINDS, help=help_text)


def check_fast(args: argparse.Namespace) -> None:
    """What --fast goes with.

    Raises:
        ValueError: another dtype or device.
    """
    if args.fast and (args.dtype != "float32" or args.device not in ("auto", "cpu")):
        raise ValueError("--fast takes neither --dtype nor --device: it packs for the CPU")


def load_model(args: argparse.Namespace, folder: Path) -> GPT2:
    """The checkpoint, where and in the form that was asked for."""
    import torch

    from minigpt2.model import GPT2

    device = "cpu" if args.fast else pick_device(args)
    model = GPT2.from_pretrained(folder, dtype=getattr(torch, args.dtype), device=device)
    if args.fast:
        model.pack(args.fast)
    return model


def read_prompt(args: argparse.Namespace, parser: Parser) -> str:
    """The one prompt that was given; exactly one final newline of a file or of stdin is dropped."""
    given = [str(source) for source in (args.text, args.prompt, args.file) if source is not None]
    if len(given) > 1:
        parser.error("give one prompt: as an argument, with --prompt or with --file")
    if args.file is not None:
        with args.file.open("rb") as file:
            content = file.read()
    elif args.text == "-" or not given:
        if not given and sys.stdin.isatty():
            parser.error(f'no prompt; for example: python -m {parser.prog} "Once upon a time"')
        content = sys.stdin.buffer.read()
    else:
        return from_argument(given[0])
    text: str = content.decode("utf-8", errors="surrogateescape")
    return text[: -2 if text.endswith("\r\n") else -1] if text.endswith("\n") else text


def find_model(args: argparse.Namespace, prog: str) -> tuple[str, Path]:
    """The model's name, chosen and explained where none was given, and its folder.

    Raises:
        CheckpointError: as in hub.find.
    """
    name = args.model
    if name == "auto":
        name, reason = hub.auto(args.offline)
        note(args, prog, f"model {name}: {reason}")
    return name, hub.find(name, args.revision, args.offline)


def commit_of(folder: Path) -> str | None:
    """The commit of a checkpoint that came from the Hub."""
    return folder.name if folder.parent.name == "snapshots" else None


def pick_device(args: argparse.Namespace) -> str:
    """The device asked for, or the fastest there is.

    Raises:
        ValueError: there is no such device here.
    """
    import torch

    if args.device == "auto":
        return (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {args.device}: {str(error).splitlines()[0]}") from None
    return str(args.device)


def wants_color(args: argparse.Namespace) -> bool:
    """Whether the terminal takes colour and nobody asked for none."""
    if args.color != "auto":
        return bool(args.color == "always")
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """While torch is imported Ctrl-C ends the process at once: as an exception it would get lost in
    somebody's `except`."""
    was = signal.getsignal(signal.SIGINT)
    if was is not signal.SIG_IGN:
        at_ctrl_c(lambda *_: os._exit(130))
    try:
        yield
    finally:
        at_ctrl_c(was)


def at_ctrl_c(handler: Any) -> None:
    """Have Ctrl-C do this, where it is not a thread's work that is going on."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def note(args: argparse.Namespace, prog: str, message: str) -> None:
    """One line on standard error, unless --quiet."""
    if not args.quiet:
        complain(prog, message)


def complain(prog: str, message: str) -> None:
    """One line on standard error; where nobody can read it, the work goes on all the same."""
    with contextlib.suppress(OSError):
        print(f"{prog}: {hub.one_line(message)}", file=sys.stderr, flush=True)


def run(args: argparse.Namespace, prog: str, work: Callable[[], int]) -> int:
    """Do the work; the exit status: its own, 1 after an error, 130 after Ctrl-C, or 141 when the
    reader of standard output went away."""
    try:
        return work()
    except BrokenPipeError:
        # The reader has what it wanted. What is still buffered goes nowhere, or Python would
        # complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, ArithmeticError, OSError, RuntimeError, MemoryError) as error:
        if args.verbose:
            traceback.print_exc()
        message = " ".join(str(error).split()) or type(error).__name__
        complain(prog, f"error: {message}")
        return 1
