"""GPT2Config: the numbers that fix a GPT-2's shape, under the names that config.json gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
    # Guards float16 scores against overflow in training; it moves no logit beyond rounding.
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    embd_pdrop: float = 0.1  # the three dropout probabilities act in training mode only
    attn_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    initializer_range: float = 0.02
    eos_token_id: int | tuple[int, ...] | None = 50256

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _fits(value, str(field.type)):
                need = NEEDS[str(field.type)]
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
        known: dict[str, Any] = {key: value for key, value in values.items() if key in names}
        if isinstance(known.get("eos_token_id"), list):
            known["eos_token_id"] = tuple(known["eos_token_id"])
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json that transformers reads as the same model."""
        values = dataclasses.asdict(self)
        return values | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}


# What a field of each type must be.
NEEDS = {
    "int": "a positive whole number",
    "int | None": "a positive whole number or null",
    "float": "a number from 0 to 1",
    "bool": "true or false",
    "str": f"one of {', '.join(ACTIVATIONS)}",
    "int | tuple[int, ...] | None": "a token id, a list of them or null",
}


def _fits(value: object, need: str) -> bool:
    if need == "bool":
        return isinstance(value, bool)
    if need == "str":
        return value in ACTIVATIONS
    if value is None:
        return "None" in need
    if isinstance(value, tuple):
        return "tuple" in need and all(
            _fits(item, "int | tuple[int, ...] | None") for item in value
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if need == "float":
        return 0 <= value <= 1
    return isinstance(value, int) and (value > 0 or "tuple" in need)
