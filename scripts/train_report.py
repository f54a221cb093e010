"""What a training run says: the progress line, its evaluations, a log and the curve of the loss."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minigpt2.checkpoint import replace_file

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 400, 60, 30, 40
POINTS = 300  # of the training loss; each is the mean of the steps around it


class Reporter:
    """One record for each step: a line of OUT/log.jsonl, and what the terminal shows of it."""

    def __init__(self, args: argparse.Namespace, step: int) -> None:
        """step: the one that the run goes on from; -1: from the start."""
        self.args, self.path = args, args.out / "log.jsonl"
        self.tokens = args.batch_size * args.context  # in a step
        self.losses: list[float] = []  # since the last evaluation
        # What a former run logged after its last checkpoint comes again.
        kept = [record for record in read_log(self.path) if record["step"] <= step]
        lines = "".join(json.dumps(record) + "\n" for record in kept)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, lambda path: path.write_text(lines, encoding="utf-8"))
        self.log = self.path.open("a", buffering=1, encoding="utf-8")  # line by line
        self.bar = tqdm(
            initial=max(0, step) * self.tokens,
            total=args.steps * self.tokens,
            unit="tok",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 30,
        )

    def report(self, record: dict[str, Any]) -> None:
        """Take a step's record down."""
        record |= {"tokens": record["step"] * self.tokens}
        self.log.write(json.dumps(record) + "\n")
        if "loss" in record:
            self.losses.append(record["loss"])
            self.bar.set_postfix_str(f"loss {record['loss']:.3f}", refresh=False)
            self.bar.update(self.tokens)

    def show(self, record: dict[str, Any]) -> None:
        """Say how an evaluation went; once it is saved, since the terminal may be gone."""
        trained = f"train {statistics.fmean(self.losses):.4f}  " if self.losses else ""
        self.losses.clear()
        where = f"step {record['step']}  tokens {record['tokens']:,}"
        held = f"validation {record['validation_loss']:.4f} (blocks of {self.args.context})"
        sample = textwrap.indent(record["sample"], "    ")
        self.bar.write(f"{where}  {trained}{held}\n{sample}", sys.stdout)
        sys.stdout.flush()
        if self.args.plot:
            svg = loss_curve(read_log(self.path))
            path = self.args.out / "loss.svg"
            replace_file(path, lambda target: target.write_text(svg, encoding="utf-8"))

    def close(self) -> None:
        self.bar.close()
        self.log.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log, one for each step; a last line that a kill cut short does not count.

    Raises:
        ValueError: another line is no record.
    """
    lines = path.read_bytes().splitlines() if path.is_file() else []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
            records[-1]["step"] = int(records[-1]["step"])
        except (ValueError, TypeError, KeyError, RecursionError):
            if number == len(lines):
                return records[: number - 1]
            raise ValueError(f"{path}: line {number} is no record: remove the file") from None
    return records


def loss_curve(records: Sequence[dict[str, Any]]) -> str:
    """The records of a log as an SVG."""
    trained = [(record["step"], record["loss"]) for record in records if "loss" in record]
    size = -(-len(trained) // POINTS) or 1
    chunks = [trained[n : n + size] for n in range(0, len(trained), size)]
    means = [tuple(map(statistics.fmean, zip(*chunk, strict=True))) for chunk in chunks]
    held = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
    last = max([1, *(step for step, _ in held + means)])
    losses = [loss for _, loss in held + means] or [0.0]
    low, high = min(losses), max(max(losses), min(losses) + 1e-3)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * step / last

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    def line(points: Sequence[tuple[float, float]], style: str) -> str:
        path = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        return f'<polyline points="{path}" fill="none" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in range(5):
        loss, step = low + (high - low) * tick / 4, last * tick / 4
        parts += [
            f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - 20}" stroke="#ddd"/>',
            f'<text x="{LEFT - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>',
            f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{step:,.0f}</text>",
        ]
    return "\n".join(
        [
            *parts,
            line(means, 'stroke="#4a7db5" stroke-width="1"'),
            line(held, 'stroke="#c0392b" stroke-width="2" stroke-dasharray="2 3"'),
            f'<text x="{LEFT}" y="18" fill="#4a7db5">training loss</text>',
            f'<text x="{LEFT + 100}" y="18" fill="#c0392b">validation loss</text>',
            f'<text x="{WIDTH - 20}" y="18" text-anchor="end">by step</text>',
            "</svg>\n",
        ]
    )
