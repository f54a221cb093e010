"""Generate text from a shell: python -m minigpt2.generate "Once upon a time"

Standard output carries the text (or JSON) and nothing else. torch is imported once the options are
known to be good.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from minigpt2 import cli, hub
from minigpt2.cli import (
    Parser,
    add_fast,
    add_prompt,
    check_fast,
    commit_of,
    find_model,
    from_argument,
    importing,
    load_model,
    new_parser,
    note,
    read_prompt,
    wants_color,
)
from minigpt2.options import GenerationOptions

if TYPE_CHECKING:
    from minigpt2.model import GPT2
    from minigpt2.streaming import TextStep
    from minigpt2.tokenizer import Tokenizer

PROG = "minigpt2.generate"
SAMPLING = {"temperature", "top_k", "top_p", "min_p"}  # any of them turns sampling on
EPILOG = """\
Greedy by default. Any of --do-sample, --temperature, --top-k, --top-p and --min-p
turns sampling on; scores pass through the repetition penalty, temperature, top-k, top-p and min-p
in this order. Hugging Face's generate has a hidden top_k of 50 when it samples; here top-k is off
unless asked for.

Exit status: 0 fine, 1 failure, 2 wrong usage, 130 interrupted (the text so far stands), 141 the
reader went away."""


def build_parser() -> Parser:
    parser = new_parser(PROG, "Continue a text with GPT-2.", EPILOG)
    add_prompt(parser)
    add_fast(parser)
    add = parser.add_argument
    add("-n", "--max-new-tokens", type=int, default=50)
    add("--min-new-tokens", type=int, default=0, help="no end of text before so many")
    add(
        "--do-sample",
        action="store_true",
        help="draw tokens by their probability instead of taking the best",
    )
    add("-t", "--temperature", type=float, help="below 1 safer, above 1 wilder; 0 is greedy")
    add("--top-k", type=int, help="draw from the k best tokens; 0 is off")
    add("--top-p", type=float, help="draw from the smallest set that holds this probability")
    add("--min-p", type=float, help="drop tokens below this share of the best one's probability")
    add("--repetition-penalty", type=float, default=1.0)
    add("--no-repeat-ngram-size", type=int, default=0, help="no n-gram twice")
    add("-s", "--seed", type=int, help="repeat a run; drawn and shown where not given")
    add(
        "--num-return-sequences",
        type=int,
        default=1,
        metavar="N",
        help="several texts, --- between them",
    )
    add("--num-beams", type=int, default=1, help="above 1: beam search, shown when it has ended")
    add("--length-penalty", type=float, default=1.0, help="of beams: above 0 favours long texts")
    add(
        "--early-stopping",
        choices=("true", "false", "never"),
        default="false",
        help="of beams: when that many texts have ended; by a heuristic; or when none can improve",
    )
    add(
        "--prompt-lookup",
        dest="prompt_lookup_num_tokens",
        type=int,
        metavar="N",
        help="guess N tokens from the text so far and verify them at once; faster where it "
        "repeats; default: 10 with --fast (not exact) and greedy decoding, else 0",
    )
    add("--assistant", metavar="MODEL", help="let a smaller model guess ahead, such as distilgpt2")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    add("--ignore-eos", action="store_true", help="go on past <|endoftext|>")
    add(
        "--context-overflow",
        choices=("stop", "slide", "error"),
        default="stop",
        help="past n_positions: stop, go on with the last n_positions tokens, or refuse beforehand",
    )
    add(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show tokens as they come",
    )
    add(
        "--echo",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print the prompt before the text",
    )
    add("--json", action="store_true", help="one JSON object per text and line")
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: log-probabilities, and the N best alternatives",
    )
    return parser


def build_options(args: argparse.Namespace) -> GenerationOptions:
    """What the flags ask for.

    Raises:
        ValueError: one is out of range.
    """
    fields = {field.name for field in dataclasses.fields(GenerationOptions)}
    options = {k: v for k, v in vars(args).items() if k in fields and v is not None}
    options["do_sample"] = args.do_sample or not options.keys().isdisjoint(SAMPLING)
    options["early_stopping"] = {"true": True, "false": False}.get(args.early_stopping, "never")
    if args.ignore_eos:
        options["eos_token_id"] = ()
    return GenerationOptions(**options)


def check_usage(args: argparse.Namespace) -> None:
    """What argparse cannot see.

    Raises:
        ValueError: flags that contradict each other, or are out of range.
    """
    check_fast(args)
    if "" in args.stop:
        raise ValueError("--stop must not be empty")
    if args.assistant and args.prompt_lookup_num_tokens:
        raise ValueError("--assistant guesses in place of --prompt-lookup: choose one")
    if (args.assistant or args.prompt_lookup_num_tokens) and (
        args.num_beams > 1 or args.num_return_sequences > 1
    ):
        raise ValueError("--prompt-lookup and --assistant continue one text, without beams")
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs needs --json")
    if args.logprobs is not None and not 0 <= args.logprobs <= 50:
        raise ValueError(f"--logprobs must be from 0 to 50, got {args.logprobs}")
    if args.seed is not None and not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed must be from 0 to 2**63 - 1, got {args.seed}")


class Out:
    """Standard output that holds back newlines at the end, so that text closes with exactly one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._stream: TextIO = sys.stdout
        self._flush = args.stream
        self._newlines = ""
        self._bold = wants_color(args)

    def write(self, text: str, bold: bool = False) -> None:
        body = text.rstrip("\n")
        if body:
            styled = (
                f"\x1b[1m{self._newlines}{body}\x1b[0m"
                if bold and self._bold
                else self._newlines + body
            )
            self._stream.write(styled)
            self._newlines = ""
        self._newlines += text[len(body) :]
        if self._flush:
            self._stream.flush()

    def end(self) -> None:
        """The one newline."""
        self._newlines = ""
        self._stream.write("\n")
        self._stream.flush()


class Run:
    """One call: a loaded model, and what it gave out, for text, JSON and statistics."""

    def __init__(self, args: argparse.Namespace, prompt: str, options: GenerationOptions) -> None:
        name, folder = find_model(args, PROG)  # before torch, to refuse at once

        with importing():
            from minigpt2.streaming import prompt_ids
            from minigpt2.tokenizer import Tokenizer

        started = time.perf_counter()
        self.args, self.options, self.name = args, options, name
        self.model: GPT2 = load_model(args, folder)
        self.assistant: GPT2 | None = None
        if args.assistant:
            helper = hub.find(args.assistant, local_files_only=args.offline)
            self.assistant = load_model(args, helper)
        self.tokenizer: Tokenizer = Tokenizer.from_pretrained(folder)
        ids = self.tokenizer.encode(prompt, special=not args.plain_special)
        self.token_ids = prompt_ids(self.tokenizer, ids)
        self.echo = self.tokenizer.decode(ids)
        self.revision = commit_of(folder)
        self.samples = options.samples
        self.seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**31)
        self.rows: list[list[TextStep]] = [[] for _ in range(args.num_return_sequences)]
        self.timing = {"load_s": time.perf_counter() - started}

    def steps(self) -> Iterator[dict[int, TextStep]]:
        """Draw tokens, and note each in its row."""
        import torch

        from minigpt2.streaming import stream_rows
        from minigpt2.texts import Request

        device = self.model.wte.weight.device
        request = Request(
            self.model,
            torch.tensor([self.token_ids], device=device),
            self.options,
            generator=torch.Generator(device).manual_seed(self.seed),
            assistant_model=self.assistant,
        )
        started = time.perf_counter()
        for step in stream_rows(request, self.tokenizer, self.args.stop, self.args.logprobs):
            self.timing.setdefault("first_token_s", time.perf_counter() - started)
            self.timing["generate_s"] = time.perf_counter() - started
            for row, text_step in step.items():
                self.rows[row].append(text_step)
            yield step

    def text(self, row: int) -> str:
        """The row's text so far, with what is still held back if it has not ended."""
        steps = self.rows[row]
        if steps and steps[-1].finish_reason is None:
            return self.tokenizer.decode(step.token_id for step in steps)
        return "".join(step.text for step in steps)

    def finish_reason(self, row: int, interrupted: bool) -> str:
        steps = self.rows[row]
        reason = steps[-1].finish_reason if steps else None
        return reason or ("interrupted" if interrupted else "length")

    def to_json(self, row: int, interrupted: bool) -> str:
        steps = self.rows[row]
        result: dict[str, Any] = {
            "model": self.name,
            "revision": self.revision,
            "prompt": self.echo,
            "prompt_token_ids": self.token_ids,
            "text": self.text(row),
            "token_ids": [step.token_id for step in steps],
            "finish_reason": self.finish_reason(row, interrupted),
            "settings": {
                **dataclasses.asdict(self.options),
                "seed": self.seed if self.samples else None,
                "stop": self.args.stop,
                "dtype": self.args.dtype,
                "device": str(self.model.wte.weight.device),
                "fast": self.args.fast,
            },
            "usage": {"prompt_tokens": len(self.token_ids), "completion_tokens": len(steps)},
            "timing_s": {
                name.removesuffix("_s"): round(value, 4) for name, value in self.timing.items()
            },
        }
        if self.args.logprobs is not None:
            result["logprobs"] = [self._logprob_entry(step) for step in steps]
        return json.dumps(result, ensure_ascii=True)

    def _logprob_entry(self, step: TextStep) -> dict[str, Any]:
        alternatives = [
            {"token_id": token_id, "token": self.tokenizer.piece(token_id), "logprob": logprob}
            for token_id, logprob in step.top_logprobs
        ]
        piece = self.tokenizer.piece(step.token_id)
        return {
            "token_id": step.token_id,
            "token": piece,
            "logprob": step.logprob,
            "top": alternatives,
        }

    def statistics(self, interrupted: bool) -> str:
        count = sum(map(len, self.rows))
        speed = count / self.timing["generate_s"] if count else 0.0
        reasons = {self.finish_reason(row, interrupted): None for row in range(len(self.rows))}
        parts = [
            self.name,
            str(self.model.wte.weight.device),
            f"{self.args.fast} (packed)" if self.args.fast else self.args.dtype,
            f"{len(self.token_ids)} prompt tokens",
            f"{count} tokens",
            f"{speed:.1f} tok/s",
            *([f"seed {self.seed}"] if self.samples else []),
            "/".join(reasons),
        ]
        return ", ".join(parts)


def write_texts(run: Run, out: Out) -> None:
    """Text mode: the first row as it grows, the others after it."""
    steps = run.steps()
    first = next(steps, {})  # before anything is printed: a prompt that is too long fails here
    try:
        if run.args.echo:
            out.write(run.echo, bold=True)
        for step in itertools.chain([first], steps):
            if 0 in step:
                out.write(step[0].text)
    finally:  # also after Ctrl-C
        shown = "".join(step.text for step in run.rows[0])
        out.write(run.text(0)[len(shown) :])
        for row in range(1, len(run.rows)):
            out.end()
            out.write("---\n" + run.echo * run.args.echo + run.text(row))


def work(args: argparse.Namespace, prompt: str, options: GenerationOptions) -> int:
    run = Run(args, prompt, options)
    if not prompt:
        note(args, PROG, "empty prompt: starting from <|endoftext|>")
    if prompt.endswith(" "):
        note(
            args,
            PROG,
            "the prompt ends in a space, but words begin with theirs: better leave it out",
        )
    if run.samples and args.seed is None:
        note(args, PROG, f"seed {run.seed}")
    out = Out(args)
    interrupted = False
    try:
        if args.json:
            for _ in run.steps():
                pass
        else:
            write_texts(run, out)
    except KeyboardInterrupt:
        interrupted = True
    if args.json:
        for row in range(len(run.rows)):
            out.write(run.to_json(row, interrupted) + "\n")
    out.end()
    if args.verbose or sys.stderr.isatty():
        note(args, PROG, run.statistics(interrupted))
    return 130 if interrupted else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    cli.open_streams()
    parser = build_parser()
    args = parser.parse_args(argv)
    args.stop = [from_argument(text) for text in args.stop]
    try:
        options = build_options(args)
        check_usage(args)
    except ValueError as error:
        parser.error(str(error))
    return cli.run(args, PROG, lambda: work(args, read_prompt(args, parser), options))


if __name__ == "__main__":
    sys.exit(main())
