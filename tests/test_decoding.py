"""The loop: lengths, batches, ends of text, the context window; and its ids against Hugging
Face's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import differential
import numpy as np
import pytest
import torch
from parity import SIZES, harsh_model
from transformers import GPT2LMHeadModel

from minigpt2 import GPT2, KVCache
from minigpt2.beam import beam_search
from minigpt2.decoding import decode
from minigpt2.options import GenerationOptions
from minigpt2.texts import Request

Draw = Callable[..., torch.Tensor]


@pytest.mark.parametrize("first", range(0, 250, 25))
def test_random_options_give_hugging_faces_ids(first: int) -> None:
    assert [text for seed in range(first, first + 25) if (text := differential.differs(seed))] == []


@pytest.mark.parametrize("seed", [1010, 1019, 1075, 1094, 1107, 1220, 1307, 1559])
def test_beams_that_end_often_give_hugging_faces_ids(seed: int) -> None:
    # A third of the vocabulary ends a text. On these seeds it matters which texts still count once
    # a prompt's search is over, and how many tokens the samplers have to leave.
    case = differential.draw(seed)
    case.options |= {"eos_token_id": list(range(10, 40)), "pad_token_id": 98}
    if case.mask is not None:
        case.ids = case.ids.masked_fill(case.mask == 0, 98)
    assert case.options["num_beams"] > 1
    mine, other = differential.run(case, seed)
    assert mine.tolist() == other.tolist()


def greedy(model: GPT2, ids: torch.Tensor, n: int) -> list[list[int]]:
    """The n tokens of a loop without cache, options or batch."""
    rows = []
    for row in ids:
        text = row[None]
        for _ in range(n):
            with torch.no_grad():
                text = torch.cat([text, model(text)[:, -1].argmax(-1, keepdim=True)], dim=1)
        rows.append(text[0].tolist())
    return rows


def test_generate_equals_the_plain_loop(tiny: GPT2, random_ids: Draw) -> None:
    ids = random_ids(3, 5)
    out = tiny.generate(ids, max_new_tokens=30, eos_token_id=())
    assert out.tolist() == greedy(tiny, ids, 30)


def test_no_forward_pass_after_the_last_token(tiny: GPT2) -> None:
    lengths: list[int] = []
    hook = tiny.register_forward_pre_hook(lambda _module, args: lengths.append(args[0].shape[1]))
    tiny.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, eos_token_id=())
    assert lengths == [3, 1, 1, 1]
    end = tiny.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=1)[0, -1].item()
    lengths.clear()
    tiny.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, eos_token_id=end)
    assert lengths == [3]
    lengths.clear()  # the cache serves to the window's last position
    tiny.generate(torch.ones(1, 60, dtype=torch.long), max_new_tokens=5, eos_token_id=())
    hook.remove()
    assert lengths == [60, 1, 1, 1, 1]


def test_nothing_asked_nothing_done(tiny: GPT2, random_ids: Draw) -> None:
    ids = random_ids(2, 4)
    assert torch.equal(tiny.generate(ids, max_new_tokens=0), ids)
    assert torch.equal(tiny.generate(ids, max_new_tokens=0, num_beams=2), ids)


def test_a1_rows_of_a_padded_batch_equal_their_single_runs(tiny: GPT2, random_ids: Draw) -> None:
    ids = random_ids(3, 8)
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, :7] = 0
    options = {"max_new_tokens": 20, "repetition_penalty": 1.3, "eos_token_id": ()}
    for extra in ({}, {"num_beams": 3}):
        out = tiny.generate(ids, attention_mask=mask, **options, **extra)
        for row, pad in enumerate((0, 3, 7)):
            alone = tiny.generate(ids[row : row + 1, pad:], **options, **extra)
            assert out[row, pad:].tolist() == alone[0].tolist(), (row, extra)


def test_a_row_that_finishes_early_does_not_change_the_others(tiny: GPT2, random_ids: Draw) -> None:
    ids = random_ids(3, 5, seed=3)
    free = tiny.generate(ids, max_new_tokens=12, eos_token_id=())
    end = free[0, 7].item()
    out = tiny.generate(ids, max_new_tokens=12, eos_token_id=end, pad_token_id=0)
    for row in range(3):
        new = free[row, 5:].tolist()
        stop = new.index(end) + 1 if end in new else 12
        expected = (new[:stop] + [0] * 12)[: out.shape[1] - 5]
        assert out[row, 5:].tolist() == expected
    assert out[0, 8:].tolist() == [0] * (out.shape[1] - 8)


def test_several_samples_come_from_one_prefill_and_differ() -> None:
    soft = harsh_model(SIZES["tiny"])
    with torch.no_grad():
        soft.wte.weight.mul_(0.2)
    rows: list[int] = []
    hook = soft.register_forward_pre_hook(lambda _module, args: rows.append(len(args[0])))
    generator = torch.Generator().manual_seed(0)
    out = soft.generate(
        torch.tensor([[1, 2], [3, 4]]), max_new_tokens=5, do_sample=True, num_return_sequences=3,
        eos_token_id=(), generator=generator,
    )  # fmt: skip
    hook.remove()
    assert rows == [2, 6, 6, 6, 6]
    assert out[:, :2].tolist() == [[1, 2]] * 3 + [[3, 4]] * 3
    assert len({tuple(row) for row in out.tolist()}) == 6


def test_a_seed_repeats_a_run_and_the_global_one_serves_by_default(tiny: GPT2) -> None:
    ids = torch.tensor([[5, 6]])

    def run(**options: object) -> list[int]:
        return tiny.generate(ids, max_new_tokens=10, do_sample=True, temperature=3.0, **options)[
            0
        ].tolist()

    first = run(generator=torch.Generator().manual_seed(3))
    assert run(generator=torch.Generator().manual_seed(3)) == first
    torch.manual_seed(3)
    assert run() == first
    assert run(generator=torch.Generator().manual_seed(4)) != first


@pytest.mark.parametrize(("T", "n"), [(64, 1), (63, 2), (1, 64), (63, 1)])
def test_a6_up_to_one_past_the_window_as_hugging_face(
    T: int, n: int, tiny_pair: tuple[GPT2, GPT2LMHeadModel], random_ids: Draw
) -> None:
    ours, theirs = tiny_pair
    ids = random_ids(1, T)
    for overflow in ("stop", "slide", "error"):
        out = ours.generate(ids, max_new_tokens=n, context_overflow=overflow, eos_token_id=())
        assert out.shape == (1, T + n)
        assert torch.equal(out, theirs.generate(ids, max_new_tokens=n, do_sample=False))


@pytest.mark.parametrize(("T", "n"), [(64, 2), (63, 3), (1, 2000)])
def test_a6_beyond_it_stops_slides_or_refuses(T: int, n: int, tiny: GPT2, random_ids: Draw) -> None:
    ids = random_ids(1, T)
    assert tiny.generate(ids, max_new_tokens=n, eos_token_id=()).shape == (1, 65)
    with pytest.raises(ValueError, match=f"{T} prompt tokens . {n} new ones exceed n_positions 64"):
        tiny.generate(ids, max_new_tokens=n, context_overflow="error")


@pytest.mark.parametrize("overflow", ["stop", "error"])
def test_a6_a_prompt_longer_than_the_window_is_refused(
    overflow: str, tiny: GPT2, random_ids: Draw
) -> None:
    with pytest.raises(ValueError, match="prompt's 65 tokens exceed n_positions 64"):
        tiny.generate(random_ids(1, 65), max_new_tokens=1, context_overflow=overflow)


def test_a5_sliding_reads_the_last_window_anew(tiny: GPT2, random_ids: Draw) -> None:
    for T in (60, 64, 70):
        text = random_ids(1, T)
        out = tiny.generate(text, max_new_tokens=12, context_overflow="slide", eos_token_id=())
        for _ in range(12):
            with torch.no_grad():
                text = torch.cat([text, tiny(text[:, -64:])[:, -1].argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(out, text)


def test_a5_sliding_with_left_padding(tiny: GPT2, random_ids: Draw) -> None:
    ids = random_ids(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :55] = 0
    out = tiny.generate(
        ids, attention_mask=mask, max_new_tokens=10, context_overflow="slide", eos_token_id=()
    )
    alone = tiny.generate(ids[1:, 55:], max_new_tokens=10, eos_token_id=())
    assert out[1, 55:].tolist() == alone[0].tolist()


def test_a34_generate_restores_the_mode(tiny: GPT2) -> None:
    model = harsh_model(SIZES["tiny"])
    ids = torch.tensor([[1, 2]])
    for options in ({}, {"num_beams": 2}):
        model.train()
        assert torch.equal(
            model.generate(ids, max_new_tokens=5, eos_token_id=(), **options),
            tiny.generate(ids, max_new_tokens=5, eos_token_id=(), **options),
        )
        assert model.training
        model.eval()
        model.generate(ids, max_new_tokens=5, **options)
        assert not model.training
    steps = decode(Request(model.train(), ids, GenerationOptions(eos_token_id=())))
    next(steps)
    assert not model.training
    steps.close()  # the caller has enough
    assert model.training


def test_threads_that_share_a_model_in_training_mode(tiny: GPT2) -> None:
    """While any thread generates the model has no dropout, though others have ended."""
    model = harsh_model(dataclasses.replace(SIZES["tiny"], resid_pdrop=0.5)).train()
    ids, options = torch.tensor([[1, 2]]), GenerationOptions(eos_token_id=(), max_new_tokens=8)
    first, second = decode(Request(model, ids, options)), decode(Request(model, ids, options))
    tokens = [next(first).token_ids]
    next(second)
    second.close()
    assert not model.training
    tokens += [step.token_ids for step in first]
    assert model.training
    alone = tiny.generate(ids, eos_token_id=(), max_new_tokens=8)
    assert torch.stack(tokens, dim=1).tolist() == alone[:, 2:].tolist()


def test_what_generate_made_can_be_trained_on() -> None:
    model = harsh_model(SIZES["tiny"])
    for options in ({}, {"num_beams": 2}, {"max_new_tokens": 0}):
        out = model.generate(torch.tensor([[1, 2]]), **options)
        model(out).sum().backward()


def test_a11_beams_carry_their_own_cache(tiny: GPT2, random_ids: Draw) -> None:
    ids = random_ids(2, 4)
    options = GenerationOptions(
        max_new_tokens=8, num_beams=3, num_return_sequences=3, eos_token_id=()
    )
    sequences, scores = beam_search(Request(tiny, ids, options))
    for sequence, score in zip(sequences, scores, strict=True):
        with torch.no_grad():
            log_probs = tiny(sequence[None, :-1])[0, 3:].log_softmax(-1)
        total = log_probs.gather(1, sequence[4:, None]).sum()
        assert score.item() == pytest.approx(total.item() / 8, abs=1e-4)
    for row in range(2):
        single, _ = beam_search(Request(tiny, ids[row : row + 1], options))
        assert torch.equal(single, sequences[3 * row : 3 * row + 3])


class Scripted(GPT2):
    """A model of 6 tokens whose next-token probabilities after each text are written down."""

    def __init__(self, table: dict[tuple[int, ...], list[float]]) -> None:
        super().__init__(SIZES["tiny"])
        self.table = table
        self.seen: torch.Tensor | None = None

    def forward(
        self,
        ids: torch.Tensor,
        _mask: object,
        _position_ids: object,
        cache: KVCache,
        logits_to_keep: int,
        _top: int,
    ) -> torch.Tensor:
        assert logits_to_keep == 1
        # The cache carries the ids themselves, so that a cache left unordered gives another text.
        keys = (
            ids[:, None, :, None].expand(-1, cache.keys.shape[2], -1, cache.keys.shape[4]).float()
        )
        past = cache.update(0, keys, keys)[0][:, 0, :, 0].long()
        cache.advance(ids.shape[1])
        rows = [self.table.get(tuple(row), [1 / 6] * 6) for row in past.tolist()]
        return torch.tensor(rows).log()[:, None]


PROMPT = (0,) * 10


def row(**chances: float) -> list[float]:
    """row(t3=0.7): token 3 with 0.7, and the rest on token 0, which leads nowhere good."""
    probabilities = [chances.get(f"t{token}", 0.0) for token in range(6)]
    probabilities[0] = 1 - sum(probabilities)
    return probabilities


def a12_model() -> Scripted:
    """After the prompt: A = [1, 5] of 2 tokens, sum -1.0; B = [2, 3, 4, 5] of 4, sum -1.6."""
    a, b = math.exp(-1.0) / 0.5, (math.exp(-1.6) / 0.45) ** (1 / 3)
    return Scripted(
        {
            PROMPT: row(t1=0.5, t2=0.45),
            (*PROMPT, 1): row(t5=a),
            (*PROMPT, 2): row(t3=b),
            (*PROMPT, 2, 3): row(t4=b),
            (*PROMPT, 2, 3, 4): row(t5=b),
        }
    )


@pytest.mark.parametrize(
    ("length_penalty", "winner", "score"), [(1.0, [2, 3, 4, 5], -0.4), (0.0, [1, 5], -1.0)]
)
def test_a12_length_counts_new_tokens_and_the_end(
    length_penalty: float, winner: list[int], score: float
) -> None:
    options = GenerationOptions(
        max_new_tokens=6,
        num_beams=2,
        eos_token_id=5,
        length_penalty=length_penalty,
        early_stopping="never",
    )
    prompt = torch.zeros(1, 10, dtype=torch.long)
    sequences, scores = beam_search(Request(a12_model(), prompt, options))
    assert sequences[0, 10:].tolist() == winner
    assert scores[0].item() == pytest.approx(score, abs=1e-5)


def test_early_stopping_settings_differ_as_documented() -> None:
    # True stops as soon as K texts have ended; "never" goes on while a longer text could still win.
    prompt = torch.zeros(1, 10, dtype=torch.long)
    table = {
        PROMPT: row(t1=0.6, t2=0.4),
        (*PROMPT, 1): row(t3=0.3, t5=0.7),
        (*PROMPT, 2): row(t3=0.2, t5=0.8),
        (*PROMPT, 1, 3): row(t4=1.0),
        (*PROMPT, 2, 3): row(t4=1.0),
        (*PROMPT, 1, 3, 4): row(t5=1.0),
    }
    lengths = {}
    for early in (True, "never"):
        model = Scripted(table)
        calls: list[int] = []
        model.register_forward_pre_hook(lambda _module, _args, calls=calls: calls.append(1))
        options = GenerationOptions(
            max_new_tokens=8, num_beams=2, eos_token_id=5, length_penalty=2.0, early_stopping=early
        )
        sequences, _ = beam_search(Request(model, prompt, options))
        lengths[early] = (len(calls), sequences[0, 10:].tolist())
    assert lengths[True] == (2, [1, 5])
    assert lengths["never"][1] == [1, 3, 4, 5]
    assert lengths["never"][0] > 2


def test_never_stopping_early_reckons_with_the_present_length_where_long_texts_lose() -> None:
    # Below 0 a penalty makes a text worse with every token. [1, 3] of sum -1.02 may still beat
    # [2, 5], whose score is -1.93 * 2; reckoned with the 6 tokens it might grow to, it could not.
    table = {
        PROMPT: row(t1=0.4, t2=0.29, t5=0.3),
        (*PROMPT, 1): row(t3=0.9),
        (*PROMPT, 2): row(t4=0.4, t5=0.5),
        (*PROMPT, 1, 3): row(t5=0.999),
    }
    options = GenerationOptions(
        max_new_tokens=6,
        num_beams=2,
        num_return_sequences=2,
        eos_token_id=5,
        length_penalty=-1.0,
        early_stopping="never",
    )
    prompt = torch.zeros(1, 10, dtype=torch.long)
    sequences, scores = beam_search(Request(Scripted(table), prompt, options))
    assert sequences[:, 10:].tolist() == [[5, 5, 5], [1, 3, 5]]
    expected = [math.log(0.3), 3 * math.log(0.4 * 0.9 * 0.999)]
    assert scores.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("power", [50, -50, 3])
def test_a_whole_length_penalty_is_as_good_as_any(power: int, tiny: GPT2) -> None:
    ids = torch.tensor([[1, 2]])  # 30**50 is more than 64 bits hold
    whole, real = (
        tiny.generate(ids, num_beams=2, max_new_tokens=30, length_penalty=p)
        for p in (power, float(power))
    )
    assert torch.equal(whole, real)
    assert whole.shape[1] == 32


@pytest.mark.parametrize("eos", [(), (7,)])
@pytest.mark.parametrize(
    "extreme",
    [{"length_penalty": -50}, {"temperature": np.float32(1e-25)}, {"temperature": 1e-320}],
)
def test_scores_below_all_measure_are_texts_all_the_same(
    extreme: dict[str, Any], eos: tuple[int, ...], tiny: GPT2
) -> None:
    """Texts whose scores leave float32, or come below any constant, still beat having no text."""
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 12, "do_sample": True}
    out = tiny.generate(torch.tensor([[1, 2]]), eos_token_id=eos, **options, **extreme)
    assert out.shape[0] == 3
    assert out.shape[1] > 2
    assert ((out >= 0) & (out < 199)).all()
    if not eos:
        assert out.shape[1] == 14


def test_where_beams_find_fewer_texts_the_last_is_repeated(tiny: GPT2) -> None:
    """Two first tokens pass the rules; Hugging Face fills the other rows up with ids of -1."""
    ids = torch.tensor([[1, 2], [3, 4]])
    options = {"do_sample": True, "top_k": 1, "num_beams": 4, "max_new_tokens": 1}
    out = tiny.generate(ids, eos_token_id=(), num_return_sequences=4, **options)
    for texts in out.view(2, 4, 3).tolist():
        assert texts[0] != texts[1]
        assert texts[2] == texts[3] == texts[1]


@pytest.mark.parametrize("do_sample", [True, False])
def test_beams_with_nothing_left_to_pick_are_an_error(do_sample: bool, tiny: GPT2) -> None:
    everything = [[token_id] for token_id in range(199)]
    with pytest.raises(ValueError, match="every token is forbidden"):
        tiny.generate(
            torch.tensor([[1, 2]]), num_beams=2, bad_words_ids=everything, do_sample=do_sample
        )


def test_the_logits_of_beams_are_those_of_the_text_without_its_padding(
    tiny: GPT2, random_ids: Draw
) -> None:
    ids, options = random_ids(1, 5), GenerationOptions(max_new_tokens=4, num_beams=3)
    padded = torch.cat([random_ids(1, 3, seed=1), ids], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 5])
    alone, beside = (
        decode(Request(tiny, *rest)) for rest in ((ids, options), (padded, options, mask))
    )
    for right, step in zip(alone, beside, strict=True):
        assert torch.equal(step.token_ids, right.token_ids)
        torch.testing.assert_close(step.logits, right.logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 0]], "pad prompts on the left"),
        ([[1, 0, 1]], "pad prompts on the left"),
        ([[0, 0, 0]], "pad prompts on the left"),
        ([[0, 1]], r"attention_mask is \(1, 2\), token_ids are \(1, 3\)"),
        ([[1, 1]], r"attention_mask is \(1, 2\), token_ids are \(1, 3\)"),
    ],
)
def test_masks_that_are_not_left_padding_are_refused(
    mask: list[list[int]], message: str, tiny: GPT2
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.generate(torch.tensor([[1, 2, 3]]), attention_mask=torch.tensor(mask))


def test_any_number_but_zero_marks_a_token(tiny: GPT2, random_ids: Draw) -> None:
    ids = random_ids(2, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    assert torch.equal(
        tiny.generate(ids, attention_mask=mask), tiny.generate(ids, attention_mask=7 * mask)
    )


def test_an_end_of_text_outside_the_vocabulary_never_comes(tiny: GPT2, random_ids: Draw) -> None:
    ids = random_ids(1, 4)
    for options in ({}, {"num_beams": 2}):
        assert torch.equal(
            tiny.generate(ids, eos_token_id=500, min_new_tokens=2, max_new_tokens=4, **options),
            tiny.generate(ids, eos_token_id=(), max_new_tokens=4, **options),
        )


def test_an_end_of_text_below_zero_in_a_config_never_comes(random_ids: Draw) -> None:
    ids, config = random_ids(1, 4), dataclasses.replace(SIZES["tiny"], eos_token_id=-1)
    model = harsh_model(config)
    assert torch.equal(
        model.generate(ids, min_new_tokens=2, max_new_tokens=4),
        model.generate(ids, eos_token_id=(), max_new_tokens=4),
    )


def test_padding_is_inferred_from_a_pad_that_is_no_end_of_text(tiny: GPT2) -> None:
    padded = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    inferred = tiny.generate(padded, pad_token_id=0, eos_token_id=3)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert torch.equal(
        inferred, tiny.generate(padded, attention_mask=mask, pad_token_id=0, eos_token_id=3)
    )
    as_text = tiny.generate(padded, pad_token_id=0, eos_token_id=[0, 3])
    assert not torch.equal(inferred[:1], as_text[:1])


def test_unusable_arguments_are_refused(tiny: GPT2) -> None:
    ids = torch.tensor([[1, 2]])
    with pytest.raises(TypeError, match="max_length"):
        tiny.generate(ids, max_length=3)
    with pytest.raises(ValueError, match=r"token_ids must be \(B, T\).*\(1, 0\)"):
        tiny.generate(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\(2,\)"):
        tiny.generate(ids[0])
    with pytest.raises(ValueError, match="num_return_sequences 3 exceeds num_beams 2"):
        tiny.generate(ids, num_beams=2, num_return_sequences=3)
    with pytest.raises(ValueError, match="token id 500 is outside"):
        tiny.generate(torch.tensor([[500]]))
    with pytest.raises(ValueError, match=r"bad_words_ids \[500\]: 500 is outside the vocabulary"):
        tiny.generate(ids, bad_words_ids=[[500]])
    with pytest.raises(ValueError, match="pad_token_id: 500 is outside the vocabulary"):
        tiny.generate(ids, pad_token_id=500)


def test_a_rule_of_ones_own_comes_before_temperature(tiny: GPT2) -> None:
    seen: list[int] = []

    def only_seven(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids.shape[1])
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([7]), 0.0)

    out = tiny.generate(
        torch.tensor([[1, 2]]), max_new_tokens=3, processors=[only_seven], eos_token_id=()
    )
    assert out[0, 2:].tolist() == [7, 7, 7]
    assert seen == [2, 3, 4]


def test_scores_are_float32_whatever_the_models_dtype() -> None:
    model = harsh_model(SIZES["tiny"]).to(torch.bfloat16)
    step = next(decode(Request(model, torch.tensor([[1, 2]]), GenerationOptions())))
    assert step.logits.dtype == torch.float32
