"""The network against Hugging Face's in float64, in every split of a sequence, and under every
config."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import SIZES, harsh_model, hf_twin
from transformers import GPT2LMHeadModel

from minigpt2 import GPT2, GPT2Config, KVCache
from minigpt2.model import positions
from minigpt2.ops import Explicit, explicit, fused

Draw = Callable[..., torch.Tensor]
TINY = SIZES["tiny"]


@pytest.fixture(scope="module")
def double() -> tuple[GPT2, GPT2LMHeadModel]:
    model = harsh_model(TINY).double()
    return model, hf_twin(model)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("distilgpt2", 81_912_576),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_parameter_counts(size: str, count: int) -> None:
    with torch.device("meta"):
        model = GPT2(SIZES[size])
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert len(model.state_dict()) == 4 + 12 * SIZES[size].n_layer


@torch.no_grad()
@pytest.mark.parametrize("ops", [explicit, fused], ids=["explicit", "fused"])
def test_float64_logits_are_hugging_faces(
    double: tuple[GPT2, GPT2LMHeadModel], ops: Explicit, random_ids: Draw
) -> None:
    ours, theirs = double
    ours.ops = ops
    ids = random_ids(2, 64)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-11)


VARIANTS: list[dict[str, Any]] = [
    {"activation_function": "gelu"},
    {"activation_function": "gelu_pytorch_tanh"},
    {"activation_function": "relu"},
    {"n_inner": 70},
    {"layer_norm_epsilon": 0.1},
    {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True},
    {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
    {"reorder_and_upcast_attn": True},
    {"tie_word_embeddings": False},
    {"n_head": 1},
    {"n_layer": 1},
]


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a26_every_config_option_acts_as_in_hugging_face(
    variant: dict[str, Any], random_ids: Draw
) -> None:
    config = dataclasses.replace(TINY, **variant)
    ours = harsh_model(config)
    theirs = hf_twin(ours)
    ids = random_ids(2, 20)
    logits = ours(ids)
    assert torch.equal(logits, theirs(ids).logits)
    cache = KVCache(config, 2, 20)
    stepwise = torch.cat([ours(ids[:, t : t + 1], cache=cache) for t in range(20)], dim=1)
    bound = 1e-5 * logits.abs().max().item()
    torch.testing.assert_close(stepwise, logits, rtol=0, atol=bound)
    ours.ops = explicit
    theirs.set_attn_implementation("eager")
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=bound)


@torch.no_grad()
@pytest.mark.parametrize("variant", [VARIANTS[n] for n in (0, 2, 3, 4, 5, 6, 7, 9, 10)], ids=str)
def test_a26_and_no_option_is_without_effect(variant: dict[str, Any], random_ids: Draw) -> None:
    # The variant's own weights under the plain config, where the shapes allow it.
    config = dataclasses.replace(TINY, **variant)
    model = harsh_model(config)
    if "n_inner" in variant:
        assert model.h[0].mlp.c_fc.weight.shape == (48, 70)
        return
    ids = random_ids(1, 20)
    plain = GPT2(TINY).eval()
    plain.load_state_dict(
        {key: t for key, t in model.state_dict().items() if key != "lm_head.weight"}
    )
    assert (plain(ids) - model(ids)).abs().max() > 1e-4


@torch.no_grad()
def test_every_split_of_a_sequence_gives_the_same_logits(
    double: tuple[GPT2, GPT2LMHeadModel], random_ids: Draw
) -> None:
    model, _ = double
    T = 7
    ids = random_ids(2, T)
    for ops in (fused, explicit):
        model.ops = ops
        whole = model(ids)
        for cuts in itertools.product([False, True], repeat=T - 1):
            edges = [0, *(t + 1 for t, cut in enumerate(cuts) if cut), T]
            cache = KVCache(model.config, 2, T, torch.float64)
            parts = [model(ids[:, a:b], cache=cache) for a, b in itertools.pairwise(edges)]
            assert cache.length == T
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-11)


@torch.no_grad()
def test_a2_cached_steps_equal_the_full_forward_up_to_the_last_position(
    tiny: GPT2, random_ids: Draw
) -> None:
    ids = random_ids(1, 64)
    whole = tiny(ids)
    cache = KVCache(tiny.config, 1, 64)
    steps = torch.cat([tiny(ids[:, t : t + 1], cache=cache) for t in range(64)], dim=1)
    torch.testing.assert_close(steps, whole, rtol=0, atol=1e-5 * whole.abs().max().item())


@torch.no_grad()
def test_a2_a_single_token_gets_its_position(tiny: GPT2) -> None:
    x = tiny.wte.weight[0] + tiny.wpe.weight[0]
    seen = []
    hook = tiny.h[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    tiny(torch.tensor([[0]]))
    hook.remove()
    assert torch.equal(seen[0][0, 0], x)


@torch.no_grad()
def test_a1_left_padded_rows_equal_their_single_runs(
    double: tuple[GPT2, GPT2LMHeadModel], random_ids: Draw
) -> None:
    model, _ = double
    ids = random_ids(3, 9)
    for ops in (fused, explicit):
        model.ops = ops
        mask = torch.ones_like(ids)
        mask[1, :3] = mask[2, :8] = 0
        cache = KVCache(model.config, 3, 9, torch.float64)
        prompt = model(ids[:, :8], mask[:, :8], positions(mask[:, :8]), cache)
        step = model(ids[:, 8:], mask, positions(mask)[:, 8:], cache)
        padded = torch.cat([prompt, step], dim=1)
        assert padded.isfinite().all()
        for row, pad in enumerate((0, 3, 8)):
            torch.testing.assert_close(
                padded[row, pad:], model(ids[row : row + 1, pad:])[0], rtol=0, atol=1e-11
            )


@torch.no_grad()
def test_a1_and_both_mask_and_positions_matter(tiny: GPT2) -> None:
    ids = torch.tensor([[96, 96, 96, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1]])
    right = tiny(ids[:, 3:])[0, -1]
    assert (tiny(ids, mask, positions(mask))[0, -1] - right).abs().max() < 1e-4
    assert (tiny(ids, mask)[0, -1] - right).abs().max() > 0.1
    assert (tiny(ids, None, positions(mask))[0, -1] - right).abs().max() > 0.1


@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (2, 4), (2, 1)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, int], tiny: GPT2) -> None:
    mask = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ValueError, match=r"attention_mask is .*, it must be \(2, 3\)"):
        tiny(torch.tensor([[1, 2, 3], [4, 5, 6]]), mask)


def test_positions_of_a_left_padded_batch() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    assert positions(mask).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]


@torch.no_grad()
def test_causality_no_logit_depends_on_a_later_token(tiny: GPT2, random_ids: Draw) -> None:
    ids = random_ids(1, 12)
    changed = ids.clone()
    changed[0, 6:] = (ids[0, 6:] + 1) % 199
    assert torch.equal(tiny(ids)[:, :6], tiny(changed)[:, :6])
    assert not torch.equal(tiny(ids)[:, 6], tiny(changed)[:, 6])


@torch.no_grad()
@pytest.mark.parametrize("k", [0, 1, 2, 12])
def test_logits_to_keep(tiny_pair: tuple[GPT2, GPT2LMHeadModel], k: int, random_ids: Draw) -> None:
    ours, theirs = tiny_pair
    ids = random_ids(2, 12)
    kept = ours(ids, logits_to_keep=k)
    assert kept.shape == (2, k or 12, 199)
    assert torch.equal(kept, theirs(ids, logits_to_keep=k).logits)


@torch.no_grad()
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 8, 16, 31, 63, 64])
@pytest.mark.parametrize("B", [1, 2, 4])
def test_bits_are_hugging_faces_at_every_shape(
    tiny_pair: tuple[GPT2, GPT2LMHeadModel], B: int, T: int, random_ids: Draw
) -> None:
    ours, theirs = tiny_pair
    ids = random_ids(B, T)
    assert torch.equal(ours(ids), theirs(ids).logits)


@torch.no_grad()
def test_our_error_against_float64_is_no_larger_than_hugging_faces(random_ids: Draw) -> None:
    ours = harsh_model(TINY)
    theirs = hf_twin(ours)
    ids = random_ids(4, 64)
    truth = harsh_model(TINY).double()(ids)
    our_error = (ours(ids) - truth).abs().max()
    assert 0 < our_error <= 1.1 * (theirs(ids).logits - truth).abs().max()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), r"not empty, got \(1, 0\)"),
        (torch.zeros(5, dtype=torch.long), r"must be \(B, T\).*got \(5,\)"),
        (torch.zeros(1, 65, dtype=torch.long), "0 cached . 65 new tokens exceed n_positions 64"),
        (torch.tensor([[1, 199]]), r"token id 199 is outside the vocabulary 0\.\.198"),
        (torch.tensor([[-1, 5]]), r"token id -1 is outside the vocabulary 0\.\.198"),
    ],
)
@pytest.mark.parametrize("ops", [explicit, fused], ids=["explicit", "fused"])
def test_a38_bad_ids_are_refused_with_the_numbers(
    ids: torch.Tensor, message: str, ops: Explicit
) -> None:
    model = GPT2(TINY, ops)
    with pytest.raises(ValueError, match=message):
        model(ids)


@torch.no_grad()
def test_a_cropped_cache_goes_on_from_there(tiny: GPT2, random_ids: Draw) -> None:
    ids, cache = random_ids(1, 8), KVCache(TINY, 1, 8)
    right = tiny(ids, cache=cache)
    cache.crop(100)  # more than there is
    assert cache.length == 8
    cache.crop(5)
    assert cache.length == 5
    again = tiny(ids[:, 5:], cache=cache)
    torch.testing.assert_close(again, right[:, 5:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("position", [64, -1, 10**6])
@pytest.mark.parametrize("ops", [explicit, fused], ids=["explicit", "fused"])
def test_positions_outside_the_window_are_refused(position: int, ops: Explicit) -> None:
    with pytest.raises(ValueError, match=rf"position {position} is outside the window 0\.\.63"):
        GPT2(TINY, ops)(torch.tensor([[1, 2]]), position_ids=torch.tensor([[0, position]]))


def test_ids_and_positions_of_another_kind_are_refused(tiny: GPT2) -> None:
    with pytest.raises(ValueError, match=r"whole numbers \(int64\), got torch\.float32"):
        tiny(torch.tensor([[1.0, 2.0]]))
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for shape in ((2, 2), (3, 3), (3,), (2, 1)):
        with pytest.raises(ValueError, match=r"position_ids are .*, not \(2, 3\)"):
            tiny(ids, position_ids=torch.zeros(shape, dtype=torch.int64))
    row = torch.tensor([[5, 6, 7]])
    assert torch.equal(tiny(ids, position_ids=row), tiny(ids, position_ids=row.expand(2, 3)))


def test_a_full_cache_is_refused_with_the_numbers(tiny: GPT2) -> None:
    cache = KVCache(TINY, 1, 3)
    tiny(torch.tensor([[1, 2, 3]]), cache=cache)
    with pytest.raises(ValueError, match="4 tokens do not fit a KVCache of max_length 3"):
        tiny(torch.tensor([[4]]), cache=cache)
    assert cache.length == 3
    cache = KVCache(TINY, 1, 80)  # roomier than the window
    tiny(torch.ones(1, 64, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match=r"64 cached . 1 new tokens exceed n_positions 64"):
        tiny(torch.tensor([[4]]), cache=cache)


def test_a34_dropout_acts_in_training_mode_only(random_ids: Draw) -> None:
    model = harsh_model(dataclasses.replace(TINY, attn_pdrop=0.5, embd_pdrop=0.2, resid_pdrop=0.3))
    ids = random_ids(1, 10)
    for ops in (fused, explicit):
        model.ops = ops
        model.eval()
        assert torch.equal(model(ids), model(ids))
        model.train()
        assert not torch.equal(model(ids), model(ids))


@pytest.mark.parametrize("name", ["embd_pdrop", "attn_pdrop", "resid_pdrop"])
def test_every_dropout_probability_is_honoured(name: str, random_ids: Draw) -> None:
    off = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    model = harsh_model(dataclasses.replace(TINY, **off)).train()
    ids = random_ids(1, 10)
    assert torch.equal(model(ids), model(ids))
    model = harsh_model(dataclasses.replace(TINY, **(off | {name: 0.5}))).train()
    for ops in (fused, explicit):
        model.ops = ops
        assert not torch.equal(model(ids), model(ids))


@pytest.mark.parametrize("silent", ["attn", "mlp"])
def test_both_parts_of_a_block_are_dropped_out(silent: str, random_ids: Draw) -> None:
    config = dataclasses.replace(TINY, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.5)
    model = harsh_model(config).train()
    with torch.no_grad():
        for block in model.h:
            for parameter in block.get_submodule(silent).c_proj.parameters():  # type: ignore[union-attr]
                parameter.zero_()
    ids = random_ids(1, 10)
    assert not torch.equal(model(ids), model(ids))


def test_initialisation_is_gpt2s() -> None:
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=500, n_positions=64, n_embd=128, n_layer=8, n_head=4))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.02 / (2 * 8) ** 0.5 if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
        else:
            assert (parameter == (1.0 if "ln_" in name and "weight" in name else 0.0)).all(), name


def test_gradients_are_hugging_faces(random_ids: Draw) -> None:
    ours = harsh_model(TINY).double()
    theirs = hf_twin(harsh_model(TINY).double())
    from minigpt2.ops import next_token_loss

    ids = random_ids(2, 12)
    next_token_loss(ours(ids), ids).backward()
    theirs(ids, labels=ids).loss.backward()
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, named[f"transformer.{name}"].grad, rtol=1e-4, atol=1e-5
        )


@torch.no_grad()
@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_the_same_on_an_accelerator(tiny: GPT2, device: str, random_ids: Draw) -> None:
    available = torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()
    if not available:
        pytest.skip(f"no {device} device on this machine")
    moved = harsh_model(TINY).to(device)
    ids = random_ids(2, 12)
    torch.testing.assert_close(moved(ids.to(device)).cpu(), tiny(ids), rtol=1e-3, atol=1e-2)
    assert moved.generate(ids.to(device), max_new_tokens=3).shape == (2, 15)
