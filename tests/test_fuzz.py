"""scripts/fuzz.py in short, and that it sees what it is for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import fuzz
import pytest
import torch

from minigpt2 import GPT2, checkpoint


def test_harmed_files_are_refused_or_change_nothing_unseen() -> None:
    counts = fuzz.run(0, 300)
    outcomes = {outcome for _, _, outcome in counts}
    assert outcomes == {"refused", "equal", "as written"}
    names = {name for name, _, _ in counts}
    assert names == {name for files in fuzz.originals(GPT2(fuzz.CONFIG)) for name in files}
    ways = {way for _, way, _ in counts}
    assert ways >= {"bytes", "values", "header", "lines", "whole", "unreadable", "folder", "loop"}


def no_check(*_args: object) -> None:
    """See nothing wrong."""


def hang(*_args: object) -> None:
    time.sleep(60)


def crash(*_args: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


TAKEN: list[bytes] = []


def take_much(*_args: object) -> None:
    TAKEN.append(b"x" * (300 << 20))  # touched, unlike zeros, and kept: a peak need not be recorded


def run_pickles(*args: Any, **options: Any) -> Any:
    return LOAD(*args, **options | {"weights_only": False})


LOAD = torch.load


@pytest.mark.parametrize(
    ("place", "name", "broken", "fault"),
    [
        (checkpoint, "_check_match", no_check, "RuntimeError"),
        (checkpoint, "missing_files", hang, "hang"),
        (checkpoint, "missing_files", crash, "crash, exit -9"),
        (checkpoint, "missing_files", take_much, "bytes of memory"),
        (checkpoint, "_read_pickle", lambda file: run_pickles(file), "a pickle ran"),
        (checkpoint.CheckpointError, "__init__", ValueError.__init__, "not one clean line"),
    ],
)
def test_a_fault_is_seen(
    place: object,
    name: str,
    broken: Callable[..., object],
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, name, broken)
    monkeypatch.setattr(fuzz, "SECONDS", 1 if fault == "hang" else 60)
    cases = 4 if name == "missing_files" else 300
    faults = [outcome for _, _, outcome in fuzz.run(0, cases) if outcome.startswith("FAULT")]
    assert any(fault in outcome for outcome in faults)
