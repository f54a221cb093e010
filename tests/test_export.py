"""What scripts/export.py writes, opened by those it is written for: transformers and llama.cpp."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import export
import pytest
import torch
from parity import SIZES, harsh_model
from test_tokenizer import CASES, SMALL_TEXTS, small_vocabulary, write_vocabulary
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from minigpt2 import GPT2, Tokenizer
from minigpt2.tokenizer import END_OF_TEXT

OFFICIAL = {  # sha256 of the official files
    "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
NO_GGUF = "gguf is not installed: minigpt2[export]"
PROMPTS = [
    "Once upon a time",
    "The king said",
    "'What is that?' said",
    "In the forest",
    "1, 2,\n\n3",
]


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([Tokenizer.from_pretrained("gpt2").encode(text)])


def small_checkpoint(folder: Path, vocab: dict[str, int] | None = None, **values: Any) -> GPT2:
    """A tiny model with harsh weights and a small vocabulary, both new."""
    usual, merges = small_vocabulary()
    vocab = usual if vocab is None else vocab
    write_vocabulary(folder, vocab, merges)
    values = {"vocab_size": len(vocab), "eos_token_id": vocab.get(END_OF_TEXT)} | values
    model = harsh_model(dataclasses.replace(SIZES["tiny"], **values))
    model.save_pretrained(folder)
    return model


@pytest.fixture
def small(tmp_path: Path) -> Path:
    small_checkpoint(tmp_path / "small")
    return tmp_path / "small"


# --- A folder for transformers


def test_transformers_opens_tales(tales_folder: Path) -> None:
    names = {path.name for path in tales_folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer_config.json", *OFFICIAL}
    for name, digest in OFFICIAL.items():
        assert hashlib.sha256((tales_folder / name).read_bytes()).hexdigest() == digest
    theirs, ours = AutoModelForCausalLM.from_pretrained(tales_folder), GPT2.from_pretrained("tales")
    assert type(theirs) is GPT2LMHeadModel
    assert theirs.dtype == torch.float32
    config = json.loads((tales_folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["n_ctx"]) == (50256, 50256, 256)
    ids = ids_of(" ".join(PROMPTS))
    with torch.no_grad():
        assert torch.equal(ours(ids), theirs.eval()(ids).logits)


def test_their_tokenizer_gives_our_ids(tales_folder: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(tales_folder), Tokenizer.from_pretrained("gpt2")
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (50256, 50256, 50257)
    assert theirs.model_max_length == 256
    settings = json.loads((tales_folder / "tokenizer_config.json").read_text())
    assert settings["clean_up_tokenization_spaces"] is False  # transformers 4 would, by default
    for case in CASES["cases"]:
        ids = ours.encode(case["text"])
        assert theirs(case["text"], verbose=False)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype(dtype: str, tmp_path: Path) -> None:
    model = small_checkpoint(tmp_path / "in")
    out = tmp_path / "out"
    assert export.main([str(tmp_path / "in"), str(out), "--dtype", dtype]) == 0
    theirs = GPT2LMHeadModel.from_pretrained(out).state_dict()
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    for key, tensor in model.to(getattr(torch, dtype)).state_dict().items():
        assert torch.equal(theirs[f"transformer.{key}"], tensor)


@pytest.mark.parametrize(
    "values",
    [
        {"tie_word_embeddings": False, "n_inner": 50},
        {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True},
        {"eos_token_id": (3, 4)},
        {"eos_token_id": None},
    ],
    ids=str,
)
def test_every_config_survives(values: dict[str, Any], tmp_path: Path) -> None:
    ours = small_checkpoint(tmp_path / "in", **values)
    assert export.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    assert GPT2.from_pretrained(tmp_path / "out").config == ours.config
    with torch.no_grad():
        ids = torch.arange(20).unsqueeze(0)
        assert torch.equal(ours(ids), theirs(ids).logits)


@pytest.mark.parametrize("end", [True, False], ids=["with end of text", "without"])
@pytest.mark.parametrize("added", [{}, {"<| é |>": 270, "<|a|>": 266, "<|a|><|b|>": 267}], ids=str)
def test_a_vocabulary_of_its_own(end: bool, added: dict[str, int], tmp_path: Path) -> None:
    vocab, merges = small_vocabulary()
    if not end:
        del vocab[END_OF_TEXT]
    small_checkpoint(tmp_path / "in", vocab)
    (tmp_path / "in" / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    assert export.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "vocab.json").read_text(encoding="utf-8"))
    assert written == vocab | added
    lines = (tmp_path / "out" / "merges.txt").read_text(encoding="utf-8").splitlines()
    assert lines == ["#version: 0.2", *merges]
    ours = Tokenizer.from_pretrained(tmp_path / "in")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.end_of_text_id,) * 2
    assert theirs.all_special_tokens == [END_OF_TEXT] * end
    assert AutoConfig.from_pretrained(tmp_path / "out").bos_token_id == ours.end_of_text_id
    for text in (*SMALL_TEXTS, "<| é |> the cat <|a|><|a|><|b|>"):
        ids = ours.encode(text)
        assert theirs(text, verbose=False)["input_ids"] == ids
        assert Tokenizer.from_pretrained(tmp_path / "out").encode(text) == ids
        assert theirs.decode(ids) == text


def test_a_token_that_no_merge_makes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"token 257, b'abc', is no merge of two earlier tokens"):
        export.halves(b"abc", {b"a": 0, b"b": 1, b"c": 2, b"abc": 257, b"bc": 258})
    assert export.halves(b"abc", {b"a": 400, b"b": 1, b"c": 2, b"bc": 256, b"abc": 257}) == [
        b"a",
        b"bc",
    ]


# --- Refusals


def test_a_folder_in_use_stays_as_it_is(small: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert export.main([str(small), str(out)]) == 0  # an empty folder will do
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert export.main([str(small), str(out)]) == 1
    message = f"export.py: error: {out} exists: name a new folder, or remove this one first\n"
    assert capsys.readouterr().err == message
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert export.main([str(small), str(out / "config.json")]) == 1  # a file is no folder


def test_mistakes_get_one_line(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(tmp_path / "absent"), str(tmp_path / "out")]) == 1
    assert export.main([str(small), str(tmp_path / "absent" / "deep" / "out.gguf")]) == 1
    with pytest.raises(SystemExit, match="2"):
        export.main([str(small), str(tmp_path / "out"), "--dtype", "int4"])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("export.py: error: ") for line in lines)


def test_a_weight_too_large_for_float16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_checkpoint(tmp_path / "in")
    with torch.no_grad():
        model.h[1].mlp.c_fc.weight[3, 4] = -7e4
    model.save_pretrained(tmp_path / "in")
    for out in ("out", "out.gguf"):
        assert export.main([str(tmp_path / "in"), str(tmp_path / out), "--dtype", "float16"]) == 1
        message = "export.py: error: h.1.mlp.c_fc.weight has values too large for float16\n"
        assert capsys.readouterr().err == message
    assert export.main([str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0


def test_ctrl_c_leaves_nothing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export.os, "replace", interrupt)
    before = set(tmp_path.iterdir())
    assert export.main([str(small), str(tmp_path / "out")]) == 130
    assert set(tmp_path.iterdir()) == before


def test_without_the_gguf_package(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert export.main([str(small), str(tmp_path / "out.gguf")]) == 1
    message = "GGUF needs the gguf package: pip install minigpt2[export]"
    assert capsys.readouterr().err == f"export.py: error: {message}\n"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"activation_function": "gelu"}, "computes GPT-2 with activation_function 'gelu_new'"),
        ({"scale_attn_weights": False}, "computes GPT-2 with scale_attn_weights True, not False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx False"),
        ({"vocab_size": 264}, "the tokenizer has 265 tokens, the model 264"),
    ],
    ids=str,
)
def test_what_llama_cpp_lacks_is_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = small_checkpoint(tmp_path, **values)
    with pytest.raises(ValueError, match=message):
        export.refuse_other_models(model.config, Tokenizer.from_pretrained(tmp_path))


def test_llama_cpp_needs_an_end_of_text(tmp_path: Path) -> None:
    vocab, _ = small_vocabulary()
    del vocab[END_OF_TEXT]
    model = small_checkpoint(tmp_path, vocab, vocab_size=265)
    with pytest.raises(ValueError, match=r"no <\|endoftext\|> in the vocabulary"):
        export.refuse_other_models(model.config, Tokenizer.from_pretrained(tmp_path))


# --- A GGUF file for llama.cpp


def test_ctrl_c_keeps_the_file_there_was(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf", reason=NO_GGUF)

    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "out.gguf").write_text("before", encoding="utf-8")
    before = set(tmp_path.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(gguf.GGUFWriter, "write_tensors_to_file", interrupt)
        assert export.main([str(small), str(tmp_path / "out.gguf")]) == 130
    assert (tmp_path / "out.gguf").read_text(encoding="utf-8") == "before"
    assert set(tmp_path.iterdir()) == before
    assert export.main([str(small), str(tmp_path / "out.gguf")]) == 0
    assert (tmp_path / "out.gguf").read_bytes().startswith(b"GGUF")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_a_gguf_file_holds(dtype: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason=NO_GGUF)
    vocab, merges = small_vocabulary()
    values = {
        "vocab_size": 270,
        "tie_word_embeddings": False,
        "n_inner": 50,
        "eos_token_id": (7, 8),
    }
    model = small_checkpoint(tmp_path / "in", **values)
    assert export.main([str(tmp_path / "in"), str(tmp_path / "out.gguf"), "--dtype", dtype]) == 0
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    got = {name: field.contents() for name, field in reader.fields.items()}
    kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    padding = [f"[PAD{n}]" for n in range(265, 270)]
    expected = {
        "general.architecture": "gpt2",
        "general.file_type": {"F32": 0, "F16": 1, "BF16": 32}[kind],
        "gpt2.block_count": 3,
        "gpt2.context_length": 64,
        "gpt2.embedding_length": 48,
        "gpt2.feed_forward_length": 50,
        "gpt2.attention.head_count": 4,
        "gpt2.attention.layer_norm_epsilon": pytest.approx(1e-5),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*vocab, *padding],
        "tokenizer.ggml.token_type": [3, *[1] * 264, *[5] * 5],  # control, normal, unused
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 7,
    }
    assert {name: got.get(name) for name in expected} == expected
    stored, weights = {tensor.name: tensor for tensor in reader.tensors}, model.state_dict()
    assert len(stored) == len(weights)
    for name, key, type_name in (
        ("token_embd.weight", "wte.weight", kind),
        ("output.weight", "lm_head.weight", kind),
        ("position_embd.weight", "wpe.weight", "F32"),
        ("blk.2.attn_qkv.weight", "h.2.attn.c_attn.weight", kind),
        ("blk.1.attn_output.weight", "h.1.attn.c_proj.weight", kind),
        ("blk.1.attn_output.bias", "h.1.attn.c_proj.bias", "F32"),
        ("blk.0.ffn_up.weight", "h.0.mlp.c_fc.weight", kind),
        ("blk.0.ffn_down.weight", "h.0.mlp.c_proj.weight", kind),
        ("blk.0.ffn_norm.weight", "h.0.ln_2.weight", "F32"),
        ("output_norm.bias", "ln_f.bias", "F32"),
    ):
        tensor, wanted = stored[name], weights[key]
        assert tensor.tensor_type.name == type_name
        if type_name != "F32":
            wanted = wanted.to(getattr(torch, dtype)).float()
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(values, wanted.T if ".c_" in key and wanted.dim() == 2 else wanted)


def test_transformers_reads_the_gguf_file_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate installed")
    model = small_checkpoint(tmp_path)
    for out in ("folder", "file.gguf"):
        assert export.main([str(tmp_path), str(tmp_path / out)]) == 0
    config = AutoConfig.from_pretrained(tmp_path / "folder")  # theirs leaves out context_length
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path, gguf_file="file.gguf", config=config).eval()
    with torch.no_grad():
        ids = torch.arange(20).unsqueeze(0)
        assert torch.equal(model(ids), theirs(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="file.gguf")
    for text in SMALL_TEXTS:
        ours = Tokenizer.from_pretrained(tmp_path).encode(text)
        assert tokenizer(text)["input_ids"] == ours


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """llama.cpp with tales, its cache in float32 as well."""
    pytest.importorskip("gguf", reason=NO_GGUF)
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = str(tmp_path_factory.mktemp("llama") / "tales.gguf")
    assert export.main(["tales", path]) == 0
    cache = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    model = llama_cpp.Llama(path, n_ctx=256, n_threads=1, logits_all=True, verbose=False, **cache)
    yield model
    model.close()


def test_llama_cpp_gives_our_ids(llama: Any) -> None:
    ours = Tokenizer.from_pretrained("gpt2")
    for case in CASES["cases"]:
        ids = llama.tokenize(case["text"].encode(), add_bos=True, special=True)
        assert ids == ours.encode(case["text"])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_llama_cpp_writes_our_greedy_text(prompt: str, llama: Any) -> None:
    ids = ids_of(prompt)
    ours = GPT2.from_pretrained("tales").generate(ids, max_new_tokens=40)[0, ids.shape[1] :]
    theirs = list(islice(llama.generate(ids[0].tolist(), temp=0, repeat_penalty=1), len(ours)))
    assert len(ours) == 40
    assert theirs == ours.tolist()


def test_llama_cpp_computes_our_logits(llama: Any) -> None:
    ids = ids_of(" ".join(PROMPTS))
    llama.reset()
    llama.eval(ids[0].tolist())
    theirs = torch.from_numpy(llama.scores[: ids.shape[1]].copy())
    with torch.no_grad():
        ours = GPT2.from_pretrained("tales")(ids)[0]
    # It looks GELU up in a table of float16 numbers, whose rounding is 2**-11 of each.
    assert (ours - theirs).abs().max() < 2**-11 * ours.abs().max()
    assert torch.equal(ours.argmax(dim=-1), theirs.argmax(dim=-1))
