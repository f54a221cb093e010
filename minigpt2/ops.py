"""The arithmetic under the network, twice.

`explicit` spells every formula out in tensor operations; `fused` calls PyTorch's kernel for the
same function, and is bit-identical to Hugging Face's GPT-2. The model takes either.

Shapes: B batch, T new tokens, S = past + T keys, C width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_mask(T: int, S: int, device: torch.device) -> Tensor:
    """(T, S) booleans: new token i sits at position S - T + i and sees the keys up to there.

    Bottom-right anchored, as in OpenAI's code. PyTorch's is_causal=True is anchored top-left: with
    a cache (S > T) it would hide the past.
    """
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(diagonal=S - T)


class Explicit:
    """Each formula, spelled out."""

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return table[ids]  # (B, T) -> (B, T, C)

    def unembedding(self, x: Tensor, table: Tensor, top: int = 0) -> Tensor:
        return x @ table.T  # (B, T, C) -> (B, T, V)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x @ weight + bias  # weight is (in, out), as the checkpoint stores it

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)  # (B, T, 1)
        variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)  # (B, T, 1)
        return (x - mean) / torch.sqrt(variance + epsilon) * weight + bias

    def activation(self, name: str, x: Tensor) -> Tensor:
        if name == "relu":
            return x.clamp(min=0)
        if name == "gelu":  # x times the normal distribution's mass below x
            return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
        # GPT-2's GELU is the tanh approximation; it differs from the exact one by up to 4.7e-4.
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))

    def attention_weights(self, q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """(B, H, T, D), (B, H, S, D) -> (B, H, T, S); rows sum to 1, and are 0 where masked
        (but even where all is)."""
        T, S = q.shape[-2], k.shape[-2]
        visible = causal_mask(T, S, q.device) if mask is None else mask
        scores = q @ k.transpose(-1, -2) * scale  # (B, H, T, S)
        # The lowest finite number, not -inf: the row of a padding token, which sees nothing, stays
        # finite.
        return scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(dim=-1)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout_p: float
    ) -> Tensor:
        """(B, H, T, D), twice (B, H, S, D) -> (B, H, T, D).

        mask is True where a query may look, (T, S) or (B, 1, T, S); None means plain causal
        attention.
        """
        weights = self.attention_weights(q, k, mask, scale)
        return F.dropout(weights, dropout_p) @ v

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean of -log p(target) over the (N, V) logits whose (N,) target is not -100."""
        log_probs = logits - logits.logsumexp(dim=-1, keepdim=True)
        scored = targets != -100
        picked = log_probs[scored].gather(-1, targets[scored].unsqueeze(-1))
        return -picked.mean()


class Fused(Explicit):
    """PyTorch's kernel for each formula that has one."""

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def unembedding(self, x: Tensor, table: Tensor, top: int = 0) -> Tensor:
        return F.linear(x, table)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (B*T, in)
        return torch.addmm(bias, rows, weight).view(*x.shape[:-1], weight.shape[-1])

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, epsilon)

    def activation(self, name: str, x: Tensor) -> Tensor:
        if name == "relu":
            return F.relu(x)
        if name == "gelu":
            return F.gelu(x)
        if name == "gelu_pytorch_tanh":
            return F.gelu(x, approximate="tanh")
        # gelu_new stays a formula: PyTorch's kernel rounds once where Hugging Face's operations
        # round each time.
        return super().activation(name, x)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout_p: float
    ) -> Tensor:
        # mask None: either T == S, where top-left and bottom-right agree, or T == 1, which sees
        # everything.
        causal = mask is None and q.shape[-2] > 1
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal, scale=scale
        )

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, ignore_index=-100)


explicit = Explicit()
fused = Fused()


def next_token_loss(logits: Tensor, labels: Tensor, ops: Explicit = fused) -> Tensor:
    """Mean cross-entropy in nats of each token given those before it.

    logits (B, T, V), labels (B, T): the token ids themselves, -100 where a token is not to be
    scored. They are shifted here. The last position, which predicts nothing, is ignored rather than
    cut off: that is Hugging Face's summation order, and so its bits.
    """
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]  # (B, T)
    return ops.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1))


# MKL's vector tanh sets itself up during its first call in a process. Split over threads, that call
# sometimes gave half of its results with errors near 1e-4 (one process in ten). One thread alone
# takes a single number.
torch.tanh(torch.zeros(1))
