"""scripts/faults.py in short, whose checks raise where something is lost; processes and threads
that share a model."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import faults
import pytest
import torch

from minigpt2 import GPT2, GPT2Config, hub


@pytest.fixture(scope="module")
def models() -> faults.Models:
    return faults.two_models()


def test_killed_while_saving(tmp_path: Path, models: faults.Models) -> None:
    faults.kill_while_saving(15, random.Random(0), tmp_path, models)


def test_killed_while_downloading(tmp_path: Path, models: faults.Models) -> None:
    faults.kill_while_downloading(3, random.Random(0), tmp_path, models)


def test_a_full_disk(tmp_path: Path, models: faults.Models) -> None:
    faults.disk_full(tmp_path, models)


def test_a_read_only_folder(models: faults.Models) -> None:
    with tempfile.TemporaryDirectory() as folder:  # others may enter it, unlike pytest's
        faults.read_only(Path(folder), models)


def test_a_hub_in_a_bad_mood(
    tmp_path: Path, models: faults.Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    faults.bad_hub(("401", "403", "404", "cut", "stalled"), tmp_path, models)


def test_several_processes_download_and_load_at_once(tmp_path: Path, models: faults.Models) -> None:
    faults.together(3, tmp_path, models)


def test_half_a_file_is_seen(
    tmp_path: Path, models: faults.Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of what a kill leaves can fail: without a temporary file it does."""
    monkeypatch.setattr(
        "minigpt2.checkpoint.replace_file", lambda path, write: write(path) and None
    )
    monkeypatch.setattr("minigpt2.checkpoint.save_file", slowly)
    with pytest.raises((AssertionError, faults.CheckpointError)):
        faults.kill_while_saving(15, random.Random(0), tmp_path, models, longest=1)


def slowly(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    from safetensors.torch import save

    content = save(tensors, metadata)
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(content), 1000):
            file.write(content[start : start + 1000])
            time.sleep(0.0005)


# --- One model, used by many


def text(model: GPT2, seed: int) -> list[int]:
    ids = torch.tensor([[seed % 199, 5, 6]])
    generator = torch.Generator().manual_seed(seed)
    out = model.generate(ids, do_sample=True, max_new_tokens=8, generator=generator)
    return list(map(int, out[0]))


def test_threads_that_call_one_model_get_the_right_answers(tiny: GPT2) -> None:
    expected = [text(tiny, seed) for seed in range(24)]
    answers: dict[int, list[int]] = {}

    def several(first: int) -> None:
        for seed in range(first, 24, 6):
            answers[seed] = text(tiny, seed)

    threads = [threading.Thread(target=several, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[seed] for seed in range(24)] == expected


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_started_either_way(method: str, tiny: GPT2) -> None:
    ids = torch.tensor([[1, 2, 3]])
    with multiprocessing.get_context(method).Pool(1) as pool:
        out = pool.apply(GPT2.generate, (tiny, ids), {"max_new_tokens": 8})
    assert torch.equal(out, tiny.generate(ids, max_new_tokens=8))


def test_a_thousand_generations_do_not_grow() -> None:
    small = GPT2(GPT2Config(vocab_size=99, n_positions=64, n_embd=48, n_layer=1, n_head=4))

    def largest() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux

    ids = torch.tensor([[1, 2, 3]])
    for count in range(1000):
        if count == 100:  # by then the allocator has what it needs
            before = largest()
        small.generate(ids, max_new_tokens=2, num_beams=2 if count % 10 == 0 else 1)
    assert largest() - before < 8 << 10


# --- Nothing leaves the machine, and nothing of the prompt the screen

BLOCKED = """
import socket, sys
def refuse(*arguments, **options):
    raise AssertionError("a connection was opened")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
socket.create_connection = socket.socket.sendto = refuse
from minigpt2 import explain, generate
SECRET = "My password is swordfish"
status = generate.main([SECRET, "--offline", "-n", "3", "-q"])
status = status or generate.main([SECRET, "--offline", "-n", "3", "--no-echo", "-v", "--json"])
sys.exit(status or explain.main([SECRET, "--offline", "--html", sys.argv[1], "-q"]))
"""


def test_offline_opens_no_connection_and_tells_nobody(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    environment |= {"PYTHONPATH": str(hub.PACKAGE.parent), "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(tmp_path / "page.html")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "swordfish" in done.stdout
    assert "swordfish" not in done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [tmp_path / "page.html"]
