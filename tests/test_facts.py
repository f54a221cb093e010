"""The recorded facts about GPT-2 (tests/facts), and the checkers of scripts/facts.py themselves.

Facts that need no weights are checked on the official shapes without memory (device meta), or on
random weights of GPT-2's width. Those that need official weights run by themselves wherever the
model is in Hugging Face's cache, and are skipped, with the reason, where it is not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import facts
import parity
import pytest
import torch
from facts import CHECKS, NOT_CHECKED, Fact, NotChecked, check
from transformers import GPT2LMHeadModel, TopPLogitsWarper

import minigpt2.ops
from minigpt2 import GPT2, CheckpointError, GPT2Config, KVCache, Tokenizer
from minigpt2.hub import OFFICIAL, find

FACTS = facts.load_facts()
FREE = [fact for fact in FACTS if not fact.needs_official_weights]
# By model, so that one at a time is in memory.
BOUND = sorted((f for f in FACTS if f.needs_official_weights), key=lambda f: f.model or "")
RUN = {
    "argmax_invariance",
    "cache",
    "causal",
    "crop",
    "equality",
    "loop",
    "n_predictions",
    "prob_sum",
    "shape",
    "stop",
    "tying",
}  # kinds that need no particular weights, but some

TOKENIZER = Tokenizer.from_pretrained("gpt2")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread gives little, and on a busy machine costs tenfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def by_id(chosen: list[Fact]) -> list[Any]:
    return [pytest.param(fact, id=fact.id) for fact in chosen]


@functools.cache
def shape_of(name: str) -> GPT2:
    with torch.device("meta"):
        return GPT2(parity.SIZES[name])


@functools.cache
def random_gpt2() -> GPT2:
    """Random weights of GPT-2's width, vocabulary and context, with two of its twelve layers."""
    return parity.harsh_model(GPT2Config(n_layer=2))


@functools.lru_cache(maxsize=1)
def official(name: str) -> GPT2:
    return GPT2.from_pretrained(name, local_files_only=True)


def verify(fact: Fact, model: GPT2) -> None:
    try:
        result = check(fact, model, TOKENIZER)
    except NotChecked as reason:
        pytest.skip(f"{fact.id}: {reason}")
    assert result.ok, f"{fact.origin}: expected {fact.right!r}, got {result.got!r}"
    if fact.actual is not None:
        assert not facts.agrees(result.got, fact.expected, fact.tolerance), (
            f"the article is right after all: {fact.claim}"
        )


@pytest.mark.parametrize("fact", by_id(FREE))
def test_fact_on_any_weights(fact: Fact) -> None:
    verify(fact, random_gpt2() if fact.kind in RUN else shape_of(fact.model or "gpt2"))


@pytest.mark.weights
@pytest.mark.parametrize("fact", by_id(BOUND))
def test_fact_on_official_weights(fact: Fact) -> None:
    if fact.kind in NOT_CHECKED:
        pytest.skip(f"{fact.id}: {NOT_CHECKED[fact.kind]}")
    assert fact.model in OFFICIAL
    try:
        find(fact.model, local_files_only=True)
    except CheckpointError:
        pytest.skip(f"{fact.id}: {fact.model} is not on this machine")
    verify(fact, official(fact.model))


# What a reader of the articles meets, and what GPT-2 really gives.
WRONG = {
    "s1-01": "the article's ids are another model's: in GPT-2's vocabulary they mean other words",
    "s1-02": "the article's ids are another model's: in GPT-2's vocabulary they mean other words",
    "s1-19": "the MLPs hold 45.5% of the small model, a majority only from gpt2-medium up",
    "s3-06": "the article's typographic apostrophe costs two tokens more than an ASCII one",
    "s3-07": "the first word of a text carries no leading space",
    "s4-01": "the article's ids are no greeting in GPT-2's vocabulary",
    "s4-02": "the article's ids are no greeting in GPT-2's vocabulary",
}


def test_all_wrong_statements_are_explained() -> None:
    assert set(WRONG) == {fact.id for fact in FACTS if fact.actual is not None}


@pytest.mark.parametrize("fact_id", WRONG)
def test_reader_who_follows_the_article(fact_id: str) -> None:
    (fact,) = (fact for fact in FACTS if fact.id == fact_id)
    got = check(fact, shape_of("gpt2"), TOKENIZER).got
    message = f"{WRONG[fact_id]}: the article says {fact.expected!r}, GPT-2 gives {got!r}"
    assert not facts.agrees(got, fact.expected, fact.tolerance), message
    assert facts.agrees(got, fact.actual, fact.tolerance), message


def test_every_fact_is_there_once_and_has_a_kind() -> None:
    ids = [fact.id for fact in FACTS]
    assert len(ids) == len(set(ids))
    assert sum(fact_id.startswith("s") for fact_id in ids) == 95
    assert len({fact_id[:4] for fact_id in ids if fact_id.startswith("o")}) == 85
    assert {fact.kind for fact in FACTS} == set(CHECKS) | set(NOT_CHECKED)
    assert not set(CHECKS) & set(NOT_CHECKED)
    assert all(fact.model in OFFICIAL or fact.model is None for fact in FACTS)


# --- The checkers, on a tiny random model, against values computed by transformers

TEXT = "The cat sat on the"
IDS = [464, 3797, 3332, 319, 262]


@functools.cache
def tiny() -> GPT2:
    config = GPT2Config(n_positions=64, n_embd=48, n_layer=3, n_head=4, eos_token_id=50256)
    return parity.harsh_model(config)


@functools.cache
def twin() -> GPT2LMHeadModel:
    """transformers' model over tiny()'s weights."""
    model = parity.hf_twin(tiny())
    model.set_attn_implementation("eager")
    return model


@functools.cache
def theirs() -> Any:
    with torch.no_grad():
        return twin()(torch.tensor([IDS]), output_attentions=True, output_hidden_states=True)


def their_probs() -> torch.Tensor:
    return theirs().logits[0, -1].double().softmax(dim=-1)


def their_continuation(prompts: list[str], **options: Any) -> torch.Tensor:
    rows = [TOKENIZER.encode(prompt) for prompt in prompts]
    longest = max(map(len, rows))
    ids = torch.tensor([[50256] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    options = {"do_sample": False, "pad_token_id": 50256, "eos_token_id": 50256} | options
    return twin().generate(ids, attention_mask=mask, **options)


def their_text(prompts: list[str], **options: Any) -> list[str]:
    rows = their_continuation(prompts, **options).tolist()
    return [TOKENIZER.decode(i for i in row if i != 50256) for row in rows]


def their_log_probs() -> dict[str, Any]:
    output = their_continuation(
        PROMPTS, max_new_tokens=4, return_dict_in_generate=True, output_logits=True
    )
    new = output.sequences[:, -4:]
    log_probs = twin().compute_transition_scores(
        output.sequences, output.logits, normalize_logits=True
    )
    return {"ids": new.tolist(), "log_probs": log_probs[:, :3].tolist()}


def their_attention() -> torch.Tensor:
    return torch.cat(theirs().attentions)  # (L, H, T, T)


PROMPTS = ["Hello my name is", "The"]
FLOOR, MAT = 4314, 2603


def prepared() -> Iterator[tuple[str, Any, Any, float]]:
    """(kind, input, the value as transformers or plain arithmetic gives it, tolerance)."""
    logits, probs = theirs().logits[0, -1], their_probs()
    order = logits.argsort(descending=True).tolist()
    names = [TOKENIZER.decode([token_id]) for token_id in order]
    yield "prob", TEXT, {" floor": probs[FLOOR].item(), " mat": probs[MAT].item()}, 1e-6
    yield "prob_sum", TEXT, probs.sum().item(), 1e-5
    yield "topk_order", TEXT, names[:6], 0
    yield "argmax_id", TEXT, order[0], 0
    yield "mass", {"text": TEXT, "k": 8}, probs[order[:8]].sum().item(), 1e-6
    yield "mass", {"text": TEXT, "k": 8}, {"lt": probs[order[:8]].sum().item() + 1e-4}, 0
    yield "logit_range", TEXT, [logits.min().item(), logits.max().item()], 1e-4
    kept = TopPLogitsWarper(0.9)(torch.tensor([IDS]), logits[None].double()).isfinite().sum().item()
    yield "nucleus_size", {"text": TEXT, "p": 0.9}, kept, 0
    rank = {"top": names[0], "rank": order.index(MAT) + 1}
    yield "rank", {"text": TEXT, "token": " mat"}, rank, 0
    logit = {"argmax": order[0], "token": names[0], "logit": logits.max().item()}
    yield "logit", TEXT, {**logit, "shape": [1, 5, 50257]}, 1e-4
    yield "hidden", IDS, theirs().hidden_states[-1][0, 0, :5].tolist(), 1e-4
    loss = twin()(torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.item()
    yield "text_loss", IDS, loss, 1e-4


def prepared_attention() -> Iterator[tuple[str, Any, Any, float]]:
    weights = their_attention()
    where = {"text": TEXT, "layer": 1, "head": 2, "query": -1, "key": 1}
    yield "attention", where, weights[1, 2, -1, 1].item(), 1e-5
    heads = (weights[:, :, -1, 0] > 0.2).sum().item()
    assert 0 < heads < 12
    count = {"heads": heads, "of": 12}
    yield "attention_count", {"text": TEXT, "key": 0, "above": 0.2}, count, 0
    yield "causal", TEXT, True, 0
    yield "cache", TEXT, True, 0
    yield "tying", TEXT, True, 0
    yield "argmax_invariance", TEXT, True, 0
    yield "n_predictions", TEXT, 5, 0
    yield "loop", {"text": TEXT, "max_new_tokens": 30}, 35, 0
    yield "equality", {"text": TEXT, "max_new_tokens": 5}, True, 0
    yield "stop", TEXT, 50256, 0
    yield "crop", None, 64, 0
    logits = [list(theirs().logits.shape), list(theirs().logits[0, -1].shape)]
    yield "shape", {"text": TEXT, "of": ["logits", "logits[0, -1]"]}, logits, 0
    layer = list(theirs().hidden_states[1][0].shape)
    yield "shape", {"text": TEXT, "of": ["embedding[0]", "block[0]"]}, [layer, layer], 0


def prepared_texts() -> Iterator[tuple[str, Any, Any, float]]:
    def asked(prompts: list[str], **options: Any) -> dict[str, Any]:
        return {"prompts": prompts, "options": {"max_new_tokens": 6, **options}}

    alone = PROMPTS[:1]
    yield "greedy", asked(alone), their_text(alone, max_new_tokens=6), 0
    ids = their_continuation(alone, max_new_tokens=6).tolist()
    yield "greedy", asked(alone), ids, 0
    yield "greedy-leftpad", asked(PROMPTS), their_text(PROMPTS, max_new_tokens=6), 0
    rules = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2}
    text = their_text(PROMPTS, max_new_tokens=6, **rules)
    assert text != their_text(PROMPTS, max_new_tokens=6)
    yield "greedy-processors", asked(PROMPTS, **rules), text, 0
    yield "greedy-processors", {**asked(PROMPTS, **rules), "rows": 1}, text[:1], 0
    first = TOKENIZER.decode(their_continuation(alone, max_new_tokens=1)[0, -1:].tolist())
    banned = their_text(alone, max_new_tokens=6, bad_words_ids=[TOKENIZER.encode(first)])
    yield "greedy-processors", {**asked(alone), "bad_words": [first]}, banned, 0
    beams = {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True}
    yield "beam", asked(PROMPTS, **beams), their_text(PROMPTS, max_new_tokens=6, **beams), 0
    asked_log_probs = {"prompts": PROMPTS, "max_new_tokens": 4}
    yield "logprob", asked_log_probs, their_log_probs(), 1e-4


def prepared_sizes() -> Iterator[tuple[str, Any, Any, float]]:
    count = twin().num_parameters()
    shape = {"n_layer": 3, "n_head": 4, "n_embd": 48, "n_positions": 64, "vocab_size": 50257}
    yield "params", None, {**shape, "n_params": count}, 0
    yield "param_count", ".*", count, 0
    yield "param_count", r"wte\.weight", 50257 * 48, 0
    yield "share", [r"wpe\.weight", ".*"], 64 * 48 / count, 1e-9
    yield "share", [r"wpe\.weight", ".*"], {"gt": 64 * 48 / count - 1e-4}, 0
    matrices = [p.dim() == 2 for p in twin().parameters()]
    yield "tensor_count", None, [sum(matrices), len(matrices)], 0
    yield "const", ["n_embd", "n_layer * n_head"], [48, 12], 0


def prepared_words() -> Iterator[tuple[str, Any, Any, float]]:
    yield "token_ids", TEXT, IDS, 0
    yield "n_tokens", TEXT, 5, 0
    yield "pieces", TEXT, ["The", " cat", " sat", " on", " the"], 0
    yield "decode", IDS, TEXT, 0
    yield "vocabulary", None, [256, 50000, 1], 0
    yield "vocabulary_size", None, 50257, 0
    yield "byte_fallback", None, 256, 0
    half = [100 / (1 + math.e**2), 100 - 100 / (1 + math.e**2)]
    yield "softmax_toy", {"scores": [0, 1], "temperature": 0.5}, half, 1e-9
    yield "exp_toy", [1, 0], [math.e, 1, math.e + 1], 1e-9
    yield "weight_memory", [8], [0.5], 0
    merges = {
        "bytes": 456318,
        "sha256": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    }
    yield "file", "merges.txt", merges, 0


def fact_of(kind: str, asked: Any, expected: Any, tolerance: float) -> Fact:
    return Fact("t-01", "gpt2", kind, asked, expected, False, tolerance=tolerance)


def wrong_versions(value: Any, tolerance: float, key: str = "") -> Iterator[Any]:
    """The value with one leaf changed by more than the tolerance; one version for each leaf."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from (value | {name: wrong} for wrong in wrong_versions(part, tolerance, name))
    elif isinstance(value, list):
        for n, part in enumerate(value):
            versions = wrong_versions(part, tolerance)
            yield from ([*value[:n], wrong, *value[n + 1 :]] for wrong in versions)
        yield [*value, value[-1]]
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, str):
        yield value + "!"
    elif isinstance(value, int):
        yield value + 1
    else:
        yield value + (-2e-4 if key == "lt" else 2e-4 if key == "gt" else 3 * tolerance or 1e-3)


ALL_PREPARED = (
    prepared,
    prepared_attention,
    prepared_texts,
    prepared_sizes,
    prepared_words,
)


@pytest.mark.parametrize("prepare", ALL_PREPARED)
def test_checkers_agree_with_transformers_and_can_fail(prepare: Any) -> None:
    for kind, asked, expected, tolerance in prepare():
        fact = fact_of(kind, asked, expected, tolerance)
        result = check(fact, tiny(), TOKENIZER)
        assert result.ok, f"{kind}: expected {expected!r}, got {result.got!r}"
        for wrong in wrong_versions(expected, tolerance):
            result = check(fact_of(kind, asked, wrong, tolerance), tiny(), TOKENIZER)
            assert not result.ok, f"{kind}: {wrong!r} passes for {result.got!r}"


def test_every_checker_is_tested() -> None:
    tested = {kind for prepare in ALL_PREPARED for kind, *_ in prepare()}
    assert tested == set(CHECKS)


def test_padding_may_count_as_seen() -> None:
    """TensorFlow's repetition penalty falls on padding too, and one fact's on new tokens alone."""
    ids, scores = torch.tensor([[7, 7, 1, 2]]), torch.tensor([[-1.0, -1.0, -1.0, 2.0]])
    scores = torch.cat([scores, torch.ones(1, 4)], dim=1)
    on_all, on_new = (
        facts.extra_rules(fact_of("greedy", {key: 2.0}, None, 0), 3)[0](ids, scores).tolist()[0]
        for key in ("penalty_on_all", "penalty_on_new")
    )
    assert on_all == [-1, -2, -2, 2, 1, 1, 1, 0.5]
    assert on_new == [-1, -1, -2, 2, 1, 1, 1, 1]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> GPT2:
    """tiny(), whose tokens see those behind them."""

    def everything(T: int, S: int, device: torch.device) -> torch.Tensor:
        return torch.ones(T, S, dtype=torch.bool, device=device)

    model = parity.harsh_model(tiny().config)
    model.ops = minigpt2.ops.explicit
    monkeypatch.setattr(minigpt2.ops, "causal_mask", everything)
    return model


@pytest.mark.parametrize("kind", ["causal", "cache", "n_predictions", "loop", "equality"])
def test_a_model_that_looks_ahead_fails(kind: str, broken: GPT2) -> None:
    asked = {"text": TEXT, "max_new_tokens": 30}
    expected = {"n_predictions": 5, "loop": 35}.get(kind, True)
    assert not check(fact_of(kind, asked, expected, 0), broken, TOKENIZER).ok


def test_a_cache_that_forgets_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "update", lambda _self, _layer, k, v: (k, v))
    asked = {"text": TEXT, "max_new_tokens": 30}
    assert not check(fact_of("loop", asked, 35, 0), tiny(), TOKENIZER).ok


def test_an_untied_head_fails() -> None:
    config = GPT2Config(n_positions=64, n_embd=48, n_layer=1, n_head=4, tie_word_embeddings=False)
    model = parity.harsh_model(config)
    assert not check(fact_of("tying", TEXT, True, 0), model, TOKENIZER).ok


def test_a_window_that_is_not_read_anew_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_loop(token_ids: torch.Tensor, _model: GPT2, steps: int) -> torch.Tensor:
        return torch.cat([token_ids, token_ids[:, :steps]], dim=1)

    monkeypatch.setattr(facts, "plain_loop", other_loop)
    assert not check(fact_of("crop", None, 64, 0), tiny(), TOKENIZER).ok


def test_file_facts_read_the_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(facts, "find", lambda *_args, **_options: tmp_path)
    (tmp_path / "config.json").write_bytes(b"{}")
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    for expected, ok in (
        ({"bytes": 2, "sha256": digest}, True),
        ({"sha256": digest}, True),
        ({"bytes": 3}, False),
        ({"bytes": 2, "sha256": digest[::-1]}, False),
    ):
        assert check(fact_of("file", "config.json", expected, 0), tiny(), TOKENIZER).ok is ok
    with pytest.raises(NotChecked, match=r"vocab\.json of gpt2 is not on this machine"):
        check(fact_of("file", "vocab.json", {"bytes": 2}, 0), tiny(), TOKENIZER)


def test_nan_agrees_with_nothing() -> None:
    for expected in (0.0, math.nan, {"lt": 1}, {"gt": 0}):
        assert not facts.agrees(math.nan, expected, 1.0)
    assert not facts.agrees(True, 1)
    assert not facts.agrees([1], [1, 1])


@functools.cache
def gpt2_of_noise() -> GPT2:
    """The small model's layers and heads, narrow, with random weights."""
    return parity.harsh_model(GPT2Config(n_embd=48))


# A file's hash asks no model, and an upper bound (mass) may hold for any.
@pytest.mark.parametrize(
    "fact", by_id([f for f in BOUND if f.kind in set(CHECKS) - {"file", "mass"}])
)
def test_recorded_values_are_not_met_by_random_weights(fact: Fact) -> None:
    """Every value that needs the official weights can be computed, and tells them from others."""
    assert not check(fact, gpt2_of_noise(), TOKENIZER).ok


# --- The command


def test_command_prints_and_judges(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GPT2, "from_pretrained", lambda _name: random_gpt2())
    chosen = [fact_of("token_ids", TEXT, IDS, 0), fact_of("loss", None, None, 0)]
    monkeypatch.setattr(facts, "load_facts", lambda: chosen)
    assert facts.main([]) == 0
    assert "1 facts checked, 0 failed, 1 not checked here" in capsys.readouterr().out
    chosen.append(fact_of("n_tokens", TEXT, 6, 0))
    assert facts.main(["--model", "gpt2"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert "expected 6" in printed


def test_command_without_the_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(_name: str) -> GPT2:
        raise CheckpointError("gpt2 is not on this machine")

    monkeypatch.setattr(GPT2, "from_pretrained", absent)
    assert facts.main([]) == 1
    assert capsys.readouterr().err == "facts.py: error: gpt2 is not on this machine\n"
