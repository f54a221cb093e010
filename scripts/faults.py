"""Let things go wrong around minigpt2, and see that files stay whole and messages clear.

    python scripts/faults.py --rounds 200

Processes are killed, disks full, folders read-only, and a Hub on this machine is in a bad mood. A
line per check; exit status 0 if all held, 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from fakehub import Hub, serving
from huggingface_hub import constants
from huggingface_hub.utils import logging
from parity import SIZES, harsh_model

from minigpt2 import GPT2, CheckpointError, hub

NOBODY = 65534
Models = tuple[GPT2, GPT2]


def two_models() -> Models:
    """An old and a new one."""
    return harsh_model(SIZES["tiny"]), harsh_model(SIZES["tiny"], seed=1)


def which(model: GPT2, models: Models) -> str:
    """Whether it is the old or the new one, bit for bit."""
    for name, known in zip(("old", "new"), models, strict=True):
        theirs = known.state_dict()
        if all(torch.equal(tensor, theirs[key]) for key, tensor in model.state_dict().items()):
            return name
    return "half"


def outcome(
    work: Callable[[], object], nobody: bool = False, largest_file: int | None = None
) -> str:
    """What `work` gives in a process of its own, or the error: as a user whom permissions stop, or
    where no file can grow beyond so many bytes."""
    ours, theirs = multiprocessing.Pipe()

    def run() -> None:
        if largest_file is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        if nobody and os.getuid() == 0:
            os.seteuid(NOBODY)
        try:
            theirs.send(f"gave {work()}")
        except Exception as error:  # to be judged by the caller
            theirs.send(f"{type(error).__name__}: {error}")

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    assert process.exitcode == 0, f"exit {process.exitcode}"
    return str(ours.recv())


def killed(work: Callable[[], object], after: float) -> None:
    """Start `work`, and end its process without warning after so many seconds."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    time.sleep(after)
    process.kill()
    process.join()


def kill_while_saving(
    rounds: int, r: random.Random, folder: Path, models: Models, longest: float = 0.04
) -> str:
    """Each of the files is the old or the new one, whole, whenever within `longest` seconds."""
    found = []
    for _ in range(rounds):
        models[0].save_pretrained(folder)

        def save() -> None:
            while True:  # again and again, so that the blow falls anywhere
                models[1].save_pretrained(folder)
                models[0].save_pretrained(folder)

        killed(save, r.uniform(0, longest))
        found.append(which(GPT2.from_pretrained(folder), models))
    assert "half" not in found
    scraps = len(list(folder.glob(".*")))
    return f"{found.count('old')} old, {found.count('new')} new, {scraps} scraps"


@contextlib.contextmanager
def at_hub(model: GPT2, cache: Path) -> Iterator[None]:
    """A Hub on this machine that has the model, and an empty cache."""
    logging.set_verbosity(logging.CRITICAL)
    model.save_pretrained(cache.parent / "at_hub")
    files = {path.name: path.read_bytes() for path in (cache.parent / "at_hub").iterdir()}
    names = ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE", "HF_HUB_CACHE", "HF_HUB_OFFLINE")
    before = {name: getattr(constants, name) for name in names}
    with serving(files) as url:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
        for name, value in zip(names, (url, template, str(cache), False), strict=True):
            setattr(constants, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(constants, name, value)


def download() -> str:
    """The bytes that came, as a hash."""
    folder = hub.find("someone/tiny")
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:8]


def kill_while_downloading(rounds: int, r: random.Random, folder: Path, models: Models) -> str:
    """Afterwards the cache holds nothing of the name or all of it, and a new attempt succeeds."""
    nothing = 0
    for number in range(rounds):
        cache = folder / f"cache{number}"
        with at_hub(models[0], cache):
            Hub.mood = "slow"
            killed(download, r.uniform(0.1, 3))
            try:
                hub.find("someone/tiny", local_files_only=True)
            except CheckpointError:
                nothing += 1
            Hub.mood = "well"
            assert which(GPT2.from_pretrained("someone/tiny"), models) == "old"
    return f"{nothing} cut short, {rounds - nothing} complete, all well at the second attempt"


def disk_full(folder: Path, models: Models) -> str:
    """The old file stays, nothing else does, and the message names the file."""
    models[0].save_pretrained(folder)
    whole = (folder / "model.safetensors").stat().st_size
    for size in (0, 1, 100, 5000, whole - 1):
        message = outcome(lambda: models[1].save_pretrained(folder), largest_file=size)
        assert message.startswith("OSError: "), message
        assert "model.safetensors" in message, message
        with at_hub(models[0], folder / f"cache{size}"):
            message = outcome(download, largest_file=size)
            assert message.startswith("CheckpointError: someone/tiny could not be down"), message
            assert "File too large" in message, message
    assert which(GPT2.from_pretrained(folder), models) == "old"
    assert not list(folder.glob(".*"))
    return "old file kept, one line each"


def read_only(folder: Path, models: Models) -> str:
    """As a full disk; what is in a cache that nobody may write to is used."""
    folder.chmod(0o755)
    models[0].save_pretrained(folder)
    if os.getuid() != 0:  # root makes it another's; a user makes it unwritable
        folder.chmod(0o555)
    message = outcome(lambda: models[1].save_pretrained(folder), nobody=True)
    folder.chmod(0o755)
    assert "Permission denied" in message, message
    assert message.startswith(("OSError: ", "PermissionError: ")), message
    assert which(GPT2.from_pretrained(folder), models) == "old"
    with at_hub(models[0], folder / "cache"):
        (folder / "cache").mkdir(mode=0o555)
        message = outcome(download, nobody=True)
        assert message.startswith("CheckpointError: someone/tiny could not be down"), message
        (folder / "cache").chmod(0o755)
        here = outcome(download)
        (folder / "cache").chmod(0o555)
        assert outcome(download, nobody=True) == here
        (folder / "cache").chmod(0o755)
    return "old file kept, a full cache used, an empty one one line"


def bad_hub(moods: Sequence[str], folder: Path, models: Models) -> str:
    """One line each, and nothing that passes for a checkpoint."""
    for mood in moods:
        with at_hub(models[0], folder / f"cache-{mood}"):
            Hub.mood = mood
            message = outcome(download)
            assert message.startswith("CheckpointError: someone/tiny "), message
            assert message.isprintable(), message
            Hub.mood = "well"
            assert which(GPT2.from_pretrained("someone/tiny"), models) == "old"
    return f"{', '.join(moods)}: one line each, and well afterwards"


def together(n: int, folder: Path, models: Models) -> str:
    """Processes that download, and load, at the same time all get the model."""
    with at_hub(models[0], folder / "cache"):
        Hub.mood = "slow"
        results: list[str] = []

        def one() -> None:
            results.append(outcome(lambda: which(GPT2.from_pretrained("someone/tiny"), models)))

        threads = [threading.Thread(target=one) for _ in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == ["gave old"] * n, results
    return f"{n} processes, one answer"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100, help="how often to kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    models, r = two_models(), random.Random(args.seed)
    moods = ("401", "403", "404", "429", "500", "503", "cut", "stalled")
    checks: dict[str, Callable[[Path], str]] = {
        "kill -9 while saving": lambda folder: kill_while_saving(args.rounds, r, folder, models),
        "kill -9 while downloading": lambda f: kill_while_downloading(args.rounds, r, f, models),
        "disk full": lambda folder: disk_full(folder, models),
        "read-only": lambda folder: read_only(folder, models),
        "the Hub": lambda folder: bad_hub(moods, folder, models),
        "at once": lambda folder: together(8, folder, models),
    }
    failed = 0
    for name, check in checks.items():
        with tempfile.TemporaryDirectory() as temporary:
            try:
                print(f"{name}: {check(Path(temporary))}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"{name}: FAULT {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
