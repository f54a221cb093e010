"""Any combination of options: what makes sense works, the rest is refused before the model runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import harsh_model

from minigpt2 import GPT2Config, generate

V = 199
SHAPE = GPT2Config(vocab_size=V, n_positions=16, n_embd=16, n_layer=1, n_head=2)
MODELS = {kind: harsh_model(SHAPE) for kind in (None, "exact", "int8")}
for kind, model in MODELS.items():
    if kind:
        model.pack(kind)
SMALL = harsh_model(GPT2Config(vocab_size=V, n_positions=8, n_embd=8, n_layer=1, n_head=2))

# Values that are fine by themselves, and values that never are.
GOOD: dict[str, list[Any]] = {
    "max_new_tokens": [0, 1, 3, 7, 12],
    "min_new_tokens": [0, 2, 100],
    "do_sample": [False, True],
    "temperature": [0, 1e-40, 1e-30, 1e-3, np.float32(0.7), 1, 3.5, 1e30],
    "top_k": [0, 1, np.int64(5), V, 10**9],
    "top_p": [0, 1e-9, 0.5, 1],
    "min_p": [0, 0.1, 1],
    "repetition_penalty": [1e-4, 0.5, 1, 1.5, 1e4],
    "no_repeat_ngram_size": [0, 1, 2, 50],
    "bad_words_ids": [[], [[3]], [[0, 1], [7, 7, 7]], [[5]] * 3],
    "num_return_sequences": [1, 2, 3],
    "num_beams": [1, 2, np.int64(3), 5],
    "length_penalty": [-50, -1, 0, 1.0, 50],
    "early_stopping": [True, False, "never"],
    "prompt_lookup_num_tokens": [None, 0, 3],
    "max_matching_ngram_size": [1, 4],
    "num_assistant_tokens": [1, 6],
    "eos_token_id": [None, (), np.int64(7), [7, 8, 9], 10**6],
    "pad_token_id": [None, 0, np.int64(7)],
    "context_overflow": ["stop", "slide", "error"],
}
COUNT, NUMBER = [-1, 1.0, "1", None, True, [1]], [-1, math.nan, math.inf, "1", None, [1.0]]
FROM_ONE = ("num_return_sequences", "num_beams", "max_matching_ngram_size", "num_assistant_tokens")
BAD: dict[str, list[Any]] = {
    "max_new_tokens": COUNT,
    "min_new_tokens": COUNT,
    "top_k": COUNT,
    "no_repeat_ngram_size": COUNT,
    "prompt_lookup_num_tokens": [value for value in COUNT if value is not None],
    **{name: [*COUNT, 0] for name in FROM_ONE},
    "do_sample": ["yes", 1, None],
    "temperature": [*NUMBER, 1e31],
    "top_p": [*NUMBER, 1.01],
    "min_p": [*NUMBER, 2],
    "repetition_penalty": [*NUMBER, 0, 1e-30, 1e30],
    "length_penalty": [math.nan, math.inf, -math.inf, 51, "1", None],
    "early_stopping": [1, 0, "true", None, []],
    "bad_words_ids": [[[]], [3], [[-1]], [["a"]], [[1.0]], 5, None, [[V]], "ab"],
    "eos_token_id": [-1, 1.0, "7", "", True, [[7]], {7}],
    "pad_token_id": [-1, 1.0, "7", True, [7], V],
    "context_overflow": ["crop", None, 3],
}


def contradiction(options: dict[str, Any], T: int, assisted: bool) -> bool:
    """Whether good values exclude each other."""
    beams, rows = options.get("num_beams", 1), options.get("num_return_sequences", 1)
    lookup = (options.get("prompt_lookup_num_tokens") or 0) > 0
    guesses = assisted or lookup
    strict = options.get("context_overflow") == "error"
    return (
        1 < beams < rows
        or (guesses and (beams > 1 or rows > 1))
        or (assisted and lookup)
        or (strict and T + options.get("max_new_tokens", 20) > 17)
    )


def runs(
    ids: torch.Tensor, options: dict[str, Any], assisted: bool = False, kind: str | None = None
) -> torch.Tensor:
    """What generate gives under one seed; a refusal must come before the models run."""
    calls: list[int] = []
    hooks = [
        model.register_forward_pre_hook(lambda *_: calls.append(1))
        for model in (MODELS[kind], SMALL)
    ]
    assistant = SMALL if assisted else None
    generator = torch.Generator().manual_seed(5)
    try:
        return MODELS[kind].generate(ids, generator=generator, assistant_model=assistant, **options)
    except ValueError as error:
        raise error if not calls else AssertionError("the model ran before it") from error
    finally:
        for hook in hooks:
            hook.remove()


@st.composite
def chosen(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(GOOD)), unique=True, max_size=9))
    return {name: draw(st.sampled_from(GOOD[name])) for name in names}


@given(
    chosen(), st.integers(1, 12), st.booleans(), st.sampled_from(list(MODELS)),
    st.randoms(use_true_random=False),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_good_options_work_and_contradictions_are_refused_beforehand(
    options: dict[str, Any], T: int, assisted: bool, kind: str | None, r: Any
) -> None:
    ids = torch.tensor([[r.randrange(10, V) for _ in range(T)]])
    ids[0, : r.randrange(T)] = 0  # padding, where pad_token_id says so
    if contradiction(options, T, assisted):
        with pytest.raises(ValueError, match=r"exceed|speculative|guesses"):
            runs(ids, options, assisted, kind)
        return
    out = runs(ids, options, assisted, kind)
    rows, longest = options.get("num_return_sequences", 1), options.get("max_new_tokens", 20)
    assert len(out) == rows
    assert T <= out.shape[1] <= T + longest
    assert torch.equal(out[:, :T], ids.repeat(rows, 1))
    assert 0 <= int(out.min()) <= int(out.max()) < V
    assert torch.equal(runs(ids, options, assisted, kind), out)


@given(chosen(), st.data())
@settings(max_examples=100, deadline=None)
def test_one_bad_value_is_refused_beforehand(options: dict[str, Any], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(BAD)))
    value = data.draw(st.sampled_from(BAD[name]))
    if name == "pad_token_id" or name == "bad_words_ids":
        options = {}  # so that no contradiction is named instead
    with pytest.raises(ValueError, match=name):
        runs(torch.tensor([[1, 2, 3]]), {name: value})
    with pytest.raises(ValueError):  # noqa: PT011 (either of two faults may be named)
        runs(torch.tensor([[1, 2, 3]]), options | {name: value})


# The same of the command line, as text.
GOOD_FLAGS = {
    "-n": ["0", "3"],
    "--min-new-tokens": ["0", "2"],
    "--do-sample": [None],
    "-t": ["0", "0.7", "1e-40"],
    "--top-k": ["0", "40", "99999999"],
    "--top-p": ["0", "0.9", "1"],
    "--min-p": ["0", "0.1"],
    "--repetition-penalty": ["0.9", "1.2"],
    "--no-repeat-ngram-size": ["0", "2"],
    "-s": ["0", str(2**63 - 1)],
    "--num-return-sequences": ["1", "2"],
    "--num-beams": ["1", "2"],
    "--length-penalty": ["-1", "0", "2"],
    "--early-stopping": ["true", "false", "never"],
    "--prompt-lookup": ["0", "2"],
    "--stop": ["x", "\n", "\udcff"],
    "--ignore-eos": [None],
    "--context-overflow": ["stop", "slide"],
    "--no-stream": [None],
    "--no-echo": [None],
    "--json": [None],
    "--dtype": ["float32", "bfloat16", "float16"],
    "--plain-special": [None],
    "--color": ["always", "never"],
    "-q": [None],
}
NOT_COUNTS = ["-1", "1.5", "x", "", "nan", "1e3"]
BAD_FLAGS = {
    "-n": NOT_COUNTS,
    "--min-new-tokens": NOT_COUNTS,
    "-t": ["-1", "nan", "inf", "x", "1e31"],
    "--top-k": NOT_COUNTS,
    "--top-p": ["-0.1", "1.1", "nan", "x"],
    "--min-p": ["-0.1", "1.1", "nan", "x"],
    "--repetition-penalty": ["0", "-1", "nan", "inf", "x"],
    "--no-repeat-ngram-size": NOT_COUNTS,
    "-s": ["-1", "1.5", str(2**63), "x"],
    "--num-return-sequences": [*NOT_COUNTS, "0"],
    "--num-beams": [*NOT_COUNTS, "0"],
    "--length-penalty": ["nan", "inf", "51"],
    "--early-stopping": ["True", "0", ""],
    "--prompt-lookup": NOT_COUNTS,
    "--stop": [""],
    "--context-overflow": ["crop", ""],
    "--logprobs": ["-1", "51", "x"],
    "--dtype": ["int8", ""],
    "--color": ["blue"],
    "--no-such-flag": [None],
    "second": [None],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, eos_token_id=50256)
    harsh_model(config).save_pretrained(path)
    return path


def arguments(flags: dict[str, str | None]) -> list[str]:
    return [part for pair in flags.items() for part in pair if part is not None]


def status(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    try:
        code = generate.main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, *capsys.readouterr()


@st.composite
def flags(draw: st.DrawFn) -> dict[str, str | None]:
    names = draw(st.lists(st.sampled_from(sorted(GOOD_FLAGS)), unique=True, max_size=6))
    return {name: draw(st.sampled_from(GOOD_FLAGS[name])) for name in names}


def test_any_flags_of_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @given(flags())
    @settings(max_examples=40, deadline=None)
    def good(given_flags: dict[str, str | None]) -> None:
        beams, rows = (
            int(given_flags.get(flag) or 1) for flag in ("--num-beams", "--num-return-sequences")
        )
        guesses = given_flags.get("--prompt-lookup", "0") != "0"
        argv = ["Hello there", "-m", str(folder), "-n", "4", *arguments(given_flags)]
        code, out, err = status(argv, capsys)
        if 1 < beams < rows or (guesses and beams * rows > 1):
            assert (code, out, err.count("\n")) == (2, "", 1)
        else:
            assert code == 0, err
            assert out

    good()


def test_one_bad_flag_is_refused_before_there_is_a_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @given(flags(), st.sampled_from(sorted(BAD_FLAGS)), st.data())
    @settings(max_examples=100, deadline=None)
    def bad(given_flags: dict[str, str | None], name: str, data: st.DataObject) -> None:
        value = data.draw(st.sampled_from(BAD_FLAGS[name]))
        given_flags = {key: flag for key, flag in given_flags.items() if key != name}
        argv = ["Hello", "-m", "/no/such/model", *arguments(given_flags | {name: value})]
        code, out, err = status(argv, capsys)
        assert (code, out, err.count("\n")) == (2, "", 1), (argv, err)

    bad()
