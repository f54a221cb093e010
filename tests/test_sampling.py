"""Every rule on hand-made scores, at its boundaries, and against Hugging Face's own processors."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.generation import logits_process as hf

from minigpt2 import sampling
from minigpt2.options import GenerationOptions

NO_IDS = torch.zeros(1, 0, dtype=torch.long)


def scores_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def kept(scores: torch.Tensor) -> list[int]:
    return torch.isfinite(scores[0]).nonzero().flatten().tolist()


def random_scores(B: int, V: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(B, V, generator=torch.Generator().manual_seed(seed)) * spread


def test_a7_penalty_divides_positive_and_multiplies_negative_scores_once() -> None:
    scores = torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    ids = torch.tensor([[0, 1, 1, 1]])
    assert sampling.repetition_penalty(scores, ids, 2.0).tolist() == [[1.0, -4.0, 1.0, -1.0]]
    assert scores.tolist() == [[2.0, -2.0, 1.0, -1.0]]


def test_padding_does_not_count_as_seen() -> None:
    scores = torch.tensor([[2.0, 2.0, 2.0]] * 2)
    ids = torch.tensor([[0, 0, 1], [0, 2, 1]])
    result = sampling.repetition_penalty(scores, ids, 2.0, pads=torch.tensor([2, 0]))
    assert result.tolist() == [[2.0, 1.0, 2.0], [1.0, 1.0, 1.0]]
    theirs = hf.RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=torch.tensor([2, 0]))
    assert torch.equal(result, theirs(ids, scores.clone()))


@pytest.mark.parametrize(
    ("probabilities", "p", "expected"),
    [
        ((0.5, 0.25, 0.125, 0.125), 0.0, 1),
        ((0.5, 0.25, 0.125, 0.125), 1e-9, 1),
        ((0.5, 0.25, 0.125, 0.125), 0.5, 1),
        ((0.5, 0.25, 0.125, 0.125), 0.75, 2),
        ((0.5, 0.25, 0.125, 0.125), 0.7500001, 3),
        ((0.5, 0.25, 0.125, 0.125), 0.8, 3),
        ((0.1, 0.2, 0.3, 0.4), 0.3, 1),
        ((0.1, 0.2, 0.3, 0.4), 0.5, 2),
        ((0.1, 0.2, 0.3, 0.4), 0.95, 4),
    ],
)
def test_a8_top_p_keeps_the_smallest_set_that_reaches_p(
    probabilities: tuple[float, ...], p: float, expected: int
) -> None:
    left = kept(sampling.top_p(scores_of(*probabilities), p))
    assert len(left) == expected
    assert sum(probabilities[i] for i in left) >= p - 1e-6
    best = sorted(range(4), key=lambda i: -probabilities[i])
    assert set(left) == set(best[:expected]) or expected == 3  # either of the two that tie


def test_a8_top_p_never_empties_a_large_vocabulary() -> None:
    scores = random_scores(4, 50257)
    for p in (0.0, 1e-8, 1e-3):
        result = sampling.top_p(scores, p)
        assert (torch.isfinite(result).sum(dim=-1) >= 1).all()
        assert torch.equal(result.argmax(-1), scores.argmax(-1))


def test_a9_every_row_of_a_batch_is_cooled_by_itself() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0], [10.0, 11.0, 11.5]])
    cooled = sampling.temperature(scores, 1e-40)
    assert cooled.argmax(dim=-1).tolist() == [0, 2]
    assert cooled.amax(dim=-1).tolist() == [0.0, 0.0]


def test_a9_tiny_temperatures_are_argmax_without_nan() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, -math.inf]])
    for t in (1e-8, 1e-30, 1e-40, 5e-324):
        probs = sampling.temperature(scores, t).softmax(-1)
        assert probs.tolist() == [[1.0, 0.0, 0.0, 0.0]], t
    assert sampling.temperature(scores, 0.5)[0, :3].tolist() == [6.0, 4.0, 2.0]
    tie = sampling.temperature(torch.tensor([[3.0, 3.0, 1.0]]), 1e-40).softmax(-1)
    assert tie.tolist() == [[0.5, 0.5, 0.0]]
    nothing = torch.full((1, 3), -math.inf)
    assert torch.equal(sampling.temperature(nothing, 1e-40), nothing)  # to be named as forbidden


def test_a10_top_k_keeps_ties_and_clamps() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert kept(sampling.top_k(scores, 1)) == [1, 2]
    assert kept(sampling.top_k(scores, 3)) == [1, 2, 3]
    assert kept(sampling.top_k(scores, 4)) == [0, 1, 2, 3]
    assert kept(sampling.top_k(scores, 100_000)) == [0, 1, 2, 3]
    assert kept(sampling.top_k(scores, 1, min_tokens_to_keep=3)) == [1, 2, 3]


def test_min_p_is_relative_to_the_most_probable() -> None:
    scores = scores_of(0.5, 0.25, 0.125, 0.125)
    assert kept(sampling.min_p(scores, 0.4)) == [0, 1]
    assert kept(sampling.min_p(scores, 1.0)) == [0]
    assert len(kept(sampling.min_p(scores, 1.0, min_tokens_to_keep=2))) == 2
    assert len(kept(sampling.min_p(scores, 1.0, min_tokens_to_keep=9))) == 4
    assert kept(sampling.min_p(torch.tensor([[1.0, 1.0, 0.0]]), 1.0)) == [0, 1]  # ties stay


def test_no_repeat_ngram() -> None:
    scores = torch.zeros(2, 6)
    ids = torch.tensor([[1, 2, 3, 1, 2], [1, 2, 1, 2, 4]])
    result = sampling.no_repeat_ngram(scores, ids, 3)
    assert torch.isneginf(result[0]).nonzero().flatten().tolist() == [3]
    assert kept(result[1:]) == list(range(6))
    assert torch.isneginf(
        sampling.no_repeat_ngram(scores, ids, 1)[0]
    ).nonzero().flatten().tolist() == [1, 2, 3]
    assert torch.equal(sampling.no_repeat_ngram(scores, ids[:, :1], 3), scores)  # too short for one


def test_forbid_words_needs_the_start_of_a_word() -> None:
    scores = torch.zeros(2, 6)
    ids = torch.tensor([[1, 2], [2, 1]])
    result = sampling.forbid_words(scores, ids, [[5], [2, 3], [0, 1, 2, 4]])
    assert torch.isneginf(result[0]).nonzero().flatten().tolist() == [3, 5]
    assert torch.isneginf(result[1]).nonzero().flatten().tolist() == [5]
    longer = [[1, 1, 1, 4]]  # than the text, whose one token must not stand for three
    assert torch.equal(sampling.forbid_words(scores, ids, longer), scores)


@pytest.mark.parametrize("seed", range(20))
def test_every_rule_is_hugging_faces_bit_for_bit(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = random_scores(3, 50, seed, spread=1 + seed / 4)
    scores[0, :10] = scores[0, 10:20]  # ties
    ids = torch.randint(8, (3, 12), generator=generator)
    p = torch.rand(1, generator=generator).item()
    k = 1 + seed
    eos = torch.tensor([4])
    pairs = [
        (
            sampling.repetition_penalty(scores, ids, 0.5 + p),
            hf.RepetitionPenaltyLogitsProcessor(0.5 + p),
        ),
        (
            sampling.no_repeat_ngram(scores, ids, 1 + seed % 3),
            hf.NoRepeatNGramLogitsProcessor(1 + seed % 3),
        ),
        (
            sampling.forbid_words(scores, ids, [[1, 2], [3]]),
            hf.NoBadWordsLogitsProcessor([[1, 2], [3]], eos),
        ),
        (sampling.temperature(scores, 0.1 + p), hf.TemperatureLogitsWarper(0.1 + p)),
        (sampling.top_k(scores, k), hf.TopKLogitsWarper(k)),
        (sampling.top_p(scores, p), hf.TopPLogitsWarper(p)),
        (sampling.top_p(scores, p, 3), hf.TopPLogitsWarper(p, min_tokens_to_keep=3)),
        (sampling.min_p(scores, p), hf.MinPLogitsWarper(p)),
        (sampling.min_p(scores, p, 3), hf.MinPLogitsWarper(p, min_tokens_to_keep=3)),
    ]
    for ours, theirs in pairs:
        assert torch.equal(ours, theirs(ids, scores.clone())), theirs


def test_the_order_of_the_rules() -> None:
    names: list[str] = []

    def user(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        names.append("user")
        assert ids.shape == (1, 3)
        assert scores[0, 1] == pytest.approx(
            math.log(0.3) * 2
        )  # after the penalty, before temperature
        return scores

    options = GenerationOptions(
        do_sample=True, temperature=0.5, top_k=3, top_p=0.9, min_p=0.01, repetition_penalty=2.0
    )
    rules = sampling.processors(options, 3, None, [], [user])
    assert len(rules) == 6
    scores = scores_of(0.4, 0.3, 0.2, 0.1)
    ids = torch.tensor([[1, 1, 1]])
    for rule in rules:
        scores = rule(ids, scores)
    assert names == ["user"]
    assert sampling.processors(GenerationOptions(), 3, None, [0]) == []
    # Greedy decoding ignores what only shapes a draw.
    greedy = GenerationOptions(do_sample=True, temperature=0.0, top_k=3, top_p=0.5, min_p=0.1)
    assert sampling.processors(greedy, 3, None, [0]) == []


def test_min_new_tokens_counts_from_the_prompt() -> None:
    (rule,) = sampling.processors(GenerationOptions(min_new_tokens=2), 3, None, [1])
    scores = torch.zeros(1, 3)
    for length, allowed in ((3, False), (4, False), (5, True)):
        result = rule(torch.zeros(1, length, dtype=torch.long), scores)
        assert bool(torch.isfinite(result[0, 1])) is allowed
        assert torch.isfinite(result[0, [0, 2]]).all()


def test_rules_of_ones_own_see_the_end_of_text_forbidden() -> None:
    seen: list[torch.Tensor] = []

    def user(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores)
        return scores

    rules = sampling.processors(GenerationOptions(min_new_tokens=2), 1, None, [1], [user])
    sampling.apply(rules, torch.tensor([[0]]), torch.zeros(1, 3))
    assert kept(seen[0]) == [0, 2]


def test_bad_words_that_are_an_end_of_text_are_dropped() -> None:
    options = GenerationOptions(bad_words_ids=[[1], [1, 2]])
    (rule,) = sampling.processors(options, 1, None, [1])
    assert kept(rule(torch.tensor([[0]]), torch.zeros(1, 3))) == [0, 1, 2]
    assert kept(rule(torch.tensor([[1]]), torch.zeros(1, 3))) == [0, 1]
    assert sampling.processors(GenerationOptions(bad_words_ids=[[1], [2]]), 1, None, [1, 2]) == []


def test_pick_takes_the_first_of_equals_and_draws_by_probability() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0], [2.0, 1.0, 0.0]])
    assert sampling.pick(scores, sample=False).tolist() == [1, 0]
    generator = torch.Generator().manual_seed(0)
    many = scores_of(0.7, 0.2, 0.1).expand(20_000, 3)
    counts = sampling.pick(many, True, generator).bincount(minlength=3) / 20_000
    torch.testing.assert_close(counts, torch.tensor([0.7, 0.2, 0.1]), atol=0.015, rtol=0)


@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_scores_without_a_highest_number_are_an_error(score: float, sample: bool) -> None:
    with pytest.raises(ValueError, match="not numbers: try it in float32"):
        sampling.pick(torch.tensor([[0.0, 1.0], [score, 0.0]]), sample)


@pytest.mark.parametrize("sample", [True, False])
def test_nothing_left_to_pick_is_an_error(sample: bool) -> None:
    scores = torch.tensor([[0.0, 1.0], [-math.inf, -math.inf]])
    with pytest.raises(ValueError, match="every token is forbidden"):
        sampling.pick(scores, sample)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.5),
        ("min_new_tokens", -1),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.nan),
        ("no_repeat_ngram_size", -1),
        ("num_return_sequences", 0),
        ("num_beams", 0),
        ("prompt_lookup_num_tokens", -1),
        ("max_matching_ngram_size", 0),
        ("num_assistant_tokens", 0),
        ("repetition_penalty", math.inf),
        ("length_penalty", math.inf),
        ("length_penalty", 1000),
        ("eos_token_id", -1),
        ("eos_token_id", [1.5]),
        ("eos_token_id", True),
        ("eos_token_id", "x"),
        ("pad_token_id", -5),
        ("pad_token_id", 1.0),
        ("length_penalty", math.nan),
        ("early_stopping", "always"),
        ("context_overflow", "crop"),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", [[-1]]),
    ],
)
def test_options_out_of_range_are_refused_with_the_number(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be") as caught:
        GenerationOptions(**{name: value})  # type: ignore[arg-type]
    assert str(value) in str(caught.value)
