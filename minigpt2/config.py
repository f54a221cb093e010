"""GPT2Config: the numbers that fix a GPT-2's shape, under the names that config.json gives them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ACTIVATIONS = ("gelu_new", "gelu", "gelu_pytorch_tanh", "relu")

# The other names under which Hugging Face's GPT2Config accepts the same numbers (its
# attribute_map).
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}

# Keys that would change the arithmetic, with the only values under which they change nothing. Every
# other key that is not a field (architectures, task_specific_params, ...) cannot move a logit.
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
    # Keeps float16 scores from overflowing during training; it changes no logit beyond rounding.
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    embd_pdrop: float = 0.1  # the three dropout probabilities act in training mode only
    attn_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    initializer_range: float = 0.02
    eos_token_id: int | tuple[int, ...] | None = 50256

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"):
            value = getattr(self, name)
            if not (_is_int(value) and value > 0 or name == "n_inner" and value is None):
                raise ValueError(f"{name} must be a positive whole number, got {value!r}")
        for name in (
            "layer_norm_epsilon",
            "initializer_range",
            "embd_pdrop",
            "attn_pdrop",
            "resid_pdrop",
        ):
            value, below = getattr(self, name), 1.0 if name.endswith("pdrop") else math.inf
            if not (_is_int(value) or isinstance(value, float)) or not 0 <= value < below:
                raise ValueError(f"{name} must be a number in [0, {below:g}), got {value!r}")
        for field in dataclasses.fields(self):
            if field.type == "bool" and not isinstance(getattr(self, field.name), bool):
                raise ValueError(
                    f"{field.name} must be true or false, got {getattr(self, field.name)!r}"
                )
        if not all(_is_int(token_id) for token_id in self.eos_token_ids):
            raise ValueError(
                f"eos_token_id must be an id, a list of ids or null, got {self.eos_token_id!r}"
            )
        if self.activation_function not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(
                f"activation_function {self.activation_function!r} is not one of: {known}"
            )
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd {self.n_embd} does not divide into n_head {self.n_head} equal heads"
            )

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
            ValueError: the values ask for something that minigpt2 does not implement, or make no
                sense.
        """
        for key, harmless in INERT.items():
            if key in values and values[key] not in harmless:
                raise ValueError(
                    f"{key} = {values[key]!r} is not implemented (only {harmless[0]!r} is)"
                )
        named = {ALIASES.get(key, key): value for key, value in values.items()}
        if isinstance(named.get("eos_token_id"), list):
            named["eos_token_id"] = tuple(named["eos_token_id"])
        fields = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in named.items() if key in fields})

    @classmethod
    def from_json(cls, path: Path) -> GPT2Config:
        """Read config.json.

        Raises:
            ValueError: the file is not JSON, or as from_dict; the message names the file.
            OSError: the file cannot be read.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError(f"expected a JSON object, found {type(values).__name__}")
            return cls.from_dict(values)
        except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
            raise ValueError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json that transformers reads as the same model."""
        values = dataclasses.asdict(self)
        values |= {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        if isinstance(self.eos_token_id, tuple):
            values["eos_token_id"] = list(self.eos_token_id)
        return values


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
