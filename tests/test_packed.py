"""Packed matrices against rounded weights and float64, the screened head against the whole one."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt2 import GPT2, GPT2Config, KVCache, Tokenizer, evaluate, generate, packed
from minigpt2.options import KINDS
from minigpt2.packed import PACKERS, Int8, Plain, Screen, pack_matrix, rounded
from minigpt2.texts import Request
from minigpt2.trace import explain

# How far a product may be from that of the rounded weights: what activations lose on the way.
TOLERANCE = {"float32": 1e-6, "float16": 1e-6, "bfloat16": 8e-3, "int8": 1.5e-2, "int4": 8e-3}
TOKENIZER = Tokenizer.from_pretrained("tales")
PROMPT = TOKENIZER.encode("Once upon a time there was a king who")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def tales() -> GPT2:
    return GPT2.from_pretrained("tales")


@pytest.fixture(scope="module")
def text(tales: GPT2) -> torch.Tensor:
    """(4, 200) ids that tales wrote."""
    options = {"do_sample": True, "num_return_sequences": 4, "eos_token_id": ()}
    draw = torch.Generator().manual_seed(0)
    prompt = torch.tensor([PROMPT])
    return tales.generate(prompt, max_new_tokens=200 - len(PROMPT), generator=draw, **options)


def pack(kind: str) -> GPT2:
    model = GPT2.from_pretrained("tales")
    model.pack(kind)
    return model


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def random_matrix(n_out: int, n_in: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(n_out)
    return torch.randn(n_out, n_in, generator=draw), torch.randn(n_out, generator=draw)


# --- One matrix


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("shape", [(96, 64), (64, 96), (1, 32), (257, 768), (3072, 768)])
@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_products_are_those_of_the_rounded_weights(
    kind: str, shape: tuple[int, int], count: int
) -> None:
    weight, bias = random_matrix(*shape)
    rows = torch.randn(count, shape[1], generator=torch.Generator().manual_seed(1))
    matrix = pack_matrix(weight, bias, kind)
    assert not isinstance(matrix, Plain)  # the kernel works here
    expected = rows.double() @ rounded(weight, kind).double().T + bias.double()
    assert distance(matrix.product(rows), expected) < TOLERANCE[kind]
    assert matrix.product(rows).dtype == torch.float32


@pytest.mark.parametrize("kind", PACKERS)
def test_rounding_costs_what_its_bits_say(kind: str) -> None:
    weight, _ = random_matrix(64, 768)
    low, high = {
        "float32": (-1.0, 0.0),
        "bfloat16": (1e-3, 3e-3),
        "float16": (1e-4, 4e-4),
        "int8": (4e-3, 1e-2),
        "int4": (4e-2, 1e-1),
    }[kind]
    assert low < distance(rounded(weight, kind), weight) <= high


@pytest.mark.parametrize("kind", PACKERS)
def test_a30_zeros_stay_zeros(kind: str) -> None:
    """Rows of zeros, in the weights or the activations, divide by no zero scale."""
    weight, _ = random_matrix(64, 64)
    weight[3] = 0
    weight[:, 32:] = 0  # whole groups, too
    matrix = pack_matrix(weight, None, kind)
    rows = torch.randn(3, 64)
    rows[1] = 0
    for part in (rows, rows[:1], rows[1:2], torch.zeros(2, 64)):
        product = matrix.product(part)
        assert product.isfinite().all()
        assert (product[:, 3].abs() <= 1e-6 * product.abs().max()).all()
        zero = (part == 0).all(dim=1)
        assert (product[zero] == 0).all()


@pytest.mark.parametrize("kind", PACKERS)
def test_no_row_sees_its_neighbours(kind: str) -> None:
    """GPT-2's activations hold outliers; one scale for all rows would drown the others."""
    weight, bias = random_matrix(96, 64)
    matrix = pack_matrix(weight, bias, kind)
    rows = torch.randn(4, 64)
    alone = torch.cat([matrix.product(row[None]) for row in rows])
    loud = rows.clone()
    loud[1:] *= torch.tensor([[1e4], [300.0], [1e-4]])
    with_loud = matrix.product(loud)[0]
    assert distance(with_loud, matrix.product(rows)[0]) < 1e-5
    assert distance(with_loud, alone[0]) < 2 * TOLERANCE[kind]


def test_int8_rows_on_one_grid_would_see_each_other() -> None:
    weight, _ = random_matrix(96, 64)
    matrix, rows = Int8(weight, None), torch.randn(2, 64)
    loud = torch.stack([rows[0], 1e4 * rows[1]])
    assert distance(matrix.on_one_grid(loud)[0], rows[0] @ weight.T) > 0.5
    assert distance(matrix.product(loud)[0], rows[0] @ weight.T) < 0.03


def test_int4_takes_the_best_of_its_ranges() -> None:
    weight, _ = random_matrix(64, 64)
    q, scale, zero = packed.int4_groups(weight)
    assert (int(q.min()), int(q.max())) == (0, 15)
    assert scale.shape == zero.shape == (64, 2)
    groups = weight.view(64, 2, 32)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    assert distance(rounded(weight, "int4"), weight) < distance(plain.view(64, 64), weight)


# --- Where a kernel is missing


@pytest.fixture
def _broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operators that are gone, or compute something else."""

    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("no such operator")

    class Wrong(Int8):
        def product(self, rows: torch.Tensor) -> torch.Tensor:
            return super().product(rows) * 1.2

    for kind in ("float32", "bfloat16", "float16", "int4"):
        monkeypatch.setitem(PACKERS, kind, gone)
    monkeypatch.setitem(PACKERS, "int8", Wrong)
    packed.works.cache_clear()
    packed.whole_numbers_stay.cache_clear()
    yield
    packed.works.cache_clear()
    packed.whole_numbers_stay.cache_clear()


@pytest.mark.usefixtures("_broken")
@pytest.mark.parametrize("kind", PACKERS)
def test_plain_operations_do_the_same(kind: str, tales: GPT2, text: torch.Tensor) -> None:
    weight, bias = random_matrix(96, 64)
    matrix = pack_matrix(weight, bias, kind)
    assert isinstance(matrix, Plain)
    rows = torch.randn(5, 64)
    assert distance(matrix.product(rows), rows @ rounded(weight, kind).T + bias) < 1e-6
    model = pack(kind)
    assert model.ops.screen is None  # type: ignore[union-attr]
    assert distance(model(text[:1]), tales(text[:1])) < {"int8": 0.03, "int4": 0.2}.get(kind, 0.02)


def test_widths_that_int4_cannot_group_stay_whole() -> None:
    weight, _ = random_matrix(8, 40)
    matrix = pack_matrix(weight, None, "int4")
    assert torch.equal(matrix.product(torch.eye(40)), weight.T)


# --- The model


@pytest.mark.parametrize(
    ("kind", "error", "cost"),
    [
        ("exact", 0.0, 0.0),
        ("float32", 1e-5, 1e-6),
        ("bfloat16", 1e-2, 1e-3),
        ("float16", 1e-3, 1e-3),
        ("int8", 4e-2, 1e-2),
        ("int4", 0.15, 5e-2),
    ],
)
def test_logits_and_perplexity(
    kind: str, error: float, cost: float, tales: GPT2, text: torch.Tensor
) -> None:
    model, expected = pack(kind), tales(text)
    got = model(text)
    assert distance(got, expected) <= error

    def loss(logits: torch.Tensor) -> float:
        picked = logits[:, :-1].log_softmax(dim=-1).gather(-1, text[:, 1:, None])
        return -float(picked.mean())

    assert abs(math.expm1(loss(got) - loss(expected))) <= cost
    cache = KVCache(model.config, 4, 200)  # token by token: one row for each text
    for start, end in ((0, 7), (7, 8), (8, 9), (9, 30)):
        part = model(text[:, start:end], cache=cache)
        assert distance(part, got[:, start:end]) <= max(2 * error, 1e-5)


@pytest.mark.parametrize("kind", ["exact", "float32"])
def test_screened_ids_are_those_of_the_whole_head(kind: str, tales: GPT2) -> None:
    model, ids = pack(kind), torch.tensor([PROMPT])
    greedy = {"max_new_tokens": 60, "eos_token_id": (), "prompt_lookup_num_tokens": 0}
    drawn = greedy | {"do_sample": True, "top_k": 40, "temperature": 0.8}
    punished = greedy | {"repetition_penalty": 1.4}  # what is screened off may come up: no screen
    several = drawn | {"num_return_sequences": 3}
    for options in (greedy, drawn, punished, several):
        seeds = (torch.Generator().manual_seed(3) for _ in range(2))
        ours, whole = (
            m.generate(ids, generator=seed, **options)
            for m, seed in zip((model, tales), seeds, strict=True)
        )
        assert torch.equal(ours, whole)


def test_the_screen_is_used_where_it_may_be(
    text: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = pack("float32"), []
    screened = Screen.__call__

    def count(self: Screen, x: torch.Tensor, table: torch.Tensor, k: int) -> torch.Tensor | None:
        calls.append(k)
        return screened(self, x, table, k)

    monkeypatch.setattr(Screen, "__call__", count)
    ids, short = text[:1, :9], {"max_new_tokens": 3, "eos_token_id": ()}
    model.generate(ids, **short)
    assert set(calls) == {1}
    calls.clear()
    model.generate(ids, do_sample=True, top_k=5, **short)
    assert calls == [5, 5, 5]
    calls.clear()
    for other in ({"do_sample": True}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[5]]}):
        model.generate(ids, **short, **other)
    model.generate(ids, min_new_tokens=2, **short)
    model.generate(ids, processors=[lambda _, scores: scores], **short)
    model.generate(ids, num_beams=2, **short)
    assert not calls


def test_prompt_lookup_is_the_default_of_packed_greedy_decoding(
    tales: GPT2, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minigpt2 import decoding

    used: list[int | None] = []
    speculate = decoding.speculate

    def note(request: Request) -> object:
        used.append(request.options.prompt_lookup_num_tokens)
        return speculate(request)

    monkeypatch.setattr(decoding, "speculate", note)
    model, ids = pack("float32"), torch.tensor([PROMPT])
    short = {"max_new_tokens": 30, "eos_token_id": ()}
    assert torch.equal(model.generate(ids, **short), tales.generate(ids, **short))
    assert used == [10]
    model.generate(ids, prompt_lookup_num_tokens=0, **short)
    model.generate(ids, do_sample=True, **short)
    model.generate(ids, num_return_sequences=2, **short)
    model.generate(ids, num_beams=2, max_new_tokens=2)
    pack("exact").generate(ids, **short)
    assert used == [10]
    model.generate(ids, attention_mask=torch.ones_like(ids), **short)
    assert used == [10, 10]


@pytest.mark.parametrize("kind", PACKERS)
def test_a30_every_matrix_is_packed(kind: str, tales: GPT2) -> None:
    model = pack(kind)
    names = {name for name, p in tales.named_parameters() if p.dim() == 2}
    left = {name for name, p in model.named_parameters() if p.dim() == 2}
    assert left == {"wte.weight", "wpe.weight"}  # tables that are looked up, not multiplied with
    matrices = [
        part
        for block in model.h
        for part in vars(block).values()
        if isinstance(part, packed.Packed)
    ]
    assert len(matrices) == len(names - left) == 24
    assert isinstance(model.ops.head, packed.Packed)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_originals_are_freed(kind: str) -> None:
    model = GPT2.from_pretrained("tales")
    weight = weakref.ref(model.h[0].attn.c_attn.weight)
    model.pack(kind)
    gc.collect()
    assert weight() is None


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mapped files here")
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_no_longer_mapped(kind: str, tmp_path: Path) -> None:
    GPT2(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=199)).save_pretrained(tmp_path)
    model = GPT2.from_pretrained(tmp_path)
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    model.pack(kind)
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("kind", ["exact", "float32"])
def test_a_top_k_beyond_the_vocabulary_keeps_all(kind: str, tales: GPT2) -> None:
    ids, model = torch.tensor([[198, 7454, 2402, 257]]), pack(kind)
    for k in (50257, 60000):
        options = {"do_sample": True, "top_k": k, "max_new_tokens": 8}
        drawn, plain = (
            m.generate(ids, generator=torch.Generator().manual_seed(3), **options)
            for m in (model, tales)
        )
        assert torch.equal(drawn, plain)


def test_packing_is_refused_where_it_means_nothing(tiny: GPT2) -> None:
    with pytest.raises(ValueError, match="no such packing: 'int3'; there are exact, float32"):
        pack("int3")
    model = pack("int8")
    with pytest.raises(ValueError, match="once"):
        model.pack("int8")
    with pytest.raises(ValueError, match="evaluation mode"):
        GPT2(tiny.config).pack("int8")
    with pytest.raises(ValueError, match=r"float32 model, this one is torch\.bfloat16"):
        GPT2.from_pretrained("tales", dtype=torch.bfloat16).pack("int8")


def test_a_packed_model_is_not_explained() -> None:
    with pytest.raises(ValueError, match=r"call it before pack\(\)"):
        explain(pack("int8"), Tokenizer.from_pretrained("tales"), "Once")


def test_a_packed_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be saved: save it before"):
        pack("int8").save_pretrained(tmp_path / "packed")
    assert not (tmp_path / "packed" / "model.safetensors").exists()


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_one_row_in_halves_has_the_bits_of_the_whole(tales: GPT2, text: torch.Tensor) -> None:
    model, caches = pack("exact"), [KVCache(tales.config, 1, 20) for _ in range(2)]
    matrices = [part for block in model.h for part in vars(block).values()]
    head = model.ops.head  # type: ignore[union-attr]
    exact = [part for part in (head, *matrices) if isinstance(part, packed.Exact)]
    assert len(exact) == 25
    for part in exact:  # what the trial has shown holds for others; which matrices, the CPU decides
        rows = torch.randn(8, 1, len(part.table.T if part is head else part._weight))
        equal = [torch.equal(part._in_halves(row), part._whole(row)) for row in rows]
        assert all(equal) or not part._halved
    for token_id in text[0, :20].tolist():
        ours, whole = (
            m(torch.tensor([[token_id]]), cache=cache)
            for m, cache in zip((model, tales), caches, strict=True)
        )
        assert torch.equal(ours, whole)


@pytest.mark.parametrize("shape", [(192, 64), (2304, 768), (131, 32)])
def test_halves_of_other_bits_are_not_used(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = random_matrix(*shape)
    row = torch.randn(1, shape[1])
    for name in ("bmm", "baddbmm"):
        product = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, p=product: p(*args) * (1 + 2**-23))
    for matrix in (packed.ExactLinear(weight, bias), packed.ExactHead(weight)):
        assert not matrix._halved
        assert torch.equal(matrix.product(row), matrix._whole(row))


def test_halves_of_the_same_bits_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: torch.ones(shape))  # sums are exact
    weight, bias = torch.arange(131.0 * 32).view(131, 32) % 7, torch.arange(131.0)
    for matrix in (packed.ExactLinear(weight[:130], bias[:130]), packed.ExactHead(weight)):
        assert matrix._halved
        monkeypatch.setattr(matrix, "_whole", lambda _: pytest.fail("one row met the whole matrix"))
        matrix.product(torch.ones(1, 32))


# --- The screen


def best_ids(scores: torch.Tensor, k: int) -> list[set[int]]:
    return [set(row.tolist()) for row in scores.topk(k).indices]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 3, 40]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from(["plain", "outliers", "twins", "near twins", "zeros", "heavy"]),
)
def test_nothing_that_matters_is_screened_off(seed: int, k: int, count: int, sort: str) -> None:
    draw = torch.Generator().manual_seed(seed)
    table = torch.randn(400, 64, generator=draw)
    x = 5 * torch.randn(count, 64, generator=draw)
    if sort == "outliers":
        x[:, 7] *= 300
        table[:, 3] *= 50
    elif sort == "twins":
        table[200:] = table[:200]
    elif sort == "near twins":
        table[200:] = table[:200] * (1 + 1e-7)
    elif sort == "zeros":
        x[0] = 0
        table[::2] = 0
    elif sort == "heavy":
        table *= torch.logspace(-4, 2, 400)[:, None]
    scores = Screen(table)(x, table, k)
    whole = torch.nn.functional.linear(x, table)
    if sort in ("twins", "zeros"):
        assert scores is None or k > 1  # a tie for the first place is the whole head's to settle
    if scores is None:
        return
    assert best_ids(scores, k) == best_ids(whole, k)
    kept = scores.isfinite()
    assert torch.allclose(scores[kept], whole[kept], rtol=1e-5, atol=1e-4 * float(x.norm()))


def test_the_screen_leaves_few_on_trained_weights(tales: GPT2, text: torch.Tensor) -> None:
    hidden: list[torch.Tensor] = []
    handle = tales.ln_f.register_forward_hook(lambda _m, _x, y: hidden.append(y))
    tales(text[:1])
    handle.remove()
    screen, table = Screen(tales.wte.weight), tales.wte.weight
    for k, most in ((1, 12), (40, 200)):
        left = [screen(row[None], table, k) for row in hidden[0][0]]
        counts = [int(scores.isfinite().sum()) for scores in left if scores is not None]
        assert len(counts) > 0.85 * len(left)
        assert sum(counts) / len(counts) < most / 2
        assert max(counts) < 3 * most


# --- The command line


def run(main: Callable[[list[str]], int], *arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as exit_:
        return int(str(exit_.code))


def test_fast_on_the_command_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = []
    for flags in ((), ("--fast", "exact"), ("--fast", "float32"), ("--fast", "int8")):
        arguments = ("Once upon a time", "-m", "tales", "-n", "12", "--json", *flags)
        assert run(generate.main, *arguments) == 0
        result = json.loads(capfd.readouterr().out)
        assert result["settings"]["fast"] == (flags[1] if flags else None)
        texts.append(result["text"])
    assert texts[0] == texts[1] == texts[2]
    (tmp_path / "t.txt").write_text("Once upon a time there was a king who had three sons.")
    for kind in ("exact", "int4"):
        arguments = ("perplexity", str(tmp_path / "t.txt"), "-m", "tales", "--fast", kind, "--json")
        assert run(evaluate.main, *arguments) == 0
        assert json.loads(capfd.readouterr().out)["fast"] == kind


def test_log_probabilities_are_those_of_the_whole_head(capfd: pytest.CaptureFixture[str]) -> None:
    lines = []
    for flags in ((), ("--fast", "float32")):
        arguments = ("Once upon a time", "-m", "tales", "-n", "5", "--json", "--logprobs", "3")
        assert run(generate.main, *arguments, *flags) == 0
        lines.append(json.loads(capfd.readouterr().out)["logprobs"])
    for plain, fast in zip(*lines, strict=True):
        assert fast["logprob"] == pytest.approx(plain["logprob"], abs=1e-4)
        assert [t["token_id"] for t in fast["top"]] == [t["token_id"] for t in plain["top"]]


@pytest.mark.parametrize("flags", [("--dtype", "bfloat16"), ("--device", "cuda")])
def test_fast_is_for_the_cpu(flags: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(generate.main, "x", "--fast", "int8", *flags) == 2
    assert "--fast takes neither --dtype nor --device" in capfd.readouterr().err
