"""Text as it grows: stop strings across tokens, characters across tokens, nothing shown too
early."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import harsh_model

from minigpt2 import GPT2, GPT2Config, Tokenizer, stream
from minigpt2.options import GenerationOptions
from minigpt2.streaming import TextBuilder, TextStep, prompt_ids, stream_rows
from minigpt2.texts import Request

TOKENIZER = Tokenizer.from_pretrained("gpt2")


@pytest.fixture(scope="module")
def model() -> GPT2:
    """GPT-2's vocabulary on a narrow network."""
    return harsh_model(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64))


def forced(text: str | Sequence[int], end: bool = False) -> list[object]:
    """A processor that makes the model say `text`, and then <|endoftext|> if asked."""
    ids = TOKENIZER.encode(text) if isinstance(text, str) else list(text)
    ids = [*ids, 50256] if end else ids
    script = iter(ids)

    def rule(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([next(script)]), 0.0)

    return [len(ids), rule]


def say(
    model: GPT2,
    text: str | Sequence[int],
    stop: Sequence[str] = (),
    prompt: str = "x",
    end: bool = False,
) -> list[TextStep]:
    count, rule = forced(text, end)
    return list(
        stream(model, TOKENIZER, prompt, stop=stop, max_new_tokens=count, processors=[rule])
    )


def build(text: str | Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    builder = TextBuilder(TOKENIZER, stop)
    ids = TOKENIZER.encode(text) if isinstance(text, str) else text
    deltas = []
    for token_id in ids:
        deltas.append(builder.push(token_id))
        if builder.stopped:
            return deltas, True
    deltas.append(builder.flush())
    return deltas, builder.stopped


@pytest.mark.parametrize(
    ("ids", "deltas", "rest"),
    [
        ([50169, 235, 8582, 237, 121], [" ", "\U0001f44d", "", "", "\U0001f3fd"], ""),
        ([47249], [""], "�"),
        ([187, 64], ["�", "a"], ""),
        ([4210, 4210, 64], ["�", "�", "a"], ""),
    ],
)
def test_a15_whole_characters_only(ids: list[int], deltas: list[str], rest: str) -> None:
    shown, _ = build(ids)
    assert shown == [*deltas, rest]
    assert "".join(shown) == TOKENIZER.decode(ids)


def test_a36_a_stop_inside_a_token(model: GPT2) -> None:
    steps = say(model, " is Paris now", stop=["Pari"])
    assert "".join(step.text for step in steps) == " is "
    assert steps[-1].finish_reason == "stop_sequence"
    assert [step.token_id for step in steps] == [318, 6342]


def test_a36_a_stop_across_tokens(model: GPT2) -> None:
    steps = say(model, " alpha beta gamma delta", stop=["beta gamma"])
    assert "".join(step.text for step in steps) == " alpha "
    assert all("beta" not in step.text for step in steps)


def test_a36_a_stop_in_the_prompt_does_not_count(model: GPT2) -> None:
    steps = say(model, " one two", stop=["STOP"], prompt="STOP here")
    assert "".join(step.text for step in steps) == " one two"
    assert steps[-1].finish_reason == "length"


def test_a36_nor_one_that_begins_in_the_prompt(model: GPT2) -> None:
    steps = say(model, "OP it", stop=["STOP"], prompt="ST")
    assert "".join(step.text for step in steps) == "OP it"


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        (" a b c", ["c", "b"], " a "),  # the earliest wins, whatever the order given
        (" a b c", ["b c", "b"], " a "),
        (" aab", ["aab", "ab"], " "),
        (" Paris", ["is", "ar"], " P"),  # also where one token holds both
        ("x", ["x"], ""),
        (" \U0001f44d ok", ["\U0001f44d"], " "),
        (" \U0001f44d ok", ["ok"], " \U0001f44d "),
        ("line\n\nnext", ["\n\n"], "line"),
        ("line\n\nnext", ["\n"], "line"),
        ("aaab", ["aab"], "a"),  # a partial match that fails may hold another one
        ("ababac", ["abac"], "ab"),
    ],
)
def test_a36_stops(text: str, stops: list[str], shown: str) -> None:
    for ids in (
        TOKENIZER.encode(text),
        [TOKENIZER.encode(chr(b))[0] for b in text.encode() if b < 128],
    ):
        if TOKENIZER.decode(ids) == text:
            deltas, stopped = build(ids, stops)
            assert stopped
            assert "".join(deltas) == shown


def test_nothing_is_held_back_longer_than_it_must_be() -> None:
    deltas, stopped = build(TOKENIZER.encode(" be") + TOKENIZER.encode(" better"), ["be good"])
    assert not stopped
    assert deltas == [" ", "be better", ""]
    deltas, _ = build(" cats", ["dog"])
    assert deltas == [" cats", ""]
    deltas, _ = build(" do", ["dog"])
    assert deltas == [" ", "do"]


def test_an_unfinished_character_may_complete_a_stop_at_the_end(model: GPT2) -> None:
    deltas, stopped = build([447], ["�"])
    assert stopped
    assert "".join(deltas) == ""
    steps = say(model, [447], stop=["�"])
    assert [(step.text, step.finish_reason) for step in steps] == [("", "stop_sequence")]


def test_nothing_comes_out_after_a_stop() -> None:
    builder = TextBuilder(TOKENIZER, ["ab"])
    shown = [builder.push(TOKENIZER.encode(letter)[0]) for letter in "xab"]
    assert builder.stopped
    assert [*shown, builder.flush()] == ["x", "", "", ""]


@given(
    text=st.text(alphabet="ab \U0001f44d�\n", max_size=30),
    stops=st.lists(st.text(alphabet="ab \U0001f44d\n", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_the_shown_text_is_the_text_up_to_the_first_stop(text: str, stops: list[str]) -> None:
    deltas, stopped = build(text, stops)
    whole = TOKENIZER.decode(TOKENIZER.encode(text))
    places = [at for at in (whole.find(stop) for stop in stops) if at >= 0]
    assert stopped is bool(places)
    # What later tokens hold is never seen, so an earlier start that completes later cannot win.
    first = min(places, default=len(whole))
    shown = "".join(deltas)
    assert whole.startswith(shown)
    assert len(shown) == first or (stopped and len(shown) > first and len(places) > 1)


def test_an_empty_stop_is_refused(model: GPT2) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        next(stream(model, TOKENIZER, "x", stop=[""]))


def test_the_end_of_text_is_not_shown(model: GPT2) -> None:
    steps = say(model, " one", end=True)
    assert [step.text for step in steps] == [" one", ""]
    assert steps[-1].token_id == 50256
    assert [step.finish_reason for step in steps] == [None, "eos_token"]


def test_ignored_it_is_text_like_any_other(model: GPT2) -> None:
    count, rule = forced([318, 50256, 318])
    steps = list(
        stream(model, TOKENIZER, "x", max_new_tokens=count, processors=[rule], eos_token_id=())
    )
    assert "".join(step.text for step in steps) == " is<|endoftext|> is"


def test_what_is_held_comes_out_at_the_end(model: GPT2) -> None:
    assert "".join(step.text for step in say(model, " st", stop=["stop"])) == " st"
    assert "".join(step.text for step in say(model, [318, 447])) == " is�"
    assert "".join(step.text for step in say(model, [318, 447], end=True)) == " is�"


def test_a38_an_empty_prompt_starts_from_the_end_of_text(model: GPT2) -> None:
    assert prompt_ids(TOKENIZER, "") == [50256]
    empty = [step.token_id for step in stream(model, TOKENIZER, "", max_new_tokens=5)]
    assert empty == [step.token_id for step in stream(model, TOKENIZER, [50256], max_new_tokens=5)]
    assert prompt_ids(TOKENIZER, "\n") == [198]


def test_logprobs_are_the_models_own(model: GPT2) -> None:
    steps = list(
        stream(
            model,
            TOKENIZER,
            "Hi",
            max_new_tokens=3,
            top_logprobs=4,
            do_sample=True,
            temperature=0.5,
            top_k=3,
            generator=torch.Generator().manual_seed(0),
        )
    )
    ids = TOKENIZER.encode("Hi")
    for step in steps:
        with torch.no_grad():
            log_probs = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
        assert step.logprob == pytest.approx(log_probs[step.token_id].item(), abs=1e-4)
        best = log_probs.topk(4)
        assert [token_id for token_id, _ in step.top_logprobs] == best.indices.tolist()
        assert [value for _, value in step.top_logprobs] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )
        ids.append(step.token_id)


def test_rows_end_each_at_its_own_stop(model: GPT2) -> None:
    script = iter([[318, 6342], [262, 318], [6342, 318], [318, 318]])

    def rule(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).scatter(
            1, torch.tensor(next(script))[:, None], 0.0
        )

    texts = ["", ""]
    reasons: list[str | None] = [None, None]
    rows: Iterator[dict[int, TextStep]] = stream_rows(
        Request(
            model,
            torch.tensor([TOKENIZER.encode("x")]),
            GenerationOptions(max_new_tokens=4, num_return_sequences=2),
            processors=[rule],
        ),
        TOKENIZER,
        stop="Paris",
    )
    count = 0
    for count, step in enumerate(rows, start=1):  # noqa: B007 (used below)
        for row, text_step in step.items():
            texts[row] += text_step.text
            reasons[row] = text_step.finish_reason
    assert texts == [" is the ", " "]
    assert reasons == ["stop_sequence", "stop_sequence"]
    assert count == 3  # and not one step more


@pytest.mark.parametrize("unused", [50257, 50300])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a29_ids_beyond_the_tokenizer_are_never_picked(do_sample: bool, unused: int) -> None:
    padded = harsh_model(
        GPT2Config(vocab_size=50304, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    )
    with torch.no_grad():
        padded.ln_f.weight.zero_()
        padded.ln_f.bias.fill_(1.0)
        padded.wte.weight[unused] = 10.0  # scores highest by far
        assert padded(torch.tensor([[1]]))[0, -1].argmax() == unused
    steps = list(stream(padded, TOKENIZER, "x", max_new_tokens=5, do_sample=do_sample, top_k=200))
    assert all(step.token_id < 50257 for step in steps)
    hostile = [lambda _ids, scores: scores.masked_fill(torch.arange(50304) == unused, 1e4)]
    steps = list(stream(padded, TOKENIZER, "x", max_new_tokens=2, processors=hostile))
    assert all(step.token_id < 50257 for step in steps)


def test_an_assistant_helps_a_stream(model: GPT2) -> None:
    helper = harsh_model(model.config)
    calls: list[int] = []
    helper.register_forward_pre_hook(lambda _module, args: calls.append(args[0].shape[1]))
    options = {"max_new_tokens": 4, "eos_token_id": ()}
    helped = list(stream(model, TOKENIZER, "x", assistant_model=helper, **options))
    plain = list(stream(model, TOKENIZER, "x", **options))
    assert [step.token_id for step in helped] == [step.token_id for step in plain]
    assert calls
