"""Each formula against its definition in float64, against PyTorch's kernel, and against known
values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from minigpt2.config import ACTIVATIONS
from minigpt2.ops import Explicit, causal_mask, explicit, fused, next_token_loss

BOTH = pytest.mark.parametrize("ops", [explicit, fused], ids=["explicit", "fused"])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def test_causal_mask_is_anchored_bottom_right() -> None:
    assert causal_mask(2, 5, torch.device("cpu")).tolist() == [
        [True, True, True, True, False],
        [True, True, True, True, True],
    ]
    assert causal_mask(3, 3, torch.device("cpu")).equal(torch.ones(3, 3).tril().bool())


@BOTH
def test_a3_several_queries_on_a_cache_see_the_past(ops: Explicit) -> None:
    zeros = torch.zeros(1, 1, 5, 4)
    values = torch.arange(5.0).view(1, 1, 5, 1).expand(1, 1, 5, 4)
    mask = causal_mask(2, 5, torch.device("cpu"))
    two = ops.attention(zeros[:, :, :2], zeros, values, mask, 0.5, 0.0)
    assert two[0, 0, :, 0].tolist() == pytest.approx([1.5, 2.0])
    one = ops.attention(zeros[:, :, :1], zeros, values, None, 0.5, 0.0)
    assert one[0, 0, 0, 0].item() == pytest.approx(2.0)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a4_a_row_that_sees_nothing_stays_finite(ops: Explicit, dtype: torch.dtype) -> None:
    q, k, v = (randn(1, 2, 3, 8, seed=s, dtype=dtype) for s in range(3))
    mask = torch.tensor([[[[False] * 3, [False] * 3, [False, False, True]]]])
    out = ops.attention(q, k, v, mask, 0.35, 0.0)
    assert out.isfinite().all()
    assert ops.attention_weights(q, k, mask, 0.35).isfinite().all()
    torch.testing.assert_close(out[:, :, 2], v[:, :, 2])


@BOTH
def test_attention_is_softmax_of_scaled_scores_over_the_visible(ops: Explicit) -> None:
    q, k, v = randn(2, 3, 4, 8), randn(2, 3, 6, 8, seed=1), randn(2, 3, 6, 8, seed=2)
    mask = causal_mask(4, 6, torch.device("cpu"))
    out = ops.attention(q, k, v, mask, 0.3, 0.0)
    for i in range(4):
        visible = 6 - 4 + i + 1
        scores = [
            [[q[b, h, i] @ k[b, h, j] * 0.3 for j in range(visible)] for h in range(3)]
            for b in range(2)
        ]
        weights = torch.tensor(scores, dtype=torch.float64).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        expected = torch.einsum("bhj,bhjd->bhd", weights, v[:, :, :visible])
        torch.testing.assert_close(out[:, :, i], expected, rtol=1e-12, atol=1e-12)


def test_attention_weights_sum_to_one_and_never_look_ahead() -> None:
    weights = explicit.attention_weights(randn(1, 2, 5, 8), randn(1, 2, 5, 8, seed=1), None, 1.0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 5, dtype=torch.float64))
    assert (weights.triu(1) == 0).all()


@BOTH
@pytest.mark.parametrize(
    ("name", "at_one"),
    [
        ("gelu_new", 0.841191991),
        ("gelu", 0.841344746),
        ("gelu_pytorch_tanh", 0.841191991),
        ("relu", 1.0),
    ],
)
def test_a27_activations_at_one(ops: Explicit, name: str, at_one: float) -> None:
    value = ops.activation(name, torch.tensor([1.0, -1.0], dtype=torch.float64))
    assert value[0].item() == pytest.approx(at_one, abs=1e-9)
    assert value[1].item() == pytest.approx(at_one - 1 if name != "relu" else 0, abs=1e-9)


@BOTH
def test_a27_the_two_gelus_differ_by_473e_6_at_270(ops: Explicit) -> None:
    x = torch.linspace(-6, 6, 12001, dtype=torch.float64)
    gap = (ops.activation("gelu_new", x) - ops.activation("gelu", x)).abs()
    assert gap.max().item() == pytest.approx(4.73e-4, abs=1e-6)
    assert abs(x[gap.argmax()].item()) == pytest.approx(2.70, abs=0.01)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_explicit_activation_is_the_fused_one(name: str) -> None:
    x = randn(1000) * 4
    torch.testing.assert_close(
        explicit.activation(name, x), fused.activation(name, x), rtol=1e-12, atol=1e-12
    )


@BOTH
def test_layer_norm_gives_mean_zero_and_variance_one(ops: Explicit) -> None:
    x = randn(3, 4, 16) * 5 + 2
    ones, zeros = torch.ones(16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    y = ops.layer_norm(x, ones, zeros, 0.0)
    torch.testing.assert_close(
        y.mean(-1), torch.zeros(3, 4, dtype=torch.float64), atol=1e-12, rtol=0
    )
    torch.testing.assert_close(y.var(-1, unbiased=False), torch.ones(3, 4, dtype=torch.float64))
    weight, bias = randn(16, seed=1), randn(16, seed=2)
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 0.0), y * weight + bias)
    constant = ops.layer_norm(torch.full((1, 1, 16), 3.0, dtype=torch.float64), weight, bias, 1e-5)
    torch.testing.assert_close(constant, bias.view(1, 1, -1))


@BOTH
def test_linear_and_tables(ops: Explicit) -> None:
    x, weight, bias = randn(2, 3, 5), randn(5, 7, seed=1), randn(7, seed=2)
    torch.testing.assert_close(
        ops.linear(x, weight, bias), torch.einsum("bti,io->bto", x, weight) + bias
    )
    table = randn(9, 5, seed=3)
    ids = torch.tensor([[0, 8], [3, 3]])
    torch.testing.assert_close(ops.embedding(ids, table)[1, 1], table[3])
    torch.testing.assert_close(ops.unembedding(x, table)[1, 2, 4], x[1, 2] @ table[4])


@BOTH
def test_loss_is_the_mean_over_the_tokens_that_have_a_predecessor(ops: Explicit) -> None:
    logits = randn(2, 4, 11, dtype=torch.float32)
    labels = torch.tensor([[1, 2, 3, 4], [5, 6, -100, 7]])
    by_hand = [
        -math.log(logits[b, t].double().softmax(-1)[labels[b, t + 1]].item())
        for b in range(2)
        for t in range(3)
        if labels[b, t + 1] >= 0
    ]
    assert len(by_hand) == 5
    assert next_token_loss(logits, labels, ops).item() == pytest.approx(sum(by_hand) / 5, rel=1e-6)


@BOTH
def test_a32_padding_by_length_still_learns_the_end_of_text(ops: Explicit) -> None:
    # Rows [10, 11, EOT] and [12, 13, 14, 15, EOT]: 2 + 4 predicted tokens, both ends among them.
    eot = 17
    labels = torch.tensor([[10, 11, eot, -100, -100], [12, 13, 14, 15, eot]])
    logits = torch.zeros(2, 5, 18)
    logits[0, 1, eot] = logits[1, 3, eot] = 50.0  # certain of both ends, ignorant of the rest
    assert next_token_loss(logits, labels, ops).item() == pytest.approx(
        4 * math.log(18) / 6, rel=1e-5
    )


def test_the_fused_loss_is_computed_in_float32() -> None:
    logits = randn(1, 3, 50, dtype=torch.bfloat16)
    labels = torch.tensor([[1, 2, 3]])
    expected = F.cross_entropy(logits.float()[0, :2], labels[0, 1:])
    torch.testing.assert_close(next_token_loss(logits, labels), expected)
