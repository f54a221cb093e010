"""Log-likelihood against float64 and Hugging Face, each token once, tasks by hand, the command."""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity import harsh_model
from transformers import GPT2LMHeadModel

from minigpt2 import GPT2, GPT2Config, Tokenizer, evaluate, hub
from minigpt2.evaluate import Request, Score, loglikelihood, score_batches, windows

TOKENIZER = Tokenizer.from_pretrained("gpt2")
TEXT = " ".join(
    f"The {who} went to the {where} and said, '{what} is all I have,' for it was {when}."
    for who in ("king", "fisherman", "old witch")
    for where in ("forest", "sea")
    for what, when in (("Bread", "winter"), ("My golden ring", "long past midnight"))
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that speaks GPT-2's vocabulary."""
    path = tmp_path_factory.mktemp("small")
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, eos_token_id=50256)
    harsh_model(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def small(folder: Path) -> GPT2:
    return GPT2.from_pretrained(folder)


def main(
    capfd: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0
) -> tuple[str, str]:
    try:
        code = evaluate.main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        code = exit_.code  # type: ignore[assignment]
    out, err = capfd.readouterr()
    assert code == status, err
    return out, err


def by_hand(model: GPT2, context: list[int], continuation: list[int]) -> Score:
    """One text, one pass over the whole of it."""
    ids = torch.tensor([[*context, *continuation][:-1]])
    with torch.inference_mode():
        log_probs = model(ids)[0, len(context) - 1 :].log_softmax(dim=-1)
    picked = [log_probs[i, token_id].item() for i, token_id in enumerate(continuation)]
    best = [log_probs[i].argmax().item() == t for i, t in enumerate(continuation)]
    return Score(tuple(picked), tuple(best))


# --- The primitive


def mixed_requests() -> list[tuple[list[int], list[int]]]:
    """Single texts of all lengths, questions with several answers, examples in front of all."""
    draw = random.Random(0)

    def ids(n: int) -> list[int]:
        return [draw.randrange(199) for _ in range(n)]

    examples, question = ids(30), ids(9)
    requests = [(ids(draw.randint(1, 30)), ids(draw.randint(1, 20))) for _ in range(12)]
    requests += [(question, ids(n)) for n in (1, 5, 2, 11)]
    requests += [(examples + ids(n), ids(4)) for n in (1, 6, 3)]
    requests += [([7], ids(3)), ([7], ids(1)), (question, [3])]
    draw.shuffle(requests)
    return requests


@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_scores_are_those_of_each_text_alone(tiny: GPT2, batch_size: int) -> None:
    double = GPT2(tiny.config).double()
    double.load_state_dict(tiny.state_dict())
    requests = mixed_requests()
    contexts, continuations = zip(*requests, strict=True)
    scores = loglikelihood(double, contexts, continuations, batch_size)
    for score, request in zip(scores, requests, strict=True):
        expected = by_hand(double.eval(), *request)
        assert score.logprobs == pytest.approx(expected.logprobs, rel=1e-11)
        assert score.best == expected.best
        assert score.count == len(request[1])
        assert score.logprob == pytest.approx(sum(expected.logprobs), rel=1e-11)


def test_greedy_tells_whether_greedy_decoding_writes_it(
    tiny: GPT2, random_ids: Callable[..., torch.Tensor]
) -> None:
    prompt = random_ids(1, 6)
    text = tiny.generate(prompt, max_new_tokens=5, eos_token_id=())[0].tolist()
    right, wrong = text[6:], [*text[6:10], (text[10] + 1) % 199]
    scores = loglikelihood(tiny, [text[:6]] * 2, [right, wrong])
    assert [score.greedy for score in scores] == [True, False]
    assert scores[1].best == (True, True, True, True, False)


def tokens_fed(model: GPT2, requests: list[Request], batch_size: int) -> int:
    fed = 0

    def count(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        nonlocal fed
        fed += args[0].numel()

    handle = model.register_forward_pre_hook(count)
    list(score_batches(model, requests, batch_size))
    handle.remove()
    return fed


def test_a_common_beginning_is_computed_once(tiny: GPT2) -> None:
    question = list(range(40))
    answers = [([*question], [n, n, n]) for n in range(8)]
    assert tokens_fed(tiny, answers, 8) == 39 + 8 * 3  # the last question token predicts
    examples = [([*question, n, n + 1], [5]) for n in range(8)]
    assert tokens_fed(tiny, examples, 8) == 40 + 8 * 2
    short = [([1, 2, n, n, n, n], [5]) for n in range(8)]  # two tokens are not worth a pass
    assert tokens_fed(tiny, short, 8) == 8 * 6


def test_scoring_leaves_the_modes_alone(tiny: GPT2) -> None:
    tiny.train()
    try:
        for _ in score_batches(tiny, [([1], [2]), ([3], [4])], 1):
            assert not torch.is_inference_mode_enabled()
            assert tiny.training
    finally:
        tiny.eval()


def test_what_the_window_cannot_hold_is_cut_from_the_left(tiny: GPT2) -> None:
    ids = [n % 199 for n in range(100)]
    (score,) = loglikelihood(tiny, [ids[:90]], [ids[90:]])
    expected = by_hand(tiny, ids[35:90], ids[90:100])  # 64 are fed: 55 + 10 - 1
    assert score.logprobs == pytest.approx(expected.logprobs, rel=1e-6)
    (whole,) = loglikelihood(tiny, [ids[:1]], [ids[1:65]])
    assert whole.count == 64


@pytest.mark.parametrize(
    ("context", "continuation", "message"),
    [
        ([], [1], "a context of 0 tokens"),
        ([1], [], "and a continuation of 0"),
        ([1], [2] * 65, "a continuation of 65 tokens exceeds n_positions 64"),
        ([1], [2, 199], r"token id 199 is outside the vocabulary 0\.\.198"),
        ([-1], [2], "token id -1 is outside"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    tiny: GPT2, context: list[int], continuation: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        loglikelihood(tiny, [context], [continuation])


def test_scores_that_are_no_numbers_are_refused(tiny: GPT2) -> None:
    broken = GPT2(tiny.config)
    broken.load_state_dict(tiny.state_dict())
    broken.ln_f.weight.data[3] = math.nan
    with pytest.raises(ValueError, match="not numbers"):
        loglikelihood(broken, [[1]], [[2]])


# --- Perplexity


@given(st.integers(1, 300), st.integers(1, 64), st.data())
def test_every_token_but_the_first_is_scored_once(n: int, context: int, data: Any) -> None:
    stride = data.draw(st.integers(1, context))
    scored: list[int] = []
    for begin, first, end in windows(n, context, stride):
        assert begin < first  # something stands before it
        assert end - 1 - begin <= context  # what is fed fits
        assert first - begin >= min(first, context - stride) or end == n  # full left context
        scored += range(first, end)
    assert scored == list(range(1, n))


def test_forty_tokens_in_windows_of_sixteen() -> None:
    assert list(windows(40, 16, 8)) == [(0, 1, 16), (8, 16, 24), (16, 24, 32), (24, 32, 40)]
    assert sum(end - first for _, first, end in windows(40, 16, 8)) == 39
    assert list(windows(9, 4, 4)) == [(0, 1, 4), (3, 4, 8), (7, 8, 9)]


def reference_nats(ids: list[int], context: int, stride: int, model: GPT2LMHeadModel) -> float:
    """Straight from the definition, in float64: the windows begin at 0, stride, 2 stride, ... and
    score what the one before did not hold."""
    total, held, begin = 0.0, 1, 0
    while held < len(ids):
        end = min(begin + context, len(ids))
        start = min(begin, held - 1)
        with torch.inference_mode():
            logits = model(torch.tensor([ids[start:end]]), logits_to_keep=end - held + 1).logits[0]
        for log_probs, token_id in zip(logits.log_softmax(dim=-1), ids[held:end], strict=False):
            total -= log_probs[token_id].item()
        held, begin = max(held, end), begin + stride
    return total


@pytest.mark.parametrize(
    ("context", "stride"), [(256, 1), (256, 8), (256, 64), (256, 256), (100, 64), (20, 1), (67, 67)]
)
def test_perplexity_of_tales_is_that_of_hugging_face_in_float64(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], context: int, stride: int
) -> None:
    text = TEXT[: 5 * context + 200]  # a window and some more: float64 takes its time
    file = tmp_path / "text.txt"
    file.write_text(text)
    ids = TOKENIZER.encode(text)
    assert context + 20 < len(ids) < 300
    theirs = GPT2LMHeadModel.from_pretrained(hub.find("tales"), dtype=torch.float64).eval()
    window = ("--context", str(context), "--stride", str(stride))
    out, _ = main(capfd, "perplexity", file, "-m", "tales", *window, "--json")
    result = json.loads(out)
    nats = reference_nats(ids, context, stride, theirs)
    assert result["tokens_scored"] == len(ids) - 1
    assert result["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-5)
    bits, per_word = nats / math.log(2), nats / len(text.split())
    assert result["bits_per_byte"] == pytest.approx(bits / len(text), rel=1e-6)
    assert result["word_perplexity"] == pytest.approx(math.exp(per_word), rel=1e-4)
    assert (result["context"], result["stride"]) == (context, stride)


def test_files_are_streams_of_their_own(
    folder: Path, small: GPT2, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = {"a.txt": "A king.<|endoftext|>A queen", "b.txt.xz": "Straße und Schloß, ein Märchen"}
    (tmp_path / "a.txt").write_text(texts["a.txt"], encoding="utf-8")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(texts["b.txt.xz"].encode()))
    files = [tmp_path / name for name in texts]
    out, _ = main(capfd, "perplexity", *files, "-m", folder, "--json")
    result = json.loads(out)
    ids = [TOKENIZER.encode(text) for text in texts.values()]
    nats = -sum(by_hand(small, row[:1], row[1:]).logprob for row in ids)
    count = sum(map(len, ids)) - 2
    assert result.pop("loss") == pytest.approx(nats / count, rel=1e-6)
    assert result.pop("tokens_scored") == count
    assert result.pop("bytes") == sum(len(text.encode()) for text in texts.values())
    assert result.pop("words") == 3 + 5
    recipe = {"task": "perplexity", "files": [str(file) for file in files], "model": str(folder)}
    recipe |= {"revision": None, "dtype": "float32", "context": 32, "stride": 16, "complete": True}
    assert recipe.items() <= result.items()
    plain, _ = main(capfd, "perplexity", files[0], "-m", folder, "--json", "--plain-special")
    special, _ = main(capfd, "perplexity", files[0], "-m", folder, "--json")
    assert json.loads(plain)["tokens_scored"] > json.loads(special)["tokens_scored"]


# --- Tasks


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_lambada_scores_last_word_and_last_token(
    folder: Path, small: GPT2, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pairs = [("He went up to the old", " windmill"), ("She took the", " bread"), ("A", " b")]
    ids = [(TOKENIZER.encode(a), TOKENIZER.encode(b)) for a, b in pairs]
    # A text whose last token, but not whose whole last word, the model would have written.
    context = TOKENIZER.encode("The old") + TOKENIZER.encode(" book")
    best = int(small(torch.tensor([context]))[0, -1].argmax())
    text = TOKENIZER.decode([*context, best])
    assert TOKENIZER.encode(text) == [*context, best]
    assert " " not in TOKENIZER.decode([best])
    ids.append((context[:-1], [context[-1], best]))
    lines = [{"text": a + b} for a, b in pairs] + [{"text": text}]
    out, _ = main(
        capfd, "lambada", write_lines(tmp_path / "l.jsonl", lines), "-m", folder, "--json"
    )
    result = json.loads(out)
    scores = [by_hand(small, *request) for request in ids]
    words, tokens = [s.logprob for s in scores], [s.logprobs[-1] for s in scores]
    assert result["examples"] == 4
    assert result["last_word_perplexity"] == pytest.approx(math.exp(-sum(words) / 4), rel=1e-5)
    assert result["last_token_perplexity"] == pytest.approx(math.exp(-sum(tokens) / 4), rel=1e-5)
    assert result["last_token_acc"] == sum(s.best[-1] for s in scores) / 4 > 0
    assert result["last_word_acc"] == sum(s.greedy for s in scores) / 4 < result["last_token_acc"]
    share = result["last_token_acc"]
    assert result["last_token_acc_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 3))


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    texts = ["one\u2028two", "three\x85four", "five\x1csix\x0c\x0b"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    lines[2] = '{"text": "five\\u001csix\\u000c\\u000b"}'
    file = tmp_path / "l.jsonl"
    for start, end in (("", "\n"), ("\ufeff", "\r\n"), ("\n \n", "\n\n")):
        file.write_bytes((start + end.join(lines) + end).encode())
        assert [line["text"] for line in evaluate.read_lines(file, {"text": str})] == texts


QUESTIONS: list[dict[str, Any]] = [
    {"context": "The frog jumped", "choices": ["high", "into the deep well", "on"], "label": 1},
    {"context": "A wolf  ", "choices": ["ran away", "slept for a hundred years"], "label": 0},
    {"context": "Then the king", "choices": ["died", "ruled happily ever after"], "label": 1},
]


def picked(small: GPT2, question: dict[str, Any]) -> dict[str, int]:
    """The answer that each measure takes."""
    measures: dict[str, list[float]] = {"acc": [], "acc_norm": [], "acc_token": []}
    for answer in question["choices"]:
        context = TOKENIZER.encode(question["context"].rstrip())
        whole = TOKENIZER.encode(question["context"] + " " + answer)
        score = by_hand(small, context, whole[len(context) :])
        measures["acc"].append(score.logprob)
        measures["acc_norm"].append(score.logprob / len(answer))
        measures["acc_token"].append(score.logprob / score.count)
    return {name: values.index(max(values)) for name, values in measures.items()}


def test_choice_by_hand(
    folder: Path, small: GPT2, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Once with labels that each measure in turn gets right, so that a mix-up shows.
    for measure in ("acc", "acc_norm", "acc_token"):
        lines = [q | {"label": picked(small, q)[measure]} for q in QUESTIONS]
        file = write_lines(tmp_path / "c.jsonl", lines)
        result = json.loads(main(capfd, "choice", file, "-m", folder, "--json")[0])
        assert result[measure] == 1.0
        for other in ("acc", "acc_norm", "acc_token"):
            hits = [picked(small, q)[other] == q["label"] for q in lines]
            assert result[other] == sum(hits) / 3
    assert result["examples"] == 3


HELLASWAG = {
    "activity_label": "Baking bread",
    "ctx_a": "[header] How to bake [title] Mix the flour.",
    "ctx_b": "the baker",
    "ctx": "[header] How to bake [title] Mix the flour. the baker",
    "endings": [" adds water [step] slowly.", "  sleeps.", "sings", "runs  off"],
    "label": 2,
}


def test_hellaswag_in_both_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str], int]] = []

    def record(lines: Any, *_: object) -> None:
        seen.extend((line["context"], line["choices"], line["label"]) for line in lines)

    monkeypatch.setattr(evaluate, "choice", record)
    for style in (None, "completion", "harness"):
        args = argparse.Namespace(style=style)
        evaluate.hellaswag([HELLASWAG | {"from": "line 1"}], TOKENIZER.encode, args)
    assert seen[0] == seen[1] == (HELLASWAG["ctx"], HELLASWAG["endings"], 2)
    # What lm-evaluation-harness' process_docs makes of it.
    context = "Baking bread: How to bake. Mix the flour. The baker"
    endings = ["adds water slowly.", "sleeps.", "sings", "runs off"]
    assert (seen[2][0].replace("  ", " "), seen[2][1], seen[2][2]) == (context, endings, 2)


def test_hellaswag_runs(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_lines(tmp_path / "h.jsonl", [HELLASWAG, HELLASWAG | {"label": "0"}])
    for style in ("completion", "harness"):
        out, _ = main(capfd, "hellaswag", file, "-m", folder, "--style", style, "--json")
        result = json.loads(out)
        assert (result["style"], result["examples"]) == (style, 2)
        assert sum(result[name] for name in ("acc", "acc_norm", "acc_token")) <= 1.5


# --- The command


def test_text_output_has_a_line_for_each_figure(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text("Once upon a time there was a king")
    out, err = main(capfd, "perplexity", tmp_path / "t.txt", "-m", folder)
    figures = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert figures["tokens_scored"] == "7"
    assert float(figures["perplexity"]) == pytest.approx(math.exp(float(figures["loss"])), rel=1e-4)
    assert err == ""


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("perplexity", b"", "0 tokens"),
        ("perplexity", b"king", "1 tokens; a first one and one to score are needed"),
        ("perplexity", b"caf\xe9", "not UTF-8 (byte 3)"),
        ("lambada", b"", "empty"),
        ("lambada", b"{'text': 1}", "line 1 is not JSON"),
        ("lambada", b'{"text": "a b"}\n\n{"text": 3}', 'line 3 has no "text" of the right type'),
        ("lambada", b"[1]", 'line 1 has no "text"'),
        ("lambada", b"[" * 100_000, "line 1 is not JSON"),
        ("lambada", b"9" * 5_000, "line 1 is not JSON"),
        ("lambada", b'{"text": "word"}', "line 1"),
        ("choice", b'{"context": "a", "choices": ["b"], "label": 0}', "two answers or more"),
        ("choice", b'{"context": "a", "choices": ["b", "c"], "label": 2}', "label's number"),
        ("choice", b'{"context": " ", "choices": ["b", "c"], "label": 0}', "an empty context"),
        ("choice", b'{"context": "a", "choices": ["b", ""], "label": 0}', "two answers or more"),
        (
            "choice",
            b'{"context": "a", "choices": ["b", "' + b"c " * 60 + b'"], "label": 0}',
            "exceed",
        ),
        ("hellaswag", b'{"ctx": "a", "endings": ["b", "c"]}', 'no "label"'),
        ("hellaswag", b'{"ctx": "a", "endings": [1, 2], "label": 0}', "an ending is no text"),
        ("hellaswag", b'{"ctx": "a", "endings": ["b", "c"], "label": "x"}', "line 1"),
    ],
)
def test_bad_files_are_one_line(
    folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    task: str,
    content: bytes,
    message: str,
) -> None:
    file = tmp_path / "file.txt"
    file.write_bytes(content)
    out, err = main(capfd, task, file, "-m", folder, status=1)
    assert out == ""
    assert err.count("\n") == 1
    assert str(file) in err
    assert message in err


def test_damaged_and_missing_files_are_one_line(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    packed = lzma.compress(TEXT.encode())
    rotten = gzip.compress(b"text")[:10] + b"\xff" * 9
    damaged = {"a.xz": packed[:-9], "b.xz": b"text", "c.gz": b"text", "d.gz": rotten}
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        _, err = main(capfd, "perplexity", tmp_path / name, "-m", folder, status=1)
        assert err.count("\n") == 1
        assert "damaged, or not" in err
    _, err = main(capfd, "perplexity", tmp_path / "none", "-m", folder, status=1)
    assert "No such file" in err
    _, err = main(capfd, "perplexity", tmp_path, "-m", folder, status=1)
    assert "Is a directory" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["choice", "f", "--stride", "2"], "--stride is an option of perplexity alone"),
        (["perplexity", "f", "--style", "harness"], "--style is an option of hellaswag alone"),
        (["perplexity", "f", "--stride", "0"], "--stride must be at least 1, got 0"),
        (["lambada", "f", "-b", "-1"], "--batch-size must be at least 1, got -1"),
        (["poetry", "f"], "invalid choice: 'poetry'"),
        (["perplexity"], "required: FILE"),
    ],
)
def test_wrong_usage(capfd: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    _, err = main(capfd, *arguments, status=2)
    assert err.count("\n") == 1
    assert message in err


def test_windows_that_the_model_does_not_have(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text("a b c")
    for flags, message in (
        (["--context", "33"], "--context 33 exceeds the model's n_positions 32"),
        (["--context", "8", "--stride", "9"], "--stride 9 exceeds --context 8"),
    ):
        _, err = main(capfd, "perplexity", tmp_path / "t.txt", "-m", folder, *flags, status=1)
        assert message in err


def test_ctrl_c_prints_what_is_known(
    folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*arguments: Any) -> Any:
        batches = score_batches(*arguments)
        yield next(batches)
        yield next(batches)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "score_batches", interrupted)
    (tmp_path / "t.txt").write_text(TEXT)
    command = ("perplexity", tmp_path / "t.txt", "-m", folder, "--json", "-b", "2")
    out, err = main(capfd, *command, status=130)
    result = json.loads(out)
    assert result["complete"] is False
    assert result["tokens_scored"] == 31 + 3 * 16  # the first window is the longest
    assert "words" not in result
    assert "of 4 of " in err
    file = write_lines(tmp_path / "c.jsonl", QUESTIONS)
    out, _ = main(capfd, "choice", file, "-m", folder, "--json", "-b", "2", status=130)
    assert json.loads(out)["examples"] == 1  # the other question has an answer that is not scored


# After its second batch process 1 interrupts torchrun, which tells all; process 0 is in the middle
# of its work then, or has done it and waits.
INTERRUPTED = """
import os, signal, sys, time
from minigpt2 import evaluate

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
rank, busy, score_batches = os.environ.get("RANK", "1"), sys.argv.pop(1), evaluate.score_batches

def interrupted(*arguments):
    for n, batch in enumerate(score_batches(*arguments)):
        if rank == "0" and busy == "busy" and n == 1:
            time.sleep(60)
        if rank == "1" and n == 2:
            time.sleep(2)
            os.kill(os.getppid() if "RANK" in os.environ else os.getpid(), signal.SIGINT)
            time.sleep(60)
        yield batch

evaluate.score_batches = interrupted
sys.exit(evaluate.main())
"""


@pytest.mark.parametrize(("count", "busy"), [(1, "busy"), (2, "busy"), (2, "idle")])
def test_ctrl_c_from_a_terminal(count: int, busy: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT)
    (tmp_path / "run.py").write_text(INTERRUPTED)
    run = [sys.executable]
    if count > 1:
        run += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    arguments = [
        tmp_path / "run.py",
        busy,
        "perplexity",
        tmp_path / "t.txt",
        "-m",
        folder,
        "--json",
    ]
    root = str(Path(evaluate.__file__).parents[1])
    done = subprocess.run(
        [*run, *map(str, arguments), "-b", "1", "--device", "cpu"],
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=100,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == (130 if count == 1 else 1)  # torchrun's own
    result = json.loads(done.stdout)
    assert result["complete"] is False
    windows_of = list(windows(len(TOKENIZER.encode(TEXT)), 32, 16))
    sizes = sorted((end - first for _, first, end in windows_of), reverse=True)  # as scored
    scored = {1: sizes[:2], 2: sizes[1:4:2] + (sizes[:1] if busy == "busy" else sizes[::2])}
    assert result["tokens_scored"] == sum(scored[count])


def test_nothing_known_prints_nothing(
    folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "score_batches", interrupted)
    (tmp_path / "t.txt").write_text(TEXT)
    out, err = main(capfd, "perplexity", tmp_path / "t.txt", "-m", folder, status=130)
    assert out == ""
    assert "0 of" in err


def test_two_processes_print_what_one_prints(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT)
    root = str(Path(evaluate.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    arguments = ["minigpt2.evaluate", "perplexity", str(tmp_path / "t.txt"), "-m", str(folder)]
    arguments += ["--json", "-b", "3", "--device", "cpu"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    outputs = [
        subprocess.run(
            [*command, "-m", *arguments],
            env=environment,
            capture_output=True,
            timeout=100,
            check=True,
        ).stdout
        for command in ([sys.executable], run)
    ]
    assert json.loads(outputs[0])["tokens_scored"] > 200
    assert outputs[0] == outputs[1]
