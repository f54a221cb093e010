"""Write a checkpoint in the form that other tools open.

    python scripts/export.py tales out/tales        # a folder for transformers
    python scripts/export.py tales tales.gguf       # a file for llama.cpp

The folder holds what AutoModelForCausalLM and AutoTokenizer read. The GGUF file holds the same
tensors and vocabulary under llama.cpp's names; it needs the gguf package (minigpt2[export]). Either
appears whole or not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minigpt2 import GPT2, GPT2Config, Tokenizer, cli
from minigpt2.checkpoint import replace_file
from minigpt2.hub import find
from minigpt2.tokenizer import END_OF_TEXT, byte_characters

if TYPE_CHECKING:
    from gguf import GGUFWriter

# What GGUF calls a file whose matrices have the dtype, and the matrices' type.
GGUF_TYPES = {
    "float32": ("ALL_F32", "F32"),
    "bfloat16": ("MOSTLY_BF16", "BF16"),
    "float16": ("MOSTLY_F16", "F16"),
}
# What llama.cpp computes whatever the config says.
LLAMA_CPP = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}


def vocabulary(tokenizer: Tokenizer) -> tuple[dict[str, int], list[str]]:
    """What vocab.json and merges.txt hold: every token's written form and id, in the ids' order,
    and the merges.

    Raises:
        ValueError: a token is no merge of two earlier ones.
    """
    characters = byte_characters()
    specials = {token_id: token for token, token_id in tokenizer.special_tokens.items()}
    ranks = {tokenizer.token_bytes(n): n for n in tokenizer.ids if n not in specials}

    def written(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    vocab = {specials.get(n) or written(tokenizer.token_bytes(n)): n for n in tokenizer.ids}
    merged = (token for token in ranks if len(token) > 1)
    return vocab, [" ".join(map(written, halves(token, ranks))) for token in merged]


def halves(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The two tokens whose merge this one is: what its bytes have become when all earlier merges
    are done."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(parts[n] + parts[n + 1], math.inf) for n in range(len(parts) - 1)]
        first = pairs.index(min(pairs))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    if any(len(part) > 1 and ranks.get(part, math.inf) > ranks[token] for part in parts):
        raise ValueError(f"token {ranks[token]}, {token!r}, is no merge of two earlier tokens")
    return parts


def write_folder(model: GPT2, tokenizer: Tokenizer, folder: Path) -> None:
    """config.json, model.safetensors and the tokenizer's files.

    Raises:
        ValueError: there is such a folder, and it is not empty.
    """
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists: name a new folder, or remove this one first")
    end, n_positions = tokenizer.end_of_text_id, model.config.n_positions
    end_token = None if end is None else END_OF_TEXT
    vocab, merges = vocabulary(tokenizer)
    specials = {
        str(token_id): {"content": token, "special": True}
        for token, token_id in tokenizer.special_tokens.items()
    }
    tokenizer_config = {
        "model_max_length": n_positions,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), end_token),
        "added_tokens_decoder": specials,
    }
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(temporary)
        config = json.loads((temporary / "config.json").read_text(encoding="utf-8"))
        # Without a bos_token_id transformers takes 50256. n_ctx: llama.cpp's converter reads it.
        config |= {"bos_token_id": end, "n_ctx": n_positions}
        for name, text in (
            ("config.json", json.dumps(config, indent=2) + "\n"),
            ("tokenizer_config.json", json.dumps(tokenizer_config, indent=2) + "\n"),
            ("vocab.json", json.dumps(vocab)),
            ("merges.txt", "\n".join(["#version: 0.2", *merges, ""])),
        ):
            (temporary / name).write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_gguf(model: GPT2, tokenizer: Tokenizer, path: Path, dtype: str) -> None:
    """One file with tensors and vocabulary, named and laid out as llama.cpp has GPT-2's.

    Raises:
        ValueError: llama.cpp would compute something else, or there is no gguf package.
        OSError: the file cannot be written.
    """
    try:
        import gguf
    except ImportError:
        raise ValueError("GGUF needs the gguf package: pip install minigpt2[export]") from None
    config = model.config
    refuse_other_models(config, tokenizer)

    def write(temporary: Path) -> None:
        with contextlib.closing(gguf.GGUFWriter(temporary, "gpt2")) as writer:
            writer.add_block_count(config.n_layer)
            writer.add_context_length(config.n_positions)
            writer.add_embedding_length(config.n_embd)
            writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
            writer.add_head_count(config.n_head)
            writer.add_layer_norm_eps(config.layer_norm_epsilon)
            writer.add_file_type(gguf.LlamaFileType[GGUF_TYPES[dtype][0]])
            add_vocabulary(writer, config, tokenizer)
            add_tensors(writer, model, dtype)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()

    try:
        replace_file(path, write)
    except OSError as error:  # numpy says only how many bytes were written
        raise OSError(f"{path}: not written: {error}") from None


def refuse_other_models(config: GPT2Config, tokenizer: Tokenizer) -> None:
    for name, values in LLAMA_CPP.items():
        value = getattr(config, name)
        if value not in values:
            raise ValueError(f"llama.cpp computes GPT-2 with {name} {values[0]!r}, not {value!r}")
    if tokenizer.n_vocab > config.vocab_size:
        sizes = f"{tokenizer.n_vocab} tokens, the model {config.vocab_size}"
        raise ValueError(f"the tokenizer has {sizes}: llama.cpp needs as many or fewer")
    if tokenizer.end_of_text_id is None:
        raise ValueError(
            f"no {END_OF_TEXT} in the vocabulary: llama.cpp would take token 11 for it"
        )


def add_vocabulary(writer: GGUFWriter, config: GPT2Config, tokenizer: Tokenizer) -> None:
    from gguf import TokenType

    vocab, merges = vocabulary(tokenizer)
    tokens = [f"[PAD{token_id}]" for token_id in range(config.vocab_size)]
    types = [TokenType.UNUSED] * config.vocab_size
    for token, token_id in vocab.items():
        special = token in tokenizer.special_tokens
        tokens[token_id] = token
        types[token_id] = TokenType.CONTROL if special else TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokenizer.end_of_text_id)
    writer.add_eos_token_id((*config.eos_token_ids, tokenizer.end_of_text_id)[0])


def add_tensors(writer: GGUFWriter, model: GPT2, dtype: str) -> None:
    """Matrices in dtype, turned to llama.cpp's (out, in); in float32 what llama.cpp adds or
    multiplies elementwise."""
    from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map, quants

    names = get_tensor_name_map(MODEL_ARCH.GPT2, model.config.n_layer)
    for key, tensor in model.state_dict().items():
        matrix = tensor.dim() == 2 and key != "wpe.weight"
        kind = GGMLQuantizationType[GGUF_TYPES[dtype][1] if matrix else "F32"]
        values = (tensor.T.contiguous() if matrix and ".c_" in key else tensor).numpy()
        name = names.get_name(key, (".weight", ".bias"))
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(
        prog="export.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="an official name, tales, a folder or a Hub id")
    add("out", metavar="OUT", type=Path, help="a new folder, or a file")
    choice = "default: gguf where OUT ends in .gguf, else transformers"
    add("--format", choices=("transformers", "gguf"), help=choice)
    add("--dtype", choices=GGUF_TYPES, default="float32", help="of the matrices; default: float32")
    parser.set_defaults(verbose=False)
    args = parser.parse_args(argv)
    args.format = args.format or ("gguf" if args.out.suffix == ".gguf" else "transformers")
    return args


def export(args: argparse.Namespace) -> int:
    folder, dtype = find(args.model), getattr(torch, args.dtype)
    model, tokenizer = GPT2.from_pretrained(folder), Tokenizer.from_pretrained(folder)
    for key, tensor in model.state_dict().items():
        if tensor.to(dtype).isinf().any():
            raise ValueError(f"{key} has values too large for {args.dtype}")
    if args.format == "gguf":
        write_gguf(model, tokenizer, args.out, args.dtype)
    else:
        write_folder(model.to(dtype), tokenizer, args.out)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.out}: {count:,} parameters in {args.dtype}, for {args.format}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return cli.run(args, "export.py", lambda: export(args))


if __name__ == "__main__":
    sys.exit(main())
