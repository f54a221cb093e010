"""The training script on tiny models: it learns, goes on after a kill, is the same in several
processes, and refuses what it cannot use."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import GPT2LMHeadModel

from minigpt2 import GPT2, GPT2Config, Tokenizer
from minigpt2.tokenizer import byte_characters

tqdm.monitor_interval = 0  # no thread, since some tests fork

ROOT = Path(__file__).parents[1]
TEXT = "The king had a daughter, and the daughter had a golden ball. " * 30


def words(options: str) -> list[str]:
    return options.split()


SIZE = words("--n-layer 1 --n-head 2 --n-embd 16 --n-positions 16")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that speaks bytes, to begin from: with 257 tokens a step takes milliseconds."""
    folder = tmp_path_factory.mktemp("start")
    torch.manual_seed(0)
    shape = {"vocab_size": 257, "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}
    GPT2(GPT2Config(**shape, eos_token_id=256)).save_pretrained(folder)
    vocabulary = [*byte_characters().values(), "<|endoftext|>"]
    ids = {token: n for n, token in enumerate(vocabulary)}
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(TEXT + "<|endoftext|>\n" + TEXT)
    (tmp_path / "held.txt").write_text(TEXT[:250])
    return path


@pytest.fixture
def arguments(start: Path, text: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """arguments(OUT, more) -> those of a short run from `start`."""

    def build(out: str, more: str = "") -> list[str]:
        files = ["--init", start, "--data", text, "--validation", text.with_name("held.txt")]
        rest = f"--steps 6 --eval-every 2 --warmup 2 --lr 1e-2 --batch-size 4 {more}"
        return [*map(str, files), "--out", str(tmp_path / out), *words(rest)]

    return build


@pytest.fixture
def trained(arguments: Callable[..., list[str]], tmp_path: Path) -> Path:
    """The folder of a run of two steps."""
    assert train.main(arguments("trained", "--steps 2")) == 0
    return tmp_path / "trained"


def log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def weights(out: Path) -> dict[str, Tensor]:
    state = load_file(out / "training.safetensors")
    return {key: tensor for key, tensor in state.items() if key.startswith("model.")}


def content(out: Path) -> dict[str, bytes]:
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def fork(work: Callable[[], int]) -> int:
    """The exit status of a child that does this; minus the signal that killed it."""
    if (child := os.fork()) == 0:
        try:
            os._exit(work())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- Learning


def test_from_scratch_it_learns_and_transformers_opens_what_it_saves(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    files = ["--data", str(text), "--validation", str(text), "--out", str(out)]
    more = "--steps 40 --lr 1e-2 --eval-every 20 --batch-size 4 --prompt The --plot"
    assert train.main([*files, *SIZE, *words(more)]) == 0
    records = log(out)
    assert [record["step"] for record in records] == [*range(41)]
    held = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert held[2] < held[1] < held[0] == pytest.approx(math.log(50257), abs=0.1)
    assert all(r["sample"].startswith("The") for r in records if "validation_loss" in r)
    assert records[40]["tokens"] == 40 * 4 * 16
    shown = capsys.readouterr().out
    assert f"validation {held[2]:.4f} (blocks of 16)" in shown

    ids = torch.tensor([Tokenizer.from_pretrained("gpt2").encode("The king had")])
    for folder in (out, out / "best"):
        assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {
            torch.bfloat16
        }
        model = GPT2.from_pretrained(folder)
        theirs = GPT2LMHeadModel.from_pretrained(folder, dtype="float32").eval()
        with torch.no_grad():
            assert torch.equal(model(ids), theirs(ids).logits)

    polylines = ET.parse(out / "loss.svg").getroot().findall("{*}polyline")
    assert [len(line.attrib["points"].split()) for line in polylines] == [40, 3]


def test_fine_tuning_leaves_the_start_alone_and_keeps_its_vocabulary(
    arguments: Callable[..., list[str]], start: Path, tmp_path: Path
) -> None:
    before, out = content(start), tmp_path / "tuned"
    assert train.main(arguments("tuned", "--save-dtype float32")) == 0
    assert content(start) == before
    assert log(out)[-1]["validation_loss"] < log(out)[0]["validation_loss"]
    saved, state = load_file(out / "model.safetensors"), weights(out)
    assert all(torch.equal(saved[f"transformer.{key[6:]}"], state[key]) for key in state)
    for folder in (out, out / "best"):
        king = Tokenizer.from_pretrained(folder).encode("king")
        assert king == Tokenizer.from_pretrained(start).encode("king")
        assert len(king) == 4


def test_fine_tuning_tales_on_100_kb_lowers_the_loss_of_that_text(tmp_path: Path) -> None:
    rng = random.Random(0)
    who = ["The miller", "A tailor", "My aunt", "The ferryman", "Nobody"]
    did = ["counted", "mended", "painted", "forgot", "weighed", "sold"]
    what = ["eleven lanterns", "the blue wheel", "a sack of buttons", "two maps", "the clock"]
    when = ["on Monday.", "before noon.", "in the harbour.", "without a word.", "again."]
    sentences = (" ".join(map(rng.choice, (who, did, what, when))) for _ in range(2400))
    path, out = tmp_path / "harbour.txt", tmp_path / "tuned"
    path.write_text(" ".join(sentences))
    assert 95_000 < path.stat().st_size < 110_000
    more = "--held-out 0.02 --context 64 --batch-size 2 --steps 6 --eval-every 6 --lr 2e-3"
    given = ["--init", "tales", "--data", str(path), "--out", str(out), *words(more)]
    assert train.main([*given, "--warmup", "1"]) == 0
    losses = [record["validation_loss"] for record in log(out) if "validation_loss" in record]
    assert losses[1] < losses[0] - 1


def test_decay_is_for_matrices_and_the_tied_table_is_one_parameter(
    arguments: Callable[..., list[str]],
) -> None:
    args = train.parse_args(arguments("x"))
    model = train.build_model(args)
    decayed, others = train.make_optimizer(model, args).param_groups
    assert all(parameter.dim() == 2 for parameter in decayed["params"])
    assert all(parameter.dim() == 1 for parameter in others["params"])
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0)
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert sum(parameter is model.wte.weight for parameter in decayed["params"]) == 1


def test_the_schedule_warms_up_and_decays_to_a_tenth() -> None:
    args = argparse.Namespace(lr=1.0, steps=100, warmup=10)
    rates = [train.learning_rate(step, args) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


def test_the_rate_and_the_clipped_norm_reach_the_weights(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Adam's first step is the learning rate wherever there is a gradient, and moments show what
    was clipped."""
    more = "--steps 1 --warmup 4 --weight-decay 0 --clip 0.01"
    assert train.main(arguments("one", more)) == 0
    model = GPT2.from_pretrained(arguments("one")[1])
    moved = weights(tmp_path / "one")["model.wpe.weight"] - model.wpe.weight
    assert moved.abs().median().item() == pytest.approx(1e-2 / 4, rel=1e-3)
    state = load_file(tmp_path / "one" / "training.safetensors")
    moments = [tensor for key, tensor in state.items() if key.startswith("exp_avg.")]
    norm = torch.cat([tensor.flatten() for tensor in moments]).norm().item() / 0.1
    assert norm == pytest.approx(0.01, rel=1e-3)
    assert log(tmp_path / "one")[1]["grad_norm"] > 0.02
    assert log(tmp_path / "one")[1]["lr"] == 1e-2 / 4


@pytest.mark.parametrize("passes", [2, 3, 4])
def test_accumulated_passes_weigh_tokens_alike(
    passes: int, arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Also where the passes differ in size: 4 blocks in 3 passes are 2, 1 and 1."""
    for out, count in (("whole", 1), ("parts", passes)):
        assert train.main(arguments(out, f"--steps 3 --lr 1e-3 --accumulate {count}")) == 0
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for key, tensor in whole.items():
        torch.testing.assert_close(tensor, parts[key], rtol=0, atol=1e-6)
    for one, other in zip(log(tmp_path / "whole"), log(tmp_path / "parts"), strict=True):
        assert one.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=1e-6)
        assert one.get("grad_norm", 0) == pytest.approx(other.get("grad_norm", 0), rel=1e-5)


@pytest.mark.parametrize("count", [2, 16, 17, 18, 100])
def test_validation_scores_each_token_once(count: int, arguments: Callable[..., list[str]]) -> None:
    args = train.parse_args(arguments("x"))
    args.rank, args.world, args.context, args.device = 0, 1, 16, "cpu"
    model = train.build_model(args)
    ids = np.random.default_rng(0).integers(0, 257, count).astype(np.uint16)
    with torch.no_grad():
        logits = [
            model(torch.from_numpy(ids[n : n + 16][None].astype(np.int64)))
            for n in range(0, count - 1, 16)
        ]
    log_probs = torch.cat(logits, dim=1)[0, : count - 1].log_softmax(dim=-1)
    expected = -np.mean([log_probs[n, target] for n, target in enumerate(ids[1:].tolist())])
    assert train.validation_loss(model, ids, args, train.block_loss) == pytest.approx(expected)


def test_bfloat16_and_compilation_change_the_arithmetic_alone(
    arguments: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train.main(arguments("plain")) == 0
    assert train.main(arguments("half", "--bf16")) == 0
    # Traced as always, but without the minute that generating code takes.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    assert train.main(arguments("compiled", "--compile")) == 0
    plain, half, compiled = (log(tmp_path / out)[-1] for out in ("plain", "half", "compiled"))
    assert half["loss"] == pytest.approx(plain["loss"], rel=1e-2)
    assert half["loss"] != plain["loss"]
    assert compiled["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert {tensor.dtype for tensor in weights(tmp_path / "half").values()} == {torch.float32}


# --- Going on


def die_at(out: Path, when: str, name: str, nth: int) -> None:
    """Have this process killed before, inside or after the nth writing of a file, or amid the nth
    step from here."""
    left, replace, check = nth, os.replace, train.check_numbers

    def is_now(hit: bool) -> bool:
        nonlocal left
        left -= hit
        return hit and left == 0

    def replacing(source: Path, target: Path) -> None:
        now = is_now(target == out / name)
        if now and when == "inside":
            os.truncate(source, source.stat().st_size // 2)
        if now and when != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
        if now:
            os.kill(os.getpid(), signal.SIGKILL)

    def checking(args: argparse.Namespace, **values: float) -> None:
        if is_now(name == "step" and "loss" in values):
            os.kill(os.getpid(), signal.SIGKILL)
        check(args, **values)

    os.replace, train.check_numbers = replacing, checking  # type: ignore[assignment]


def test_after_kills_at_bad_moments_it_ends_as_an_unbroken_run_bit_for_bit(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    more = "--accumulate 2 --dropout 0.1"
    assert train.main(arguments("whole", more)) == 0
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for moment in (
        ("before", "log.jsonl", 1),
        ("before", "best/model.safetensors", 1),
        ("before", "training.safetensors", 1),
        ("after", "training.safetensors", 1),  # of step 0
        ("within", "step", 3),
        ("inside", "training.safetensors", 1),  # of step 4, by one that goes on from 2
        ("before", "model.safetensors", 3),  # the first is written when it goes on, then 4 and 6
        ("before", "config.json", 1),
    ):

        def work(moment: tuple[str, str, int] = moment) -> int:
            die_at(parts, *moment)
            return train.main(arguments("parts", more))

        assert fork(work) == -signal.SIGKILL, moment
    assert train.main(arguments("parts", more)) == 0

    files = content(whole)
    assert content(parts).keys() == files.keys()  # nothing half-written is left
    for name in files:
        if name.endswith(".safetensors"):
            first, second = load_file(whole / name), load_file(parts / name)
            assert first.keys() == second.keys()
            assert all(torch.equal(tensor, second[key]) for key, tensor in first.items()), name
    logs = log(whole), log(parts)
    for record in (*logs[0], *logs[1]):
        record.pop("tokens_per_s", None)
    assert logs[0] == logs[1]


def test_more_steps_go_on_where_fewer_ended_and_a_cut_log_is_mended(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "model"
    assert train.main(arguments("model", "--steps 2")) == 0
    with (out / "log.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 9}\n{"step": 4, "lo')
    assert train.main(arguments("model", "--steps 4")) == 0
    assert [record["step"] for record in log(out)] == [0, 1, 2, 3, 4]
    assert load_file(out / "training.safetensors")["step.ln_f.bias"] == 4


def test_the_best_is_kept_when_it_gets_worse(
    arguments: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.2])
    monkeypatch.setattr(train, "validation_loss", lambda *_: next(losses))
    assert train.main(arguments("model", "--steps 2")) == 0
    best = content(tmp_path / "model" / "best")
    assert train.main(arguments("model", "--steps 6")) == 0
    out = content(tmp_path / "model")
    assert content(tmp_path / "model" / "best") == best
    assert out["model.safetensors"] != best["model.safetensors"]


# --- Several processes


def together(arguments: Sequence[str], count: int = 2) -> list[int]:
    """The exit statuses of so many processes, started as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                os.environ |= {"WORLD_SIZE": str(count), "MASTER_PORT": str(port)}
                os.environ["MASTER_ADDR"] = "127.0.0.1"
                os._exit(train.main(arguments))
            finally:
                os._exit(99)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def compare(one: Path, other: Path) -> None:
    """Parameters to 1e-6; losses and norms of gradients too, whose scale Adam would hide."""
    for key, tensor in weights(one).items():
        torch.testing.assert_close(weights(other)[key], tensor, rtol=0, atol=1e-6)
    for first, second in zip(log(one), log(other), strict=True):
        for name in {"loss", "grad_norm", "validation_loss"} & first.keys():
            assert first[name] == pytest.approx(second[name], rel=1e-5), name


THREE_STEPS = "--batch-size 8 --steps 3 --warmup 3 --lr 1e-3 --eval-every 9"


@pytest.mark.parametrize("more", ["", "--accumulate 3", "--fsdp --accumulate 3"])
def test_a31_two_processes_make_the_parameters_of_one(
    more: str, arguments: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = train.save

    def save_and_show(model: GPT2, *rest: Any) -> None:
        save(model, *rest)
        if "--fsdp" not in more:
            torch.save(model.state_dict(), tmp_path / f"{torch.distributed.get_rank()}.pt")

    assert train.main(arguments("one", THREE_STEPS)) == 0
    monkeypatch.setattr(train, "save", save_and_show)
    for steps in (2, 3):  # the third is of processes that go on from the second
        assert together(arguments("two", f"{THREE_STEPS} {more} --steps {steps}")) == [0, 0]
    compare(tmp_path / "one", tmp_path / "two")
    if "--fsdp" not in more:
        first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
        assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
    assert GPT2.from_pretrained(tmp_path / "two" / "best").config.n_embd == 16


def test_torchrun_makes_the_parameters_of_one_process(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert train.main(arguments("one", THREE_STEPS)) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc-per-node", "2", str(ROOT / "scripts" / "train.py")]
    done = subprocess.run(
        [*torchrun, *script, *arguments("two", THREE_STEPS)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("parameters,") == 1  # one process speaks
    compare(tmp_path / "one", tmp_path / "two")


def test_processes_refuse_in_one_line(
    arguments: Callable[..., list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    for more in ("--batch-size 5", "--batch-size 4 --accumulate 3", "--context 17"):
        assert together(arguments("two", more)) == [1, 1]
        assert capfd.readouterr().err.count("train.py: error: ") == 1


# --- Bad input


def refused(given: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that it refuses this with."""
    assert train.main(given) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("train.py: error: ")
    return error


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--steps -1", "--steps must be from 0 to 2**31 - 1, got -1"),
        ("--batch-size 0", "--batch-size must be from 1 to 2**31 - 1, got 0"),
        ("--accumulate 5", "--batch-size 4 does not divide into 1 processes of --accumulate 5"),
        ("--accumulate 0", "--accumulate must be from 1 to"),
        ("--eval-every 0", "--eval-every must be from 1 to"),
        ("--context 0", "--context must be from 1 to"),
        ("--context 17", "--context 17 exceeds n_positions 16"),
        ("--lr nan", "--lr must be from 0 to 2**31 - 1, got nan"),
        ("--lr 1e30", "--lr"),
        ("--seed -1", "--seed must be from 0 to"),
        ("--dropout 1.5", "embd_pdrop must be a number from 0 to 1, got 1.5"),
        ("--n-embd 32", "n_embd: --init brings its own sizes"),
        ("--init nowhere/at-all", "nowhere/at-all"),
        ("--device cuda:99", "--device cuda:99"),
        ("--fsdp", "start several with torchrun"),
        ("--data /nowhere.txt", "/nowhere.txt: no such file or folder"),
        ("--validation /nowhere.txt", "/nowhere.txt: no such file or folder"),
    ],
)
def test_bad_input_is_one_line_and_keeps_the_old_checkpoint(
    more: str,
    message: str,
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    trained: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(trained, tmp_path / "model")
    assert message in refused(arguments("model", f"--steps 9 {more}"), capsys)
    before, after = content(trained), content(tmp_path / "model")
    before.pop("log.jsonl"), after.pop("log.jsonl")
    assert after == before


def test_from_scratch_impossible_sizes_are_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--data", str(text), "--out", str(tmp_path / "out"), *SIZE]
    assert "n_embd 15 does not divide into n_head 2" in refused([*given, "--n-embd", "15"], capsys)
    assert "between 0 and 1, got 1.0" in refused([*given, "--held-out", "1"], capsys)
    assert "0 tokens to measure on" in refused([*given, "--held-out", "1e-9"], capsys)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("words", [1, 5, 15])
def test_a33_too_little_data_is_one_line(
    words: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, out = tmp_path / "short.txt", tmp_path / "out"
    short.write_text(" a" * words)
    given = ["--data", str(short), "--validation", str(short), "--out", str(out), *SIZE]
    error = refused(given, capsys)
    assert f"{words + 1} tokens, but one block needs context + 1 = 17" in error
    assert not (out / "config.json").exists()


def test_another_checkpoint_is_not_overwritten(
    arguments: Callable[..., list[str]],
    start: Path,
    text: Path,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(start, tmp_path / "model")
    error = refused(arguments("model"), capsys)
    assert "model holds a checkpoint without training.safetensors: choose another --out" in error
    files = content(tmp_path / "model")
    assert {name: files[name] for name in content(start)} == content(start)

    before = content(trained)
    given = ["--data", str(text), "--validation", str(text), "--out", str(trained), *SIZE]
    assert "holds a run of vocab_size 257, not 50257, n_layer 2, not 1" in refused(given, capsys)
    assert content(trained).items() >= before.items()

    (tmp_path / "torn").mkdir()
    torn = tmp_path / "torn" / "training.safetensors"
    torn.write_bytes((trained / "training.safetensors").read_bytes()[:-9])
    assert f"{torn} is damaged" in refused(arguments("torn"), capsys)


def harm_state(harm: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    if harm == "shape of a moment":  # which a fused AdamW would read beyond
        tensors["exp_avg.wte.weight"] = torch.zeros(1)
    elif harm == "shape of a weight":
        tensors["model.ln_f.bias"] = torch.zeros(1)
    elif harm == "dtype":
        tensors["model.ln_f.bias"] = tensors["model.ln_f.bias"].long()
    elif harm == "missing weight":
        del tensors["model.wte.weight"]
    elif harm == "missing moment":
        del tensors["exp_avg.wte.weight"]
    elif harm == "unknown":
        tensors["foo"] = torch.zeros(1)
    elif harm == "step":
        metadata["step"] = "-5"
    elif harm == "best":
        metadata["best"] = "nan"
    else:
        metadata["config"] = "[1]"


HARMS = """shape of a moment, shape of a weight, dtype, missing weight, missing moment, unknown,
step, best, config"""


@pytest.mark.parametrize("harm", re.split(r",\s", HARMS))
def test_a_state_that_is_none_is_refused(
    harm: str,
    arguments: Callable[..., list[str]],
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(trained, tmp_path / "model")
    state = tmp_path / "model" / "training.safetensors"
    with safe_open(state, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(state)
    harm_state(harm, tensors, metadata)
    save_file(tensors, state, metadata)
    assert f"{state} is damaged (" in refused(arguments("model"), capsys)


def test_a_log_that_is_none_is_refused_and_kept(
    arguments: Callable[..., list[str]],
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(trained, tmp_path / "model")
    path = tmp_path / "model" / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for line in (b"5\n", b'{"a": 1}\n', b'{"step": "x"}\n', b"\xff\n", b"[" * 100_000 + b"\n"):
        path.write_bytes(b"".join([line, *lines[1:]]))
        before = path.read_bytes()
        assert f"{path}: line 1 is no record" in refused(arguments("model"), capsys)
        assert path.read_bytes() == before


def test_a_terminal_that_fails_does_not_cost_the_checkpoint(
    arguments: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(train.Reporter, "show", fail)
    assert train.main(arguments("model")) == 1
    assert (tmp_path / "model" / "training.safetensors").is_file()


def test_a_full_disk_is_one_line_and_keeps_the_old_checkpoint(
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    trained: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(trained, tmp_path / "model")
    size = (trained / "training.safetensors").stat().st_size

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1))
        return train.main(arguments("model", "--steps 4"))

    assert fork(work) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith(f"train.py: error: {tmp_path / 'model'} cannot be written: ")
    before, after = content(trained), content(tmp_path / "model")
    assert after.keys() == before.keys()
    assert after["training.safetensors"] == before["training.safetensors"]
