"""Harm a checkpoint's files in every way there is, and see that loading them does no harm.

    python scripts/fuzz.py --cases 10000
    python scripts/fuzz.py --first 4711 --cases 1 --verbose    # one case again

Every case copies a small checkpoint (one file, shards or a pickle; with a vocabulary), harms one of
its files, and loads it in a process that may crash or hang. What may come out:

    refused     a CheckpointError of one line that names the folder
    equal       the unharmed model, bit for bit
    as written  what the harmed file says, where nothing tells it from an unharmed one: numbers
                changed inside a safetensors file, which has no checksum (those numbers alone
                differ), another legal value in config.json, other ids in a vocabulary (those that
                Hugging Face's tokenizers reads from it)

Anything else is a fault: another exception, a crash, more than 10 seconds, more memory than twice
the files, a pickle that ran. Exit status: 0 without faults, 1 otherwise.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tokenizers
import torch
from harms import CONFIG, Files, harm, originals
from parity import harsh_model

from minigpt2 import GPT2, CheckpointError, GPT2Config, Tokenizer
from minigpt2.tokenizer import END_OF_TEXT

SECONDS = 10
SLACK = 24 << 20  # bytes a loader may take whatever the file: parsers, the allocator's rounding
TEXTS = ["the cat sat low", f"a{END_OF_TEXT}b  the", "é😀\n\n x'll 12", "\x00 cat<|user|>"]
FIELDS = [field.name for field in dataclasses.fields(GPT2Config)]


def floats(content: bytes) -> dict[str, list[bytes]]:
    """The numbers of an unharmed safetensors file, by GPT2's own keys."""
    (length,) = struct.unpack("<Q", content[:8])
    data, found = content[8 + length :], {}
    for key, entry in json.loads(content[8 : 8 + length]).items():
        if key != "__metadata__":
            first, last = entry["data_offsets"]
            numbers = [data[at : at + 4] for at in range(first, last, 4)]
            found[key.removeprefix("transformer.")] = numbers
    return found


def refused(message: str, folder: Path) -> str:
    """The outcome, if the error is one that helps."""
    assert str(folder) in message, f"no file is named: {message}"
    assert message.isprintable(), f"not one clean line: {message[:300]!r}"
    assert len(message) < 5000, f"{len(message)} characters: {message[:300]}"
    return "refused"


def judge_model(folder: Path, files: Files, name: str, unharmed: GPT2) -> str:
    """Load the model; the outcome.

    Raises:
        AssertionError: it is not what it should be.
    """
    try:
        model = GPT2.from_pretrained(folder)
    except CheckpointError as error:
        return refused(str(error), folder)
    written = json.loads((folder / "config.json").read_text("utf-8"))
    expected = {key: getattr(GPT2Config(), key) for key in FIELDS} | written
    for key in FIELDS:
        value = getattr(model.config, key)
        assert (list(value) if isinstance(value, tuple) else value) == expected[key], key
    outcome = "equal" if model.config == unharmed.config else "as written"
    harmed_numbers: dict[str, list[bool]] = {}
    if name.endswith(".safetensors") and (folder / name).is_file():
        original, found = files[name], (folder / name).read_bytes()
        (length,) = struct.unpack("<Q", found[:8])  # the header may have been padded
        start = 8 + struct.unpack("<Q", original[:8])[0]
        now = floats(original[:start] + found[8 + length :])
        for key, numbers in floats(original).items():
            harmed_numbers[key] = [a != b for a, b in zip(numbers, now[key], strict=True)]
    for key, tensor in unharmed.state_dict().items():
        ours = model.state_dict()[key].view(torch.int32)
        differ = (ours != tensor.view(torch.int32)).flatten().tolist()
        allowed = harmed_numbers.get(key, [False] * len(differ))
        assert all(a or not d for a, d in zip(allowed, differ, strict=True)), (
            f"{key} is silently another"
        )
        outcome = "as written" if any(differ) else outcome
    return outcome


def their_ids(folder: Path, special: Sequence[str]) -> list[list[int]]:
    """The ids of TEXTS as Hugging Face's tokenizers reads the folder."""
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if vocab.is_file() and merges.is_file():
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as trimmed:
            # Blank lines at the end are nothing to ours, and an error to theirs.
            lines = merges.read_text(encoding="utf-8").rstrip()
            trimmed.write(lines and lines + "\n")
            trimmed.flush()
            model = tokenizers.models.BPE.from_file(str(vocab), trimmed.name)
        theirs = tokenizers.Tokenizer(model)
        theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        theirs.add_special_tokens(list(special))
    else:
        theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [theirs.encode(text).ids for text in TEXTS]


def judge_tokenizer(folder: Path, expected: dict[str, list[list[int]]]) -> str:
    """Load the tokenizer; the outcome. Raises as judge_model."""
    try:
        tokenizer = Tokenizer.from_pretrained(folder)
    except CheckpointError as error:
        return refused(str(error), folder)
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert [tokenizer.decode(row) for row in ids] == TEXTS, "text does not come back"
    if ids == expected["own"]:
        return "equal"
    if ids == expected["gpt2"]:  # the files are gone, and GPT-2's vocabulary takes their place
        files = ("vocab.json", "merges.txt"), ("tokenizer.json",)
        assert not any(all((folder / name).is_file() for name in group) for group in files)
        return "as written"
    special = [tokenizer.token_bytes(i).decode() for i in tokenizer.special_tokens.values()]
    assert ids == their_ids(folder, special), "ids are silently others"
    return "as written"


def peak_memory(reset: bool = False) -> int:
    """The largest memory of this process since the last reset, in bytes; 0 where Linux's /proc is
    not."""
    with contextlib.suppress(OSError):
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    return 0


def one_case(
    seed: int, checkpoints: list[Files], unharmed: GPT2, work: Path, expected: Any
) -> list[str]:
    """[file, way, outcome] of one case; a fault begins with FAULT."""
    r, folder = random.Random(seed), work / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = r.choice(checkpoints)
    name, way = harm(r, files, folder)
    before = peak_memory(reset=True)
    if os.getuid() == 0:
        os.seteuid(65534)  # nobody: to root every file is readable
    try:
        if name in ("vocab.json", "merges.txt", "tokenizer.json"):
            outcome = judge_tokenizer(folder, expected)
        else:
            outcome = judge_model(folder, files, name, unharmed)
    except Exception as error:  # whatever comes is a fault to report
        outcome = f"FAULT {type(error).__name__}: {error}"[:500]
    if os.getuid() == 0:
        os.seteuid(0)
    grown = peak_memory() - before
    if grown > SLACK + 2 * sum(map(len, files.values())):
        outcome = f"FAULT {grown} bytes of memory"
    if Path("harmed").exists():
        outcome = "FAULT a pickle ran"
    return [name, way, outcome]


def serve(tasks: Connection, checkpoints: list[Files], unharmed: GPT2, work: Path) -> None:
    """Do the cases whose numbers come in; no more memory than 2 GB over what is in use."""
    os.chdir(work)
    gc.collect()  # what the parent left, freed during a case, would hide what the case takes
    with contextlib.suppress(OSError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30),) * 2)
    warnings.simplefilter("error")  # a warning would reach the user
    gpt2 = Tokenizer.from_pretrained("gpt2")
    for name in ("vocab.json", "merges.txt"):
        (work / name).write_bytes(checkpoints[0][name])
    own = Tokenizer.from_pretrained(work)
    expected = {"own": [own.encode(t) for t in TEXTS], "gpt2": [gpt2.encode(t) for t in TEXTS]}
    while (seed := tasks.recv()) is not None:
        tasks.send(one_case(seed, checkpoints, unharmed, work, expected))


def run(first: int, cases: int, verbose: bool = False) -> collections.Counter[tuple[str, ...]]:
    """Do the cases; how often each (file, way, outcome) came."""
    unharmed = harsh_model(CONFIG)
    checkpoints, counts = originals(unharmed), collections.Counter()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        work.chmod(0o777)  # a pickle that runs must be able to leave its mark
        ours: Connection | None = None
        for seed in range(first, first + cases):
            if ours is None:
                ours, theirs = context.Pipe()
                child = context.Process(target=serve, args=(theirs, checkpoints, unharmed, work))
                child.start()
                theirs.close()
            ours.send(seed)
            try:
                result = ours.recv() if ours.poll(SECONDS) else ["?", "?", "FAULT hang"]
            except EOFError:
                child.join()
                result = ["?", "?", f"FAULT crash, exit {child.exitcode}"]
            if verbose or result[2].startswith("FAULT"):
                print(f"case {seed}: {' '.join(result)}", flush=True)
            counts[tuple(result)] += 1
            if result[0] == "?":
                child.kill()
                child.join()
                ours = None
        if ours is not None:
            ours.send(None)
            child.join()
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, its seed")
    parser.add_argument("--verbose", action="store_true", help="a line for every case")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    counts = run(args.first, args.cases, args.verbose)
    outcomes = ["refused", "equal", "as written", "FAULT"]
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for (name, way, outcome), count in counts.items():
        kind = name if way in ("bytes", "values", "header", "lines") else "any file"
        for row in (f"{kind}: {way}", "total"):
            table[row]["FAULT" if outcome.startswith("FAULT") else outcome] += count
    print(f"{'':36}" + "".join(f"{outcome:>12}" for outcome in outcomes))
    for row in sorted(table, key=lambda row: (row == "total", row)):
        print(f"{row:36}" + "".join(f"{table[row][outcome]:12}" for outcome in outcomes))
    return 1 if table["total"]["FAULT"] else 0


if __name__ == "__main__":
    sys.exit(main())
