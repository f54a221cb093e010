"""GPT2Config: the numbers that fix a GPT-2's shape, under the names that config.json gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

ACTIVATIONS = ("gelu_new", "gelu", "gelu_pytorch_tanh", "relu")

# Keys that would change the arithmetic, with the values under which they change nothing. Any other
# key that is not a field (architectures, task_specific_params, ...) cannot move a logit.
INERT: dict[str, tuple[object, ...]] = {
    "model_type": ("gpt2",),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """The shape of one GPT-2; the defaults are the 124M model's.

    Raises:
        ValueError: a value has the wrong type, is out of range or does not fit its neighbours.
    """

    vocab_size: int = 50257  # V: 256 bytes + 50,000 merges + <|endoftext|>
    n_positions: int = 1024  # the context window, in tokens
    n_embd: int = 768  # C: width of the residual stream
    n_layer: int = 12
    n_head: int = 12  # H
    n_inner: int | None = None  # width of the MLP; None means 4 * n_embd
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    # Accepted, without effect here: it guards float16 scores in training, and moves no logit beyond
    # rounding.
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    embd_pdrop: float = 0.1  # the three dropout probabilities act in training mode only
    attn_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    initializer_range: float = 0.02
    eos_token_id: int | tuple[int, ...] | None = 50256

    def __post_init__(self) -> None:
        if isinstance(self.eos_token_id, list):  # as JSON has it
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            fits, need = CHECKS[str(field.type)]
            if not fits(value):
                raise ValueError(f"{field.name} must be {need}, got {value!r}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} does not divide into n_head {self.n_head}")

    @property
    def head_dim(self) -> int:
        """D: the width of one head."""
        return self.n_embd // self.n_head

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text: none, one or several."""
        ids = self.eos_token_id
        return () if ids is None else ids if isinstance(ids, tuple) else (ids,)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GPT2Config:
        """Build a config from config.json's content.

        Raises:
            ValueError: the values ask for something not implemented, or make no sense.
        """
        for key, harmless in INERT.items():
            if key in values and values[key] not in harmless:
                raise ValueError(f"{key} {values[key]!r} is not implemented, only {harmless[0]!r}")
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in names})

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json that transformers reads as the same model."""
        values = dataclasses.asdict(self)
        return values | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}


def _is_whole(value: object, lowest: int) -> bool:
    return type(value) is int and lowest <= value < 2**31


def _are_ids(value: object) -> bool:  # -1 and the like, which some configs have, end no text
    ids = value if isinstance(value, tuple) else (value,)
    return all(_is_whole(token_id, -(2**31)) for token_id in ids)


# What a field of each type must be.
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda v: _is_whole(v, 1), "a positive whole number (below 2**31)"),
    "int | None": (
        lambda v: v is None or _is_whole(v, 1),
        "a positive whole number or null",
    ),
    "float": (lambda v: type(v) in (int, float) and 0 <= v <= 1, "a number from 0 to 1"),
    "bool": (lambda v: isinstance(v, bool), "true or false"),
    "str": (lambda v: v in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
    "int | tuple[int, ...] | None": (
        lambda v: v is None or _are_ids(v),
        "a token id, a list of them or null",
    ),
}
