"""GPT-2, from token ids to next-token scores (Radford et al. 2019, section 2.3).

Read it after config.py and ops.py. Attributes carry the checkpoint's names and layout, so that the
keys of `state_dict()` are the keys of the file and no matrix is transposed.

Shapes: B batch, T new tokens, S = past + T keys, C width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt2.cache import KVCache
from minigpt2.config import GPT2Config
from minigpt2.ops import Explicit, causal_mask, fused

Mask = Tensor | None  # (T, S) or (B, 1, T, S), True where a token may look; None: causal


class Linear(nn.Module):
    """x @ weight + bias; weight is (in, out), as in the 1x1 convolutions that c_attn's c_ means."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.empty(n_out))

    def forward(self, x: Tensor, ops: Explicit) -> Tensor:
        return ops.linear(x, self.weight, self.bias)  # (B, T, in) -> (B, T, out)


class LayerNorm(nn.Module):
    """Each vector to mean 0 and variance 1, then a learned scale and shift (Ba et al. 2016)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.epsilon = config.layer_norm_epsilon
        self.weight = nn.Parameter(torch.empty(config.n_embd))
        self.bias = nn.Parameter(torch.empty(config.n_embd))

    def forward(self, x: Tensor, ops: Explicit) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.epsilon)


class Embedding(nn.Module):
    """A table with one vector per id, (n, C)."""

    def __init__(self, n: int, n_embd: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, n_embd))

    def forward(self, ids: Tensor, ops: Explicit) -> Tensor:
        return ops.embedding(ids, self.weight)  # (B, T) -> (B, T, C)


class CausalSelfAttention(nn.Module):
    """Every token gathers from itself and from the tokens before it, in n_head ways at once."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.layer, self.n_head = layer, config.n_head
        self.scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.attn_pdrop, self.resid_pdrop = config.attn_pdrop, config.resid_pdrop
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)  # query, key, value
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, mask: Mask, cache: KVCache | None, ops: Explicit) -> Tensor:
        qkv = self.c_attn(x, ops)  # (B, T, 3C)
        q, k, v = (self._split_heads(part) for part in qkv.chunk(3, dim=-1))  # (B, H, T, D) each
        if cache is not None:
            k, v = cache.update(self.layer, k, v)  # (B, H, S, D)
        heads = ops.attention(q, k, v, mask, self.scale, self.attn_pdrop if self.training else 0.0)
        merged = heads.transpose(1, 2).reshape(x.shape)  # (B, H, T, D) -> (B, T, C)
        return F.dropout(self.c_proj(merged, ops), self.resid_pdrop, self.training)

    def _split_heads(self, part: Tensor) -> Tensor:
        return part.view(*part.shape[:2], self.n_head, -1).transpose(1, 2)


class MLP(nn.Module):
    """Two linear maps with a nonlinearity between them, for each token alone."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        n_inner = config.n_inner or 4 * config.n_embd
        self.activation_function, self.resid_pdrop = config.activation_function, config.resid_pdrop
        self.c_fc = Linear(config.n_embd, n_inner)
        self.c_proj = Linear(n_inner, config.n_embd)

    def forward(self, x: Tensor, ops: Explicit) -> Tensor:
        hidden = ops.activation(self.activation_function, self.c_fc(x, ops))  # (B, T, 4C)
        return F.dropout(self.c_proj(hidden, ops), self.resid_pdrop, self.training)  # (B, T, C)


class Block(nn.Module):
    """Attention, then MLP: each reads a normalised copy of the residual stream x and adds to it."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = LayerNorm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: Mask, cache: KVCache | None, ops: Explicit) -> Tensor:
        x = x + self.attn(self.ln_1(x, ops), mask, cache, ops)
        x = x + self.mlp(self.ln_2(x, ops), ops)
        return x


class GPT2(nn.Module):
    """Embeddings, n_layer blocks, a last norm, and the token table used again as the head.

    `ops` is the arithmetic: ops.fused (default) or ops.explicit. GPT2(config) has GPT-2's random
    initialisation and is in training mode; from_pretrained loads weights and is in evaluation mode.
    """

    def __init__(self, config: GPT2Config, ops: Explicit = fused) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.wte = Embedding(config.vocab_size, config.n_embd)  # word (token) embedding
        self.wpe = Embedding(config.n_positions, config.n_embd)  # word position embedding
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = LayerNorm(config)
        # A head of its own is rare: GPT-2's is wte used again (tied), and has no key in the file.
        self.lm_head = None if config.tie_word_embeddings else Embedding(*self.wte.weight.shape)
        if not self.wte.weight.is_meta:  # the loader, which has values, builds on the meta device
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """GPT-2's random initialisation (paper, section 2.3). The maps that write to the residual
        stream start smaller, so that the sum over all 2 * n_layer of them keeps its variance."""
        std = self.config.initializer_range
        c_proj_std = std / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=c_proj_std if name.endswith("c_proj.weight") else std)
            else:
                parameter.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
        top: int = 0,
    ) -> Tensor:
        """The logits of the next token after each token: (B, T) ids -> (B, T, V).

        Args:
            attention_mask: (B, S), 0 where a (left) padding token stands, cached tokens included.
            position_ids: (B, T); by default past, past + 1, ... whatever the mask, as in Hugging
                Face's forward. A left-padded batch needs `positions(attention_mask)`.
            cache: holds the past tokens and takes in the new ones.
            logits_to_keep: compute the last k positions' logits only; 0 means all.
            top: only so many best logits of each position are asked for; a packed model may give
                -inf for the others. 0 means all.

        Raises:
            ValueError: no tokens, an id outside the vocabulary, a position outside the window, more
                than n_positions tokens, or a mask of another shape.
        """
        past = cache.length if cache is not None else 0
        self._check(token_ids, position_ids, past)
        if position_ids is None:
            position_ids = torch.arange(past, past + token_ids.shape[1], device=token_ids.device)
        mask = self._mask(len(token_ids), token_ids.shape[1], past, attention_mask)

        x = self.wte(token_ids, self.ops) + self.wpe(position_ids, self.ops)  # (B, T, C)
        x = F.dropout(x, self.config.embd_pdrop, self.training)
        for block in self.h:
            x = block(x, mask, cache, self.ops)  # (B, T, C)
        if cache is not None:
            cache.advance(token_ids.shape[1])

        x = self.ln_f(x[:, -logits_to_keep:], self.ops)  # [:, -0:] keeps all; (B, k, C)
        table = self.wte.weight if self.lm_head is None else self.lm_head.weight
        return self.ops.unembedding(x, table, top)  # (B, k, V)

    def _check(self, token_ids: Tensor, position_ids: Tensor | None, past: int) -> None:
        shape, n_positions, V = token_ids.shape, self.config.n_positions, self.config.vocab_size
        if token_ids.dim() != 2 or token_ids.numel() == 0:
            raise ValueError(f"token_ids must be (B, T), not empty, got {tuple(shape)}")
        if token_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"token_ids must be whole numbers (int64), got {token_ids.dtype}")
        if position_ids is not None and position_ids.shape not in (shape, (1, shape[1])):
            raise ValueError(f"position_ids are {tuple(position_ids.shape)}, not {tuple(shape)}")
        if past + shape[1] > n_positions:
            total = f"{past} cached + {shape[1]} new tokens"
            raise ValueError(f"{total} exceed n_positions {n_positions}: feed the last ones alone")
        if torch.compiler.is_compiling():
            return  # what follows reads values, which a compiled graph cannot
        limits = [("token id", token_ids, "the vocabulary", V)]
        if position_ids is not None:
            limits.append(("position", position_ids, "the window", n_positions))
        for what, values, where, n in limits:
            for value in values.aminmax():
                if not 0 <= value < n:
                    raise ValueError(f"{what} {value} is outside {where} 0..{n - 1}")

    def _mask(self, B: int, T: int, past: int, attention_mask: Tensor | None) -> Mask:
        """What each new token may see, (T, S) or (B, 1, T, S); None where plain causal attention
        says it all, which is also where Hugging Face passes no mask."""
        if attention_mask is not None and attention_mask.shape != (B, past + T):
            have, need = tuple(attention_mask.shape), (B, past + T)
            raise ValueError(f"attention_mask is {have}, it must be {need}: cached tokens included")
        if attention_mask is not None and attention_mask.all():
            attention_mask = None
        if attention_mask is None and (T == 1 or past == 0):
            return None
        mask = causal_mask(T, past + T, self.wte.weight.device)  # (T, S)
        return mask if attention_mask is None else mask & attention_mask[:, None, None].bool()

    @classmethod
    def from_pretrained(cls, name_or_folder: str | Path, **options: Any) -> GPT2:
        """Load a checkpoint; see checkpoint.load_pretrained for names, options and errors."""
        from minigpt2.checkpoint import load_pretrained

        return load_pretrained(name_or_folder, **options)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors; see checkpoint.save_pretrained."""
        from minigpt2.checkpoint import save_pretrained

        save_pretrained(self, folder)

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache for so many texts of at most so many tokens, in the model's dtype and on
        its device."""
        weight = self.wte.weight
        return KVCache(self.config, batch_size, max_length, weight.dtype, weight.device)

    def pack(self, kind: str) -> None:
        """Repack the matrices for this CPU, once and for good: "float32", "bfloat16", "float16",
        "int8" or "int4"; "exact" leaves them, bit for bit, and screens the head alone."""
        from minigpt2.packed import pack

        pack(self, kind)

    def generate(self, token_ids: Tensor, **options: Any) -> Tensor:
        """Continue (B, T) ids to (B, T + new); see decoding.generate for the options."""
        from minigpt2.decoding import generate

        return generate(self, token_ids, **options)


def positions(attention_mask: Tensor) -> Tensor:
    """(B, S) mask -> (B, S) position ids of a left-padded batch: 0, 1, ... from the first token on.

    Padding gets position 0; Hugging Face's generate computes the same.
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)
