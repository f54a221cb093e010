"""Folders in, folders out: ours and Hugging Face's, whole and damaged."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import SIZES, harsh_model, hf_twin
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel

from minigpt2 import GPT2, CheckpointError
from minigpt2.checkpoint import MASK_BUFFER, replace_file

Draw = Callable[..., torch.Tensor]
TINY = SIZES["tiny"]
WEIGHTS = "model.safetensors"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Let `change` edit the tensors of a saved folder."""
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / WEIGHTS).items()}
    tensors = change(tensors) or tensors
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


def reconfigure(folder: Path, **values: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def refused(folder: Path, *parts: str) -> str:
    """Loading fails with a CheckpointError of one line that names every part."""
    with pytest.raises(CheckpointError) as caught:
        GPT2.from_pretrained(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


def same(ours: GPT2, other: GPT2) -> bool:
    theirs = other.state_dict()
    return ours.state_dict().keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[key]) for key, tensor in ours.state_dict().items()
    )


@torch.no_grad()
def test_our_folder_opens_in_transformers_with_equal_bits(
    tiny: GPT2, saved: Path, random_ids: Draw
) -> None:
    ids = random_ids(2, 9)
    theirs, info = GPT2LMHeadModel.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values())
    loaded = GPT2.from_pretrained(saved)
    assert torch.equal(loaded(ids), theirs.eval()(ids).logits)
    assert same(loaded, tiny)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_their_folder_opens_here_with_equal_bits(
    tied: bool, tmp_path: Path, random_ids: Draw
) -> None:
    theirs = hf_twin(harsh_model(dataclasses.replace(TINY, tie_word_embeddings=tied)))
    theirs.save_pretrained(tmp_path)
    ours = GPT2.from_pretrained(tmp_path)
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    ids = random_ids(2, 9)
    assert torch.equal(ours(ids), theirs(ids).logits)
    assert (ours.lm_head is None) is tied


@torch.no_grad()
def test_their_shards_open_here(tmp_path: Path, tiny: GPT2) -> None:
    hf_twin(tiny).save_pretrained(tmp_path, max_shard_size="100kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(GPT2.from_pretrained(tmp_path), tiny)
    missing = sorted(tmp_path.glob("*.safetensors"))[1]
    missing.unlink()
    refused(tmp_path, missing.name)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", 3]
)
def test_a_shard_outside_the_folder_is_refused(name: object, saved: Path) -> None:
    (saved / WEIGHTS).rename(saved.parent / "x.safetensors")
    index = {"weight_map": {"wte.weight": name}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(saved, "model.safetensors.index.json", repr(name), "not the name of a shard")


def test_a22_a_tied_model_is_stored_once_and_shared(tiny: GPT2, saved: Path) -> None:
    stored = load_file(saved / WEIGHTS)
    assert "lm_head.weight" not in stored
    count = sum(parameter.numel() for parameter in tiny.parameters())
    assert sum(tensor.numel() for tensor in stored.values()) == count
    theirs = GPT2LMHeadModel.from_pretrained(saved)
    assert theirs.lm_head.weight.data_ptr() == theirs.transformer.wte.weight.data_ptr()


def test_a_head_of_its_own_is_saved_where_hugging_face_looks(
    tmp_path: Path, random_ids: Draw
) -> None:
    untied = harsh_model(dataclasses.replace(TINY, tie_word_embeddings=False))
    untied.save_pretrained(tmp_path)
    assert "lm_head.weight" in load_file(tmp_path / WEIGHTS)
    theirs, ids = GPT2LMHeadModel.from_pretrained(tmp_path).eval(), random_ids(2, 9)
    with torch.inference_mode():
        assert torch.equal(untied.eval()(ids), theirs(ids).logits)


def test_a22_tied_from_the_head_alone(tiny: GPT2, saved: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")

    assert same(GPT2.from_pretrained(rewrite(saved, rename)), tiny)


def test_a22_both_tables_of_a_tied_model_must_agree(tiny: GPT2, saved: Path) -> None:
    def double(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()

    assert same(GPT2.from_pretrained(rewrite(saved, double)), tiny)

    def differ(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][3, 4] += 1

    refused(rewrite(saved, differ), "lm_head.weight and wte.weight differ", "tie_word_embeddings")
    untied = GPT2.from_pretrained(reconfigure(saved, tie_word_embeddings=False))
    assert untied.lm_head is not None
    assert not torch.equal(untied.lm_head.weight, untied.wte.weight)


def test_an_untied_model_needs_its_head(saved: Path) -> None:
    refused(reconfigure(saved, tie_word_embeddings=False), "missing lm_head.weight (199, 48)")


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
def test_a23_prefix_and_mask_buffers(
    prefix: str, dtype: torch.dtype, tiny: GPT2, saved: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        bare = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
        for layer in range(3):
            bare[f"h.{layer}.attn.bias"] = torch.ones(64, 64).tril().to(dtype).view(1, 1, 64, 64)
            bare[f"h.{layer}.attn.masked_bias"] = torch.tensor(-10000.0)
        return {prefix + key: tensor for key, tensor in bare.items()}

    assert same(GPT2.from_pretrained(rewrite(saved, change)), tiny)


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."]
)
def test_a28_training_wrappers_prefixes(prefix: str, tiny: GPT2, saved: Path) -> None:
    loaded = GPT2.from_pretrained(
        rewrite(saved, lambda t: {prefix + key: x for key, x in t.items()})
    )
    assert same(loaded, tiny)
    loaded.save_pretrained(saved)
    assert not any(prefix in key for key in load_file(saved / WEIGHTS))


def test_a28_only_in_front(saved: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.h.0.module.ln_1.weight"] = tensors.pop("transformer.h.0.ln_1.weight")

    refused(rewrite(saved, change), "unexpected h.0.module.ln_1.weight", "missing h.0.ln_1.weight")


@pytest.mark.parametrize(
    "key", ["h.0.attn.c_attn.bias", "h.2.mlp.c_fc.weight", "wpe.weight", "ln_f.bias", "wte.weight"]
)
def test_a24_a_missing_key_is_named(key: str, saved: Path, tiny: GPT2) -> None:
    shape = tuple(tiny.state_dict()[key].shape)
    rewrite(saved, lambda tensors: {k: t for k, t in tensors.items() if not k.endswith(key)})
    refused(saved, f"missing {key} {shape}")


def test_a24_all_problems_are_listed_together(saved: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.h.1.mlp.c_fcX.weight"] = tensors.pop("transformer.h.1.mlp.c_fc.weight")
        tensors["transformer.ln_f.bias"] = torch.zeros(47)
        tensors["transformer.h.0.attn.biasX"] = torch.zeros(1)

    refused(
        rewrite(saved, change),
        "missing h.1.mlp.c_fc.weight (48, 192)",
        "unexpected h.1.mlp.c_fcX.weight (48, 192)",
        "ln_f.bias has shape (47,), config.json needs (48,)",
        "unexpected h.0.attn.biasX (1,)",
    )


def test_a25_a_transposed_matrix_passes_no_check_but_parity(
    saved: Path, tiny: GPT2, random_ids: Draw
) -> None:
    # Linear layout instead of GPT-2's (in, out): refused where the shape tells.
    refused(
        rewrite(
            saved, lambda t: {k: x.T if k.endswith("c_fc.weight") else x for k, x in t.items()}
        ),
        "h.0.mlp.c_fc.weight has shape (192, 48), config.json needs (48, 192)",
    )
    tiny.save_pretrained(saved)
    turned = GPT2.from_pretrained(
        rewrite(
            saved,
            lambda t: {k: x.T if k.endswith("attn.c_proj.weight") else x for k, x in t.items()},
        )
    )
    with torch.no_grad():
        ids = random_ids(1, 8)
        assert (turned(ids) - tiny(ids)).abs().max() > 0.1


def test_a_key_stored_twice_is_refused(saved: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["wpe.weight"] = tensors["transformer.wpe.weight"] + 1

    refused(rewrite(saved, change), "wpe.weight is stored twice")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_weights_must_be_floating_point(dtype: torch.dtype, saved: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.ln_f.weight"] = tensors["transformer.ln_f.weight"].to(dtype)

    refused(rewrite(saved, change), "ln_f.weight", str(dtype), "floating-point")


def test_a_config_that_asks_for_other_layers_is_refused_at_once(saved: Path) -> None:
    refused(reconfigure(saved, n_layer=10**9), "n_layer 1000000000", "3 layers")


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"n_embd": 50}, ("n_embd 50", "n_head 4")),
        ({"n_embd": 52}, ("c_attn.bias has shape (144,), config.json needs (156,)", "; and ")),
        ({"vocab_size": 10**9}, ("config.json needs (1000000000, 48)",)),
        ({"add_cross_attention": True}, ("add_cross_attention", "not implemented")),
        ({"activation_function": "swish"}, ("activation_function", "gelu_new", "'swish'")),
        ({"n_positions": None}, ("n_positions", "None")),
    ],
)
def test_a_config_that_does_not_fit(
    values: dict[str, object], parts: tuple[str, ...], saved: Path
) -> None:
    refused(reconfigure(saved, **values), "saved", *parts)


def test_missing_files_are_named(saved: Path, tmp_path: Path) -> None:
    (saved / WEIGHTS).unlink()
    refused(saved, "model.safetensors missing", str(saved))
    (saved / "config.json").unlink()
    refused(saved, "config.json, model.safetensors missing")
    refused(tmp_path / "nowhere", "nowhere", "no such folder")
    with pytest.raises(CheckpointError, match="no such folder"):
        GPT2.from_pretrained("./gpt2")


def header(tensors: dict[str, object], length: int | None = None) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


DAMAGED = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header of 2**63": struct.pack("<Q", 2**63) + b"{}",
    "header too large": struct.pack("<Q", 100_000_001) + b"{}",
    "header of many blanks": struct.pack("<Q", 2**20 + 8) + b"{}" + b" " * (2**20 + 6),
    "one byte short": header({"a": entry([2], 0, 8)}) + b"\0" * 7,
    "one byte long": header({"a": entry([2], 0, 8)}) + b"\0" * 9,
    "backward offsets": header({"a": entry([2], 8, 0)}) + b"\0" * 8,
    "negative offset": header({"a": entry([2], -8, 0)}) + b"\0" * 8,
    "shape and size differ": header({"a": entry([3], 0, 8)}) + b"\0" * 8,
    "hole": header({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}) + b"\0" * 12,
    "overlap": header({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}) + b"\0" * 12,
    "shared range": header({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}) + b"\0" * 8,
    "two entries of one name": struct.pack("<Q", 107)
    + b'{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},'
    b'"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}' + b"\0" * 4,
    "unknown dtype": header({"a": entry([2], 0, 8, "F99")}) + b"\0" * 8,
    "not UTF-8": struct.pack("<Q", 8) + b"\xff" * 8,
    "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5481\n",
    "HTML": b"<!DOCTYPE html><html></html>",
    "zip": b"PK\3\4" + b"\0" * 60,
    "pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a21_damaged_files_are_named_with_the_remedy(kind: str, saved: Path) -> None:
    (saved / WEIGHTS).write_bytes(DAMAGED[kind])
    remedy = {
        "git-lfs pointer": "git lfs pull",
        "HTML": "HTML page",
        "zip": "convert it to safetensors",
        "pickle": "convert it to safetensors",
    }.get(kind, "download it again")
    refused(saved, WEIGHTS, remedy)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.99])
def test_a21_a_file_cut_short(share: float, saved: Path) -> None:
    content = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(content[: int(len(content) * share)])
    refused(saved, WEIGHTS, "download it again")


class Harm:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("harmed",)


def test_a_pickle_is_read_for_tensors_only(
    tiny: GPT2, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {f"transformer.{key}": tensor for key, tensor in tiny.state_dict().items()}
    (saved / WEIGHTS).unlink()
    torch.save(state, saved / "pytorch_model.bin")
    assert same(GPT2.from_pretrained(saved), tiny)
    torch.save(state | {"transformer.extra": Harm()}, saved / "pytorch_model.bin")
    refused(saved, "pytorch_model.bin")
    (saved / "pytorch_model.bin").write_bytes(pickle.dumps(Harm()))
    refused(saved, "pytorch_model.bin")
    with zipfile.ZipFile(saved / "pytorch_model.bin", "w") as file:
        file.writestr("x/data.pkl", pickle.dumps(Harm()))
    refused(saved, "pytorch_model.bin")
    assert not (tmp_path / "harmed").exists()
    (saved / "pytorch_model.bin").write_bytes(b"PK cut short")  # not to be converted, as PK else is
    refused(saved, "pytorch_model.bin: damaged or cut short")


def save_pickle(state: object, folder: Path, **options: bool) -> Path:
    (folder / WEIGHTS).unlink(missing_ok=True)
    torch.save(state, folder / "pytorch_model.bin", **options)
    return folder / "pytorch_model.bin"


def test_pickles_of_every_age_open_here(tiny: GPT2, saved: Path) -> None:
    save_pickle(tiny.state_dict(), saved, _use_new_zipfile_serialization=False)  # before 1.6
    assert same(GPT2.from_pretrained(saved), tiny)
    torch.serialization.set_crc32_options(False)  # without checksums
    try:
        save_pickle(tiny.state_dict(), saved)
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(GPT2.from_pretrained(saved), tiny)


def test_a_pickle_whose_checksums_do_not_agree_is_refused(tiny: GPT2, saved: Path) -> None:
    path = save_pickle(tiny.state_dict(), saved)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # inside a matrix
    path.write_bytes(content)
    refused(saved, "pytorch_model.bin: damaged or cut short: download it again", "CRC-32")


def test_a_compressed_pickle_is_refused_before_it_swells(tiny: GPT2, saved: Path) -> None:
    path = save_pickle(tiny.state_dict(), saved)
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, part in parts.items():
            file.writestr(name, part)
    refused(saved, "pytorch_model.bin", "compressed")


class Bytes:
    """A bytearray of 2 GB, in a few bytes of a pickle."""

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return bytearray, (2_000_000_000,)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_that_would_take_any_memory_or_time(zipped: bool, tiny: GPT2, saved: Path) -> None:
    new = {"_use_new_zipfile_serialization": zipped}
    weights = tiny.state_dict()
    save_pickle(weights | {"x": Bytes()}, saved, **new)
    refused(saved, "its pickle asks for", "bytearray")
    wide = torch.zeros((), dtype=torch.float16).expand(10_000_000, 48)
    save_pickle(weights | {"wte.weight": wide}, saved, **new)
    refused(saved, "wte.weight is not the name of a whole tensor")
    doubled: object = ()
    for _ in range(60):  # a hash would take 2**60 steps
        doubled = (doubled, doubled)
    save_pickle({"x": doubled}, saved, **new)
    refused(saved, "its pickle uses a tuple twice")


@pytest.mark.parametrize(
    "tensor", [torch.ones(199, 48).to_sparse(), torch.empty(199, 48, device="meta")]
)
def test_a_pickle_of_something_else_than_numbers_is_refused(
    tensor: torch.Tensor, tiny: GPT2, saved: Path
) -> None:
    save_pickle(tiny.state_dict() | {"wte.weight": tensor}, saved)
    refused(saved, "pytorch_model.bin", "its pickle asks for")
    save_pickle({1: torch.ones(2)}, saved)
    refused(saved, "1 is not the name of a whole tensor")
    save_pickle([1, 2], saved)
    refused(saved, "pytorch_model.bin")


def as_nobody(call: Callable[[], object]) -> object:
    """Call as a user whom permissions stop; root is stopped by none."""
    if os.getuid() != 0:
        return call()
    os.seteuid(65534)
    try:
        return call()
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "name", ["config.json", WEIGHTS, "model.safetensors.index.json", "pytorch_model.bin", ""]
)
def test_what_may_not_be_read_is_named(name: str, tiny: GPT2) -> None:
    with tempfile.TemporaryDirectory() as temporary:  # which others may enter, unlike tmp_path
        Path(temporary).chmod(0o755)
        folder = Path(temporary, "saved")
        tiny.save_pretrained(folder)
        if name not in ("config.json", WEIGHTS):
            (folder / WEIGHTS).rename(folder / (name or WEIGHTS))
        (folder / name).chmod(0)
        as_nobody(lambda: refused(folder, str(folder / name), "ermission"))


def test_an_endless_name_is_no_folder() -> None:
    refused(Path("x" * 5000), "xxx: no such folder")
    refused(Path("./" + "x" * 300), "no such folder")


def test_a_cache_that_may_not_be_entered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "models--someone--tiny").mkdir(mode=0)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", folder)
        Path(folder).chmod(0o755)
        as_nobody(lambda: refused(Path("someone/tiny"), "none to enter", folder))


def test_a_message_is_one_line_whatever_the_file_holds(saved: Path) -> None:
    key = "transformer.\x1b[31m\nh.\ud7ff" + "x" * 10_000
    message = refused(rewrite(saved, lambda t: t | {key: torch.ones(1)}), "\\x1b[31m\\nh.")
    assert message.isprintable()
    assert len(message) < 5000


@pytest.mark.parametrize("name", ["vocab_size", "n_positions", "n_embd", "n_inner"])
@pytest.mark.parametrize("value", [4 * 10**9, 10**18, 10**30])
def test_sizes_that_no_matrix_can_have_are_refused(name: str, value: int, saved: Path) -> None:
    refused(reconfigure(saved, **{name: value}), "config.json")


def test_n_head_is_never_guessed(saved: Path) -> None:
    """Every other size is contradicted by a shape; 12 heads for 4 would give another model."""
    config = json.loads((saved / "config.json").read_text())
    del config["n_head"]
    (saved / "config.json").write_text(json.dumps(config))
    refused(saved, "config.json: n_head is missing")


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<!DOCTYPE html>", "an HTML page"),
        (b"", "download it again"),
        (b'{"n_head": 4', "download it again"),
        (b"\xff", "download it again"),
        (b"[]", "download it again"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_damaged_json_file_is_named_with_the_remedy(
    name: str, content: bytes, remedy: str, saved: Path
) -> None:
    if name != "config.json":
        (saved / WEIGHTS).unlink()
    (saved / name).write_bytes(content)
    refused(saved, name, remedy)


def test_a_text_of_any_size_is_not_read(saved: Path) -> None:
    with (saved / "config.json").open("r+b") as opened:
        opened.truncate(2**40)  # a hole
    refused(saved, "config.json", "1099511627776 bytes, more than 16777216")


def test_mask_buffers_of_every_layer_are_known() -> None:
    assert MASK_BUFFER.fullmatch("h.11.attn.bias")
    assert MASK_BUFFER.fullmatch("h.47.attn.masked_bias")


def test_weights_in_any_memory_order_are_saved(tmp_path: Path) -> None:
    model = harsh_model(SIZES["tiny"])
    model.wte.weight = torch.nn.Parameter(model.wte.weight.detach().T.contiguous().T)
    model.save_pretrained(tmp_path)
    assert same(GPT2.from_pretrained(tmp_path), model)


def test_loaded_in_evaluation_mode_without_a_copy(saved: Path) -> None:
    before = (saved / WEIGHTS).read_bytes()
    model = GPT2.from_pretrained(saved)
    assert not model.training
    with torch.no_grad():
        model.wte.weight.add_(1)  # private pages: the file keeps its bytes
    assert (saved / WEIGHTS).read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_on_loading_and_saving(
    dtype: torch.dtype, tiny: GPT2, saved: Path, tmp_path: Path
) -> None:
    model = GPT2.from_pretrained(saved, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.equal(model.wte.weight, tiny.wte.weight.to(dtype))
    model.save_pretrained(tmp_path / "half")
    again = GPT2.from_pretrained(tmp_path / "half", dtype=dtype)
    assert same(again, model)
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "half").dtype == dtype


def test_loading_does_not_initialise_at_random(saved: Path) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    GPT2.from_pretrained(saved)
    assert torch.equal(torch.get_rng_state(), state)


def test_saving_replaces_files_whole_and_leaves_no_scraps(tiny: GPT2, saved: Path) -> None:
    shutil.rmtree(saved)
    umask = os.umask(0o027)
    try:
        tiny.save_pretrained(saved)
        tiny.save_pretrained(saved)
    finally:
        assert os.umask(umask) == 0o027  # the process's own, left as it was
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", WEIGHTS]
    for path in saved.iterdir():
        assert path.stat().st_mode & 0o777 == 0o640


def test_files_are_replaced_with_respect(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    replace_file(link, lambda path: path.write_text("new"))
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600  # what was private stays so
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_file(pipe, lambda path: path.write_text("through"))
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary).chmod(0o777)
        kept = Path(temporary, "kept")
        kept.write_text("old")
        kept.chmod(0o444)
        with pytest.raises(PermissionError, match=f"Permission denied: {kept}"):
            as_nobody(lambda: replace_file(kept, lambda path: path.write_text("new")))
        assert kept.read_text() == "old"
        assert list(kept.parent.iterdir()) == [kept]


def test_a_failed_save_keeps_the_old_file(
    tiny: GPT2, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def fail(_tensors: object, path: Path, metadata: object) -> None:
        assert metadata
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minigpt2.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="No space"):
        harsh_model(TINY, seed=5).save_pretrained(saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert same(GPT2.from_pretrained(saved), tiny)


def test_a_folder_in_the_way_of_an_official_name(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As documented in hub.find: the short names always mean the official models.
    monkeypatch.chdir(saved.parent)
    shutil.copytree(saved, "gpt2")
    with pytest.raises(CheckpointError, match="gpt2 is not on this machine"):
        GPT2.from_pretrained("gpt2")
    assert GPT2.from_pretrained("./gpt2").config.n_embd == 48
    assert GPT2.from_pretrained("saved").config.n_embd == 48


def test_memory_stays_near_the_files_size(tmp_path: Path) -> None:
    config = dataclasses.replace(SIZES["gpt2"], n_layer=4)  # 272 MB
    GPT2(config).save_pretrained(tmp_path)
    code = """
import resource, sys, torch
from minigpt2 import GPT2
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = GPT2.from_pretrained(sys.argv[1])
with torch.inference_mode():
    model(torch.tensor([[1, 2, 3]]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 1.3 * (tmp_path / WEIGHTS).stat().st_size


def test_error_messages_stay_readable_for_a_wholly_different_file(saved: Path) -> None:
    rewrite(
        saved,
        lambda t: (
            {f"other.{key}": x for key, x in t.items() if ".h." not in key}
            | {k: x for k, x in t.items() if ".h." in k and "mlp" not in k}
        ),
    )
    message = refused(saved, "missing", "unexpected")
    assert len(message) < 3000
    assert re.search(r"; and \d+ more$", message) or message.count("; ") == 19
    assert message == refused(saved)  # sorted: the same file gives the same message
