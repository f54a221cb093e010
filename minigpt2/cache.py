"""The keys and values of the tokens a model has already seen."""

from __future__ import annotations

import torch
from torch import Tensor

from minigpt2.config import GPT2Config


class KVCache:
    """Room for `max_length` tokens, allocated once. Hugging Face calls this past_key_values.

    keys, values: (n_layer, B, H, max_length, D). length: how many tokens are filled, the same in
    every layer. A step calls `update` once in every layer and then `advance` once, at the end of
    GPT2.forward.
    """

    def __init__(
        self,
        config: GPT2Config,
        batch_size: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.n_layer, batch_size, config.n_head, max_length, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.max_length = max_length
        self.length = 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' (B, H, T, D) behind the old ones; return all S = length + T of the
        layer.

        Raises:
            ValueError: the tokens do not fit.
        """
        end = self.length + k.shape[-2]
        if end > self.max_length:
            raise ValueError(f"{end} tokens do not fit a KVCache of max_length {self.max_length}")
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]  # (B, H, S, D)

    def advance(self, n: int) -> None:
        """Count n more tokens as filled."""
        self.length += n

    def crop(self, length: int) -> None:
        """Forget all tokens behind the first `length`."""
        self.length = min(self.length, length)

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was: reordered beams, or a prompt for several samples."""
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            same = len(rows) == old.shape[1]
            new = old if same else old.new_empty(old.shape[0], len(rows), *old.shape[2:])
            new[:, :, :, : self.length] = old[:, rows, :, : self.length]
            setattr(self, name, new)
