"""The training script on a tiny model: it learns, resumes, and refuses what it cannot use."""

from __future__ import annotations

import lzma
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import train
from transformers import GPT2LMHeadModel

from minigpt2 import GPT2, Tokenizer

SIZE = [
    "--n-layer",
    "1",
    "--n-head",
    "2",
    "--n-embd",
    "16",
    "--n-positions",
    "16",
    "--batch-size",
    "4",
]
TEXT = "The king had a daughter, and the daughter had a golden ball. " * 30


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(TEXT + "<|endoftext|>\n" + TEXT, encoding="utf-8")
    return path


def arguments(text: Path, out: Path, *more: str) -> list[str]:
    return ["--data", str(text), "--validation", str(text), "--out", str(out), *SIZE, *more]


def test_it_learns_and_saves_what_loads(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert (
        train.main(arguments(text, out, "--steps", "60", "--lr", "1e-2", "--eval-every", "30")) == 0
    )
    losses = [
        float(line.split()[-1])
        for line in capsys.readouterr().out.splitlines()
        if "validation" in line
    ]
    assert len(losses) == 2
    assert losses[1] < losses[0] < math.log(50257)
    model = GPT2.from_pretrained(out)
    theirs = GPT2LMHeadModel.from_pretrained(out, dtype="float32").eval()
    ids = torch.tensor([Tokenizer.from_pretrained("gpt2").encode("The king had")])
    with torch.no_grad():
        assert torch.equal(model(ids), theirs(ids).logits)


def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(text: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = ("--eval-every", "5", "--accumulate", "2", "--dropout", "0.1")
    assert train.main(arguments(text, whole, "--steps", "10", *common)) == 0

    def stop(*_args: object) -> None:
        raise KeyboardInterrupt

    evaluate, train.validation_loss = train.validation_loss, train.validation_loss
    calls: list[int] = []

    def once(*args: object) -> float:
        calls.append(1)
        if len(calls) == 2:
            stop()
        return evaluate(*args)  # type: ignore[arg-type]

    train.validation_loss = once  # type: ignore[assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            train.main(arguments(text, parts, "--steps", "10", *common))
    finally:
        train.validation_loss = evaluate
    assert torch.load(parts / "training.pt", weights_only=True)["step"] == 5
    assert train.main(arguments(text, parts, "--steps", "10", *common)) == 0
    first, second = (torch.load(out / "training.pt", weights_only=True) for out in (whole, parts))
    assert all(torch.equal(tensor, second["model"][key]) for key, tensor in first["model"].items())


def test_fine_tuning_lowers_the_loss_and_leaves_the_start_alone(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = tmp_path / "start"
    assert train.main(arguments(text, start, "--steps", "2", "--eval-every", "2")) == 0
    before = {path.name: path.read_bytes() for path in start.iterdir()}
    out = tmp_path / "tuned"
    more = ("--init", str(start), "--steps", "20", "--eval-every", "10", "--lr", "1e-2")
    assert train.main(arguments(text, out, *more)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "validation" in line]
    assert float(lines[-1].split()[-1]) < float(lines[0].split()[-1])
    assert {path.name: path.read_bytes() for path in start.iterdir()} == before


def test_documents_are_separated_and_compressed_files_are_read(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained("gpt2")
    path = tmp_path / "two.txt.xz"
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.write("one two\n<|endoftext|>\nthree\n")
    expected = [50256, *tokenizer.encode("one two"), 50256, *tokenizer.encode("three")]
    tokens = train.read_tokens([path], tokenizer, 3)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == expected
    assert train.read_tokens([path, path], tokenizer, 3).tolist() == expected * 2


@pytest.mark.parametrize(("count", "starts"), [(17, {0}), (18, {0, 1}), (19, {0, 1, 2})])
def test_a33_windows_of_short_data(count: int, starts: set[int]) -> None:
    tokens = np.arange(count, dtype=np.uint16)
    blocks = train.random_blocks(tokens, 200, 16, np.random.default_rng(0))
    assert blocks.shape == (200, 17)
    assert set(blocks[:, 0].tolist()) == starts
    assert (blocks.diff(dim=1) == 1).all()


@pytest.mark.parametrize("words", [1, 5, 15])
def test_a33_too_little_data_is_one_line(
    words: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text(" a" * words)
    assert train.main(arguments(short, tmp_path / "out")) == 1
    error = capsys.readouterr().err
    assert f"{words + 1} tokens, but one block needs n_positions + 1 = 17" in error
    assert not (tmp_path / "out").exists()


def test_ids_above_the_signed_half_survive() -> None:
    tokens = np.array([50256] * 20, dtype=np.uint16)
    assert train.random_blocks(tokens, 1, 16, np.random.default_rng(0)).unique().tolist() == [50256]


def test_bad_input_is_one_line_and_keeps_the_old_checkpoint(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert train.main(arguments(text, out, "--steps", "2", "--eval-every", "1")) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    capsys.readouterr()
    for broken in (
        ["--data", str(tmp_path / "missing.txt"), *arguments(text, out)[2:]],
        arguments(text, out, "--n-embd", "15"),
        arguments(text, out, "--init", str(tmp_path / "nowhere")),
        arguments(text, out, "--steps", "9", "--eval-every", "3", "--lr", "1e30"),
    ):
        assert train.main(broken) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("train.py: error: ")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_decay_is_for_matrices_and_the_tied_table_is_one_parameter() -> None:
    args = train.parse_args(["--data", "x", "--validation", "x", "--out", "x", *SIZE])
    model = train.build_model(args)
    decayed, others = (group["params"] for group in train.make_optimizer(model, args).param_groups)
    assert all(parameter.dim() == 2 for parameter in decayed)
    assert all(parameter.dim() == 1 for parameter in others)
    assert len(decayed) + len(others) == len(list(model.parameters()))
    assert sum(parameter is model.wte.weight for parameter in decayed) == 1


def test_the_schedule_warms_up_and_decays_to_a_tenth() -> None:
    args = train.parse_args(
        ["--data", "x", "--validation", "x", "--out", "x", "--lr", "1", "--steps", "100"]
    )
    args.warmup = 10
    rates = [train.learning_rate(step, args) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


def test_accumulated_passes_make_the_gradient_of_one_large_batch(
    text: Path, tmp_path: Path
) -> None:
    finals = []
    for batch, passes in (("8", "1"), ("2", "4")):
        out = tmp_path / passes
        more = ("--steps", "3", "--eval-every", "3", "--accumulate", passes)
        given = [*arguments(text, out, *more), "--batch-size", batch]
        assert train.main(given) == 0
        finals.append(torch.load(out / "training.pt", weights_only=True)["model"])
    for key, tensor in finals[0].items():
        torch.testing.assert_close(tensor, finals[1][key], rtol=0, atol=1e-4)
