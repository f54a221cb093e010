from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from minigpt2 import GPT2Config
from minigpt2.checkpoint import read_config

OFFICIAL_JSON = {  # what the official gpt2's config.json holds
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}


def test_official_config_is_the_default() -> None:
    assert GPT2Config.from_dict(OFFICIAL_JSON) == GPT2Config()


def test_round_trip_through_json(tmp_path: Path) -> None:
    config = GPT2Config(
        n_layer=2,
        n_inner=100,
        activation_function="relu",
        eos_token_id=(3, 4),
        tie_word_embeddings=False,
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()), encoding="utf-8")
    assert read_config(path) == config


@pytest.mark.parametrize(
    ("ids", "expected"), [(None, ()), (7, (7,)), ([7, 8], (7, 8)), ([], ()), (0, (0,))]
)
def test_eos_token_id_null_one_or_a_list(ids: object, expected: tuple[int, ...]) -> None:
    assert GPT2Config.from_dict({"eos_token_id": ids}).eos_token_ids == expected
    assert GPT2Config(eos_token_id=ids).eos_token_ids == expected


@pytest.mark.parametrize(
    "name", ["vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "12", True, math.nan, [12]])
def test_sizes_are_positive_whole_numbers(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be a positive whole number.*got"):
        GPT2Config.from_dict({name: value})


@pytest.mark.parametrize("name", ["layer_norm_epsilon", "embd_pdrop", "attn_pdrop", "resid_pdrop"])
@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan, math.inf, "0.1", None, True])
def test_fractions(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number from 0 to 1, got"):
        GPT2Config.from_dict({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale_attn_weights", 1),
        ("tie_word_embeddings", "false"),
        ("scale_attn_by_inverse_layer_idx", None),
        ("eos_token_id", "x"),
        ("eos_token_id", [1, "x"]),
        ("eos_token_id", -1.5),
        ("eos_token_id", [None]),
        ("eos_token_id", [[1]]),
        ("eos_token_id", [True]),
        ("vocab_size", None),
    ],
)
def test_wrong_types_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        GPT2Config.from_dict({name: value})


@pytest.mark.parametrize("name", ["gelu_fast", "quick_gelu", "silu", "nonsense", "", None, 3])
def test_a27_unknown_activation_is_refused_with_the_known_ones(name: object) -> None:
    with pytest.raises(ValueError, match="activation_function must be one of gelu_new, gelu, "):
        GPT2Config.from_dict({"activation_function": name})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("add_cross_attention", True),
        ("model_type", "gpt_neo"),
        ("is_encoder_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_unimplemented_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key} .* is not implemented"):
        GPT2Config.from_dict({key: value})


def test_width_must_divide_into_heads() -> None:
    with pytest.raises(ValueError, match="n_embd 50 does not divide into n_head 4"):
        GPT2Config(n_embd=50, n_head=4)


@pytest.mark.parametrize("content", ["", "[1]", "null", "{", '{"n_layer": NaN}', "[" * 100_000])
def test_a_file_that_is_no_config_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: "):
        read_config(path)


def test_a_config_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"n_layer": "\xff"}')
    with pytest.raises(ValueError, match=r"config\.json: "):
        read_config(path)
