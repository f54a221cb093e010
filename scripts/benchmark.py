"""Measure speed on a CPU, beside the programs that people would use instead.

    python scripts/benchmark.py --quick        # two minutes: decode and prefill, the main rows
    python scripts/benchmark.py                # everything; writes the table and the picture
    python scripts/benchmark.py decode train   # some parts; train is benchmark_train.py

Every program runs in a process of its own, on the same random weights of gpt2's shape, greedily,
with two threads. A round runs each of them once, and what is shown is the median of the rounds:
timings of one machine mean little on another, the ratios mean more. A program that is not installed
(pip install -e ".[bench]") is a row that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmark_train import train_speed
from parity import SIZES, harsh_model
from peers import PEERS, prepare

from minigpt2 import GPT2, Tokenizer
from minigpt2.options import KINDS

ROOT = Path(__file__).parents[1]
# Of a weight, scales included. int4: 4 bits in the blocks, and two numbers of 16 for each 32
# inputs; 8 in the head, which is 31 % of gpt2.
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.74}
BYTES |= {"f32": 4.0, "bf16": 2.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
MAIN = list(PEERS)
LOOKUP = ", prompt lookup"  # behind a name: the same process guesses ahead
QUICK = ["minigpt2, bit-identical", "minigpt2, float32", "minigpt2, int8", "transformers, float32"]


class Case(NamedTuple):
    """A shape that is measured."""

    title: str
    batch: int
    prompt: int
    new: int
    names: Sequence[str]


class Process:
    """One program with its weights loaded."""

    def __init__(self, name: str, folder: Path) -> None:
        command = [sys.executable, str(ROOT / "scripts" / "peers.py"), name, str(folder)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (until close)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.load = self._answer()["load"]

    def run(self, prompts: list[list[int]], new: int, guesses: bool) -> dict[str, Any]:
        assert self._process.stdin is not None
        task = {"prompts": prompts, "new": new, "guesses": [10] if guesses else []}
        print(json.dumps(task), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError((self._errors.read().strip() or "it ended").splitlines()[-1])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()


def random_prompts(batch: int, length: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(50_000) for _ in range(length)] for _ in range(batch)]


@contextlib.contextmanager
def running(
    names: Sequence[str], folder: Path, missing: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """The programs by name: a Process, or the reason why there is none."""
    programs: dict[str, Any] = {}
    try:
        for name in names:
            reason = missing.get(name.split(",")[0])
            try:
                programs[name] = reason or Process(name, folder)
            except RuntimeError as error:
                programs[name] = f"failed: {error}"
        yield programs
    finally:
        for program in programs.values():
            if isinstance(program, Process):
                program.close()


def measure(case: Case, programs: dict[str, Any], rounds: int) -> dict[str, dict[str, Any] | str]:
    """For each program the median of its seconds and its last answer, or why there is none.

    The seconds of more than one token are those after the first: what the prompt costs is off.
    """
    prompts = random_prompts(case.batch, case.prompt)
    seconds: dict[str, list[float]] = {name: [] for name in case.names}
    results: dict[str, Any] = {}
    for n in range(-1, rounds):  # the first round warms up
        for name in case.names:
            program = programs[name.removesuffix(LOOKUP)]
            if isinstance(program, str) or isinstance(results.get(name), str):
                results.setdefault(name, program)
                continue
            guesses = name.endswith(LOOKUP)
            try:
                first = program.run(prompts, 1, guesses)["seconds"] if case.new > 1 else 0.0
                results[name] = program.run(prompts, case.new, guesses)
            except RuntimeError as error:
                results[name] = programs[name.removesuffix(LOOKUP)] = f"not run: {error}"
                continue
            if n >= 0:
                seconds[name].append(results[name]["seconds"] - first)
    for name, values in seconds.items():
        if values:
            results[name]["seconds"] = statistics.median(values)
    return results


# --- The limit


def bandwidth() -> float:
    """Bytes per second that both cores read."""
    data = torch.ones(1 << 28)  # 1 GB
    return data.nbytes / min(timed(data.sum) for _ in range(5))


def gemm_peak(dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product."""
    a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    return 2 * 2048**3 / min(timed(lambda: a @ b) for _ in range(5))


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def kind_of(name: str) -> str:
    """The precision of a program's weights."""
    part = name.split(", ")[1]
    return "float32" if part == "bit-identical" else part


def limit_tokens(name: str, case: Case, read: float) -> float:
    """Tokens per second if nothing but weights and cache had to be read."""
    config = SIZES["gpt2"]
    weights = 124_439_808 - config.n_positions * config.n_embd
    length = case.prompt + case.new / 2
    cache = 2 * 4 * config.n_layer * config.n_embd * length * case.batch
    return case.batch * read / (weights * BYTES[kind_of(name)] + cache)


# --- Parts


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, printed as well."""
    lines = [f"### {title}", "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    text = "\n".join([*lines, ""])
    print(text, flush=True)
    return text


def speed_table(case: Case, programs: dict[str, Any], rounds: int, read: float) -> str:
    """Tokens per second, beside transformers and beside the limit of the memory."""
    results = measure(case, programs, rounds)
    base = results.get("transformers, float32")
    rows = []
    for name in case.names:
        result = results[name]
        if isinstance(result, str):
            rows.append([name, result, "", "", ""])
            continue
        speed = case.batch * max(1, case.new - 1) / result["seconds"]
        ratio = f"{base['seconds'] / result['seconds']:.2f}" if isinstance(base, dict) else ""
        share = speed / limit_tokens(name, case, read)
        cells = [f"{speed:.1f}", ratio, f"{100 * share:.0f} %"]
        cells.append(f"{result['peak_mb']:.0f}")
        if case.new == 1:
            cells[0] = f"{1000 * result['seconds']:.0f} ms"
            cells[2] = ""
        rows.append([name, *cells])
    unit = "time" if case.new == 1 else "tokens/s"
    return show(case.title, ["program", unit, "x transformers", "of the limit", "peak MB"], rows)


def cases(quick: bool) -> dict[str, list[Case]]:
    names = QUICK if quick else MAIN
    several = [name for name in names if not name.startswith("llama.cpp")]
    looked = [
        name
        for kind in ("float32", "float16", "int8", "int4")
        for name in (f"minigpt2, {kind}", f"minigpt2, {kind}{LOOKUP}")
    ]
    looked += ["llama.cpp, f32", "llama.cpp, f16", "llama.cpp, q8_0", "llama.cpp, q4_0"]
    decode = [Case("Decode, batch 1, prompt 32, 96 new tokens", 1, 32, 96, names)]
    prefill = [Case("Prefill, 512 tokens", 1, 512, 1, names)]
    if quick:
        return {"decode": decode, "prefill": prefill}
    return {
        "decode": decode,
        "batch": [
            Case("Decode, batch 8, prompt 32, 32 new tokens", 8, 32, 32, several),
            Case("Decode, batch 32, prompt 32, 16 new tokens", 32, 32, 16, several),
        ],
        "context": [Case("Decode, batch 1, prompt 900, 32 new tokens", 1, 900, 32, names)],
        "prefill": [*prefill, Case("Prefill, 1024 tokens", 1, 1024, 1, names)],
        "lookup": [Case("Greedy text that repeats itself, 128 new tokens", 1, 32, 128, looked)],
    }


def start(folder: Path, rounds: int) -> str:
    """The whole process from the shell: `import torch` alone, and first and twentieth token."""
    theirs = (
        "import sys\n"
        "from transformers import AutoTokenizer, GPT2LMHeadModel, TextStreamer\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "m = GPT2LMHeadModel.from_pretrained(sys.argv[1])\n"
        "n = int(sys.argv[2])\n"
        "x = t('Once upon a time', return_tensors='pt')\n"
        "m.generate(**x, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)\n"
        "sys.stdout.write('x'); sys.stdout.flush()\n"
    )
    model = str(folder / "transformers")

    def seconds(*arguments: str) -> float:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, *arguments]
        return timed(
            lambda: subprocess.run(command, env=environment, capture_output=True, check=True)
        )

    def ours(n: int, *flags: str) -> Callable[[], float]:
        command = ["-m", "minigpt2.generate", "Once upon a time", "-m", model, "--ignore-eos"]
        return lambda: seconds(*command, "-n", str(n), *flags)

    programs: dict[str, Callable[[], float]] = {
        "import torch alone": lambda: seconds("-c", "import torch"),
        "minigpt2, 1 token": ours(1),
        "minigpt2, 20 tokens": ours(20),
        "minigpt2, --fast int8, 20 tokens": ours(20, "--fast", "int8"),
        "transformers, 1 token": lambda: seconds("-c", theirs, model, "1"),
        "transformers, 20 tokens": lambda: seconds("-c", theirs, model, "20"),
    }
    columns: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, one in programs.items():
            columns[name].append(one())
    medians = {name: statistics.median(values) for name, values in columns.items()}
    rows = [
        [name, f"{value:.2f} s", f"{value / medians['transformers, 1 token']:.2f}"]
        for name, value in medians.items()
    ]
    header = ["whole process, from start to exit", "wall time", "of transformers' first token"]
    return show("Cold start", header, rows)


@torch.inference_mode()
def accuracy(n_texts: int = 8) -> str:
    """What each form costs: logits of tales on texts that tales wrote, beside its float32."""
    model, tokenizer = GPT2.from_pretrained("tales"), Tokenizer.from_pretrained("tales")
    prompt = torch.tensor([tokenizer.encode("Once upon a time")])
    ids = model.generate(
        prompt,
        max_new_tokens=240,
        do_sample=True,
        num_return_sequences=n_texts,
        generator=torch.Generator().manual_seed(0),
        eos_token_id=(),
    )
    expected = model(ids).double()
    log_p = expected.log_softmax(dim=-1)

    def perplexity(log_probs: torch.Tensor) -> float:
        return float(log_probs[:, :-1].gather(-1, ids[:, 1:, None]).mean().neg().exp())

    rows = []
    for kind in KINDS:
        packed = GPT2.from_pretrained("tales")
        packed.pack(kind)
        got = packed(ids).double()
        log_q = got.log_softmax(dim=-1)
        error = float((got - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm())
        divergence = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        agree = float((got.argmax(-1) == expected.argmax(-1)).double().mean())
        ratio = perplexity(log_q) / perplexity(log_p) - 1
        # One row at a time takes other kernels than several at once.
        cache = packed.new_cache(1, 40)
        alone = torch.cat([packed(ids[:1, n : n + 1], cache=cache) for n in range(40)], dim=1)
        apart = float((alone - got[:1, :40]).norm() / got[:1, :40].norm())
        shares = [f"{100 * agree:.1f} %", f"{100 * ratio:+.2f} %"]
        rows.append([kind, f"{error:.1e}", f"{divergence:.1e}", *shares, f"{apart:.1e}"])
    header = ["form", "error of logits", "KL (nats)", "same best token", "perplexity"]
    return show("What each form costs (tales)", [*header, "row by row"], rows)


def picture(title: str, rows: Sequence[tuple[str, float]]) -> str:
    """A bar for each program, as SVG."""
    widest = max(value for _, value in rows)
    height = 24 * len(rows) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-weight="bold">{title}</text>',
    ]
    for n, (name, value) in enumerate(rows):
        y, width = 34 + 24 * n, 380 * value / widest
        color = "#2c7fb8" if name.startswith("minigpt2") else "#b0b0b0"
        parts.append(f'<text x="270" y="{y + 14}" text-anchor="end">{name}</text>')
        parts.append(f'<rect x="280" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>')
        parts.append(f'<text x="{286 + width:.1f}" y="{y + 14}">{value:.0f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    parts = (*cases(False), "start", "accuracy", "train")
    add("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)}; default: all")
    add("--rounds", type=int, help="default: 5, or 2 with --quick")
    add("--quick", action="store_true", help="the main rows in two minutes")
    add(
        "--work", type=Path, help="folder for the weights in every format; default: a temporary one"
    )
    add("--out", type=Path, help="write the tables to this file, and decode beside it as .svg")
    args = parser.parse_args(argv)
    unknown = set(args.parts) - set(parts)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    rounds = args.rounds or (2 if args.quick else 5)
    wanted = cases(args.quick)
    parts = args.parts or (list(wanted) if args.quick else [*wanted, "start", "accuracy", "train"])
    read = bandwidth()
    peaks = {dtype: gemm_peak(dtype) / 1e9 for dtype in (torch.float32, torch.bfloat16)}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"memory is read at {read / 1e9:.1f} GB/s; matrices are multiplied at", end=" ")
    print(", ".join(f"{peak:.0f} GFLOPS ({dtype})" for dtype, peak in peaks.items()), end="\n\n")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        missing = prepare(harsh_model(SIZES["gpt2"]), folder)
        chosen = [case for part in parts for case in wanted.get(part, ())]
        all_names = (name.removesuffix(LOOKUP) for case in chosen for name in case.names)
        names = list(dict.fromkeys(all_names))
        tables = []
        with running(names, folder, missing) as programs:
            tables += [speed_table(case, programs, rounds, read) for case in chosen]
        if "start" in parts:
            tables.append(start(folder, rounds))
        if "accuracy" in parts:
            tables.append(accuracy())
    if "train" in parts:
        train_speed(rounds)
    if args.out:
        args.out.write_text("\n".join(tables), encoding="utf-8")
        lines = [line.split(" | ") for line in tables[0].splitlines()[4:]]
        bars = [(row[0].strip("| "), float(row[1])) for row in lines if row[1][0].isdigit()]
        title = "Tokens per second, 124M parameters, one text, two CPU cores"
        args.out.with_suffix(".svg").write_text(picture(title, bars), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
