"""Guessing changes the speed of a text, and neither greedy ids nor how draws are distributed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from parity import SIZES, harsh_model

from minigpt2 import GPT2, Tokenizer, stream
from minigpt2.options import GenerationOptions
from minigpt2.speculative import ModelGuesser, lookup, speculate
from minigpt2.texts import Request

Draw = Callable[..., torch.Tensor]
TINY = SIZES["tiny"]


@pytest.fixture(scope="module")
def double() -> GPT2:
    """In float64, where several rows round like one as far as ids can tell."""
    return harsh_model(TINY).double()


@pytest.fixture(scope="module")
def assistant() -> GPT2:
    """Agrees with the model often, not always."""
    other = harsh_model(TINY).double()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter) * parameter.abs().mean())
    return other


@pytest.mark.parametrize(
    ("ids", "k", "longest", "guesses"),
    [
        ([1, 2, 3, 1, 2], 3, 2, [3, 1, 2]),
        ([1, 2, 3, 1, 2], 1, 2, [3]),
        ([5, 2, 3, 1, 2], 3, 2, [3, 1, 2]),  # only the last token is found
        ([1, 2, 9, 4, 1, 2, 8, 4, 1, 2], 2, 2, [8, 4]),  # the last place that k tokens follow
        ([1, 2, 9, 4, 1, 2], 9, 2, [9, 4, 1, 2]),  # or all there are
        ([1, 2, 3], 3, 2, []),
        ([7], 3, 2, []),
        ([7, 7], 3, 2, [7]),
        ([7, 7, 7, 7], 2, 1, [7, 7]),
        ([1, 2, 3, 5, 2, 4, 1, 2], 1, 2, [3]),  # two tokens found decide before one found later
        ([1, 2, 3, 5, 2, 4, 1, 2], 1, 1, [4]),
        ([5, 2, 9, 4, 2, 8, 2], 2, 1, [8, 2]),  # k tokens follow, and the text ends with them
    ],
)
def test_lookup(ids: list[int], k: int, longest: int, guesses: list[int]) -> None:
    assert lookup(torch.tensor([ids]), k, longest).tolist() == [guesses]


@pytest.mark.parametrize("k", [1, 3, 10])
def test_greedy_ids_are_unchanged(k: int, double: GPT2, assistant: GPT2, random_ids: Draw) -> None:
    for seed in range(3):
        ids = random_ids(1, 3 + 8 * seed, seed=seed)
        for options in ({}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}):
            plain = double.generate(ids, max_new_tokens=40, eos_token_id=(), **options)
            looked = double.generate(
                ids, max_new_tokens=40, eos_token_id=(), prompt_lookup_num_tokens=k, **options
            )
            helped = double.generate(
                ids, max_new_tokens=40, eos_token_id=(), num_assistant_tokens=k,
                assistant_model=assistant, **options,
            )  # fmt: skip
            assert looked.tolist() == plain.tolist() == helped.tolist()


def test_they_stop_at_the_same_end(double: GPT2, assistant: GPT2) -> None:
    ids = torch.tensor([[1, 2, 3]])
    free = double.generate(ids, max_new_tokens=30, eos_token_id=())
    end = free[0, 20].item()
    plain = double.generate(ids, max_new_tokens=30, eos_token_id=end)
    assert (
        plain.tolist()
        == double.generate(
            ids, max_new_tokens=30, eos_token_id=end, prompt_lookup_num_tokens=8
        ).tolist()
    )
    assert (
        plain.tolist()
        == double.generate(
            ids, max_new_tokens=30, eos_token_id=end, assistant_model=assistant
        ).tolist()
    )


def test_to_the_window_and_beyond(double: GPT2, assistant: GPT2, random_ids: Draw) -> None:
    ids = random_ids(1, 50)
    for overflow, n in (("stop", 100), ("slide", 40)):
        options = {"max_new_tokens": n, "context_overflow": overflow, "eos_token_id": ()}
        plain = double.generate(ids, **options)
        assert torch.equal(plain, double.generate(ids, prompt_lookup_num_tokens=6, **options))
        assert torch.equal(plain, double.generate(ids, assistant_model=assistant, **options))


def test_fewer_passes_where_the_text_repeats() -> None:
    model = harsh_model(TINY)
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.copy_(model.wte.weight[7])  # says 7 for ever
    calls: list[int] = []
    hook = model.register_forward_pre_hook(lambda _module, args: calls.append(args[0].shape[1]))
    out = model.generate(
        torch.tensor([[7, 7]]), max_new_tokens=41, eos_token_id=(), prompt_lookup_num_tokens=9
    )
    hook.remove()
    assert out.tolist() == [[7] * 43]
    assert len(calls) <= 8  # 1 to 10 tokens a pass, instead of 41 passes


def test_a_perfect_assistant_is_always_believed(double: GPT2) -> None:
    ids = torch.tensor([[5, 6, 7]])
    calls: list[int] = []
    hook = double.register_forward_pre_hook(lambda _module, args: calls.append(args[0].shape[1]))
    options = GenerationOptions(max_new_tokens=24, num_assistant_tokens=5, eos_token_id=())
    twin = harsh_model(TINY).double()
    list(speculate(Request(double, ids, options, assistant_model=twin)))
    hook.remove()
    assert calls == [8, 6, 6, 6]  # 24 tokens, six a pass; only what is new is fed


def two_tokens(model: GPT2, count: int, **options: object) -> Counter[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([[3, 9, 4, 3, 9]])
    found: Counter[tuple[int, ...]] = Counter()
    for _ in range(count):
        out = model.generate(
            ids, max_new_tokens=3, do_sample=True, generator=generator, eos_token_id=(), **options
        )
        found[tuple(out[0, 5:7].tolist())] += 1
    return found


@pytest.mark.parametrize("rules", [{"top_k": 4}, {"temperature": 0.7, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize("how", ["lookup", "assistant"])
def test_drawn_texts_are_distributed_as_without(how: str, rules: dict[str, float]) -> None:
    # Pearson's chi-squared over the pairs of tokens against the model's own probabilities. The seed
    # is fixed; with a random one, a right implementation would fail once in 10,000 runs.
    config = dataclasses.replace(TINY, vocab_size=12, n_layer=1)
    model = harsh_model(config)
    helper = harsh_model(config, seed=9)
    with torch.no_grad():
        model.wte.weight.mul_(0.15)
        helper.wte.weight.mul_(0.15)
    count = 800
    extra: dict[str, object] = (
        {"prompt_lookup_num_tokens": 2} if how == "lookup" else {"assistant_model": helper}
    )
    found = two_tokens(model, count, **rules, **extra)
    expected = pair_probabilities(model, rules)
    assert set(found) <= set(expected)
    large = {pair: p * count for pair, p in expected.items() if p * count >= 5}
    rest = count - sum(large.values())
    statistic = sum((found[pair] - n) ** 2 / n for pair, n in large.items())
    if rest >= 5:
        others = count - sum(found[pair] for pair in large)
        statistic += (others - rest) ** 2 / rest
    degrees = len(large) - (rest < 5)
    # Wilson and Hilferty's approximation of the 99.99 % point.
    bound = degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert degrees >= 5
    assert statistic < bound


def pair_probabilities(model: GPT2, rules: dict[str, float]) -> dict[tuple[int, ...], float]:
    """The chance of each pair of next tokens after the prompt of two_tokens, under the rules."""
    from minigpt2.sampling import apply, processors

    options = GenerationOptions(do_sample=True, **rules)  # type: ignore[arg-type]
    active = processors(options, 5, None, [])

    @torch.no_grad()
    def chances(ids: list[int]) -> list[float]:
        tensor = torch.tensor([ids])
        return apply(active, tensor, model(tensor)[:, -1]).softmax(-1)[0].tolist()

    prompt = [3, 9, 4, 3, 9]
    return {
        (a, b): p * q
        for a, p in enumerate(chances(prompt))
        if p > 0
        for b, q in enumerate(chances([*prompt, a]))
        if q > 0
    }


def test_what_cannot_be_combined_is_refused(tiny: GPT2) -> None:
    ids = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match="one text at a time, got 2"):
        tiny.generate(ids.repeat(2, 1), prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="one text at a time, got 3"):
        tiny.generate(ids, prompt_lookup_num_tokens=3, num_return_sequences=3)
    with pytest.raises(ValueError, match="takes no num_beams, got 2"):
        tiny.generate(ids, prompt_lookup_num_tokens=3, num_beams=2)
    with pytest.raises(ValueError, match="from an assistant or from prompt lookup, not from both"):
        tiny.generate(ids, prompt_lookup_num_tokens=3, assistant_model=tiny)
    other = harsh_model(dataclasses.replace(TINY, vocab_size=50))
    with pytest.raises(ValueError, match="vocab_size 50 is not the model's 199"):
        tiny.generate(ids, assistant_model=other)


def test_the_assistant_guesses_within_its_window_and_under_the_rules(random_ids: Draw) -> None:
    small = harsh_model(dataclasses.replace(TINY, n_positions=8))
    ids = random_ids(1, 6)
    with torch.no_grad():
        best = small(ids)[0, -1].argmax().item()
    options = GenerationOptions(eos_token_id=best, min_new_tokens=3)
    guesses, probs = ModelGuesser(Request(small, ids, options), small)(ids, 5)
    assert guesses.shape == (1, 2)
    assert probs.shape == (2, 199)
    assert guesses[0, 0] != best
    more = ModelGuesser(Request(small, ids, options), small)(random_ids(1, 9), 5)[0]
    assert more.shape == (1, 0)


@pytest.mark.parametrize("pads", [1, 5])
def test_padding_on_the_left_changes_nothing(
    pads: int, double: GPT2, assistant: GPT2, random_ids: Draw
) -> None:
    ids = torch.cat([torch.zeros(1, pads, dtype=torch.long), random_ids(1, 50)], dim=1)
    mask = (torch.arange(ids.shape[1]) >= pads).long()[None]
    for overflow in ("stop", "slide"):
        options = {"max_new_tokens": 20, "context_overflow": overflow, "eos_token_id": ()}
        plain = double.generate(ids, attention_mask=mask, **options)
        for padding in ({"attention_mask": mask}, {"pad_token_id": 0}):
            for guesser in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
                assert torch.equal(plain, double.generate(ids, **padding, **guesser, **options))


def test_a_seed_repeats_a_draw_whatever_the_global_one(double: GPT2, assistant: GPT2) -> None:
    ids = torch.tensor([[3, 9, 4, 3, 9]])
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        texts = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            generator = torch.Generator().manual_seed(5)
            out = double.generate(
                ids, max_new_tokens=30, do_sample=True, temperature=20.0, eos_token_id=(),
                generator=generator, **options,
            )  # fmt: skip
            texts.append(out.tolist())
        assert texts[0] == texts[1]


def test_rules_of_ones_own_apply_and_logits_are_from_before_them(double: GPT2) -> None:
    def only_seven(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([7]), 0.0)

    ids = torch.tensor([[7, 7, 7]])
    options = GenerationOptions(max_new_tokens=5, prompt_lookup_num_tokens=3, eos_token_id=())
    steps = list(speculate(Request(double, ids, options, processors=[only_seven])))
    assert [step.token_ids.item() for step in steps] == [7] * 5
    with torch.no_grad():
        whole = double(torch.full((1, 7), 7)).float()
    torch.testing.assert_close(torch.stack([step.logits[0] for step in steps]), whole[0, 2:])


def test_a_prompt_longer_than_the_assistants_window(tiny: GPT2, random_ids: Draw) -> None:
    small = harsh_model(dataclasses.replace(TINY, n_positions=16))
    ids = random_ids(1, 20)
    for overflow in ("stop", "error"):
        options = {"max_new_tokens": 8, "context_overflow": overflow, "eos_token_id": ()}
        helped = tiny.generate(ids, assistant_model=small, **options)
        assert torch.equal(helped, tiny.generate(ids, **options))


def test_modes_are_restored() -> None:
    model, helper = harsh_model(TINY).train(), harsh_model(TINY).train()
    model.generate(torch.tensor([[1, 2]]), assistant_model=helper)
    assert model.training
    assert helper.training


def test_it_streams_and_stops_like_any_text() -> None:
    tales = GPT2.from_pretrained("tales")
    tokenizer = Tokenizer.from_pretrained("tales")
    prompt = "the king and the queen and the king and the queen and"
    plain = [
        step.text for step in stream(tales, tokenizer, prompt, max_new_tokens=20, stop=["queen"])
    ]
    looked = [
        step.text
        for step in stream(
            tales, tokenizer, prompt, max_new_tokens=20, stop=["queen"], prompt_lookup_num_tokens=5
        )
    ]
    assert "".join(looked) == "".join(plain)
