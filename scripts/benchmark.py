"""Measure speed, as ratios of medians of interleaved runs.

    python scripts/benchmark.py lookup    # greedy text with and without prompt lookup
    python scripts/benchmark.py start     # the whole process up to the first token

Timings of one machine mean little on another; the ratios mean more.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
from parity import SIZES, harsh_model

from minigpt2 import GPT2, Tokenizer

REPETITIVE = "the cat and the dog and the cat and the dog and"


def medians(runs: int, *measured: Callable[[], float]) -> list[float]:
    """The median seconds of each, the runs of all interleaved."""
    seconds = [[one() for one in measured] for _ in range(runs)]
    return [statistics.median(column) for column in zip(*seconds, strict=True)]


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def lookup(runs: int) -> None:
    """128 greedy tokens, 10 guessed at a time: tales, and random weights of gpt2's shape."""
    ids = torch.tensor([Tokenizer.from_pretrained("gpt2").encode(REPETITIVE)])
    print(f"{'128 greedy tokens':<24}{'plain':>9}{'lookup':>9}{'faster':>9}  same ids")
    models = {"tales": GPT2.from_pretrained("tales"), "gpt2, random": harsh_model(SIZES["gpt2"])}
    for name, model in models.items():
        texts: list[torch.Tensor] = []

        def run(n: int, model: GPT2 = model, texts: list[torch.Tensor] = texts) -> float:
            options = {"max_new_tokens": 128, "eos_token_id": (), "prompt_lookup_num_tokens": n}
            return timed(lambda: texts.append(model.generate(ids, **options)))

        plain, looked = medians(runs, lambda run=run: run(0), lambda run=run: run(10))
        same = all(torch.equal(text, texts[0]) for text in texts)
        print(f"{name:<24}{plain:>8.2f}s{looked:>8.2f}s{plain / looked:>8.2f}x  {same}")


def start(runs: int) -> None:
    """From the shell to the first token of tales, beside `import torch` alone."""

    def process(*arguments: str, read: int = 0) -> float:
        started = time.perf_counter()
        command = [sys.executable, *arguments]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as running:
            assert running.stdout is not None
            running.stdout.read(read) if read else running.wait()
            seconds = time.perf_counter() - started
            running.stdout.read()
        return seconds

    prompt = "Once upon a time"
    ours = ("-m", "minigpt2.generate", prompt, "-m", "tales", "-n", "2")
    torch_alone, first = medians(
        runs,
        lambda: process("-c", "import torch"),
        lambda: process(*ours, read=len(prompt) + 1),
    )
    print(
        f"import torch {torch_alone:.2f} s, first token {first:.2f} s: {first / torch_alone:.2f}x"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=("lookup", "start"))
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args(argv)
    {"lookup": lookup, "start": start}[args.what](args.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
