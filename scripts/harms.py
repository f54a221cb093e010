"""Small checkpoints, and ways to harm their files, for fuzz.py."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from minigpt2 import GPT2, GPT2Config
from minigpt2.tokenizer import END_OF_TEXT, byte_characters

MERGES = ["Ġ t", "h e", "Ġt he", "a t", "c at", "Ġ cat", "l o", "lo w"]
TOKENS = [END_OF_TEXT, *byte_characters().values(), *(merge.replace(" ", "") for merge in MERGES)]
VOCAB = {token: token_id for token_id, token in enumerate(TOKENS)}
CONFIG = GPT2Config(vocab_size=len(VOCAB), n_positions=16, n_embd=16, n_layer=2, n_head=4)

Files = dict[str, bytes]


class Harm:
    """A pickle that leaves a mark where it is run."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("harmed",)


WHOLE_FILES = [
    b"",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 548105171\n",
    b"<!DOCTYPE html><html><body>404</body></html>",
    b"PK\3\4" + bytes(60),
    b"PK\5\6" + bytes(18),  # a zip without entries
    pickle.dumps(Harm()),
    pickle.dumps({"transformer.wte.weight": Harm()}),
    b"[" * 100_000,
    b"\xff\xfe{\0}\0",
    *(json.dumps(value).encode() for value in (None, 7, [], {}, "x", [{}], {"": {"": []}})),
]
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, 5, 16, 0.5, 1e-5, -0.0, 1e308, float("nan"), float("inf"),
    2**31, 2**32 - 1, 2**63, 10**18, 10**30, -(2**63), "", "x", "\n\x1b[31m", "\ud800", "x" * 9**6,
    [], [0], [[]], {}, {"a": {}}, "F16", "BF16", "I32", "F64", "F99", "F4", "F8_E4M3", "C64",
    "../x.safetensors", "/etc/passwd", "model-2.safetensors", END_OF_TEXT, "gelu", 50256, [1, 2],
]  # fmt: skip


def originals(model: GPT2) -> list[Files]:
    """The three unharmed checkpoints, as file names and contents."""
    state = {f"transformer.{key}": tensor for key, tensor in model.state_dict().items()}
    halves = [dict(list(state.items())[start::2]) for start in (0, 1)]
    shards = {f"model-{n}.safetensors": half for n, half in enumerate(halves, start=1)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(VOCAB, [tuple(m.split()) for m in MERGES])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([END_OF_TEXT])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x")

        def content(write: Callable[[], object]) -> bytes:
            write()
            return path.read_bytes()

        config = {"config.json": json.dumps(model.config.to_dict(), indent=2).encode()}
        lists = {
            "vocab.json": json.dumps(VOCAB).encode(),
            "merges.txt": "\n".join(["#version: 0.2", *MERGES, ""]).encode(),
        }
        index = {"weight_map": {key: name for name, half in shards.items() for key in half}}
        return [
            config | lists | {"model.safetensors": content(lambda: save_file(state, path))},
            config
            | {
                name: content(lambda half=half: save_file(half, path))
                for name, half in shards.items()
            }
            | {"model.safetensors.index.json": json.dumps(index).encode()}
            | {"tokenizer.json": tokenizer.to_str().encode()},
            config | lists | {"pytorch_model.bin": content(lambda: torch.save(state, path))},
        ]


def harm_bytes(r: random.Random, content: bytes) -> bytes:
    """Some bytes changed, dropped, doubled or added."""
    data, at = bytearray(content), r.randrange(len(content))
    if r.random() < 0.3:  # where the structure is
        at = r.randrange(min(len(content), 200))
    n = r.choice([1, 1, 2, 8, 100, 1000])
    way = r.randrange(7)
    if way == 0:
        return content[:at]
    if way == 1:
        for _ in range(r.choice([1, 1, 1, 3, 20])):
            data[(at + r.randrange(n)) % len(data)] ^= 1 << r.randrange(8)
    elif way == 2:
        data[at : at + n] = r.choice([b"\0", b"\xff", r.randbytes(1)]) * len(data[at : at + n])
    elif way == 3:
        data[at:at] = r.choice([r.randbytes(n), bytes(n), b" " * n, content[at : at + n]])
    elif way == 4:
        del data[at : at + n]
    elif way == 5:
        other = r.randrange(len(content))
        first, second = content[at : at + n], content[other : other + n]
        data[other : other + len(first)], data[at : at + len(second)] = first, second
    else:
        return content + r.choice([b"\0", b" ", b"\n", r.randbytes(n), content])
    return bytes(data)


def harm_json(r: random.Random, content: bytes) -> bytes:
    """One value of a JSON file replaced, removed, renamed or given twice, at any depth."""
    tree = json.loads(content)
    node: Any = tree
    while True:
        keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = r.choice(keys)
        if not isinstance(node[key], dict | list) or not node[key] or r.random() < 0.3:
            break
        node = node[key]
    way = r.randrange(6)
    if way == 0:
        del node[key]
    elif way == 1:
        node[key] = node[r.choice(keys)]
    elif way == 2 and isinstance(node, dict):
        node[r.choice(["x", "", "h.0.attn.bias", str(key).upper(), "a\nb"])] = node.pop(key)
    elif way == 3 and isinstance(node, dict):
        node["TWICE"] = r.choice([*VALUES, node[key], node[r.choice(keys)]])
        return json.dumps(tree).replace('"TWICE"', json.dumps(key)).encode()
    elif isinstance(node[key], int) and r.random() < 0.5:
        node[key] += r.choice([-1, 1, 4, 64, -64, 2**32, -(2**63), 2**64])
    else:
        node[key] = r.choice(VALUES)
    return json.dumps(tree).encode()


def harm_header(r: random.Random, content: bytes) -> bytes:
    """A safetensors file with a harmed header, or a header of a wrong length."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    if r.random() < 0.15:
        wrong = r.choice(
            [0, 1, length - 1, length + 1, length + 8, 10**8, 10**8 + 1, 2**63, 2**64 - 1]
        )
        return struct.pack("<Q", wrong) + header + data
    header = harm_json(r, header) + b" " * r.choice([0, 0, 1, 7])
    return struct.pack("<Q", len(header)) + header + data


def harm_lines(r: random.Random, content: bytes) -> bytes:
    """A text file with a line dropped, doubled, moved or made up."""
    lines = content.split(b"\n")
    line = lines.pop(r.randrange(len(lines)))
    made_up = [
        line + b" x",
        line.replace(b" ", b""),
        b"a b",
        b"",
        b"#",
        "Ġ  t".encode(),
        b"\x00 \x01",
    ]
    for new in r.choice([[], [line], [line, line], [r.choice(made_up)], [line, r.choice(made_up)]]):
        lines.insert(r.randrange(len(lines) + 1), new)
    return r.choice([b"\n", b"\r\n"]).join(lines)


def harm_place(r: random.Random, path: Path) -> str:
    """What stands in the file's place is no file, or cannot be read."""
    way = r.choice(["gone", "folder", "dangling", "loop", "pipe", "unreadable", "elsewhere"])
    if way == "unreadable":
        path.chmod(0)
        return way
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "pipe":
        os.mkfifo(path)
    elif way != "gone":
        others = sorted(set(path.parent.iterdir()) - {path})
        target = {"dangling": "nowhere", "loop": path.name, "elsewhere": r.choice(others).name}
        path.symlink_to(target[way])
    return way


def harm(r: random.Random, files: Files, folder: Path) -> tuple[str, str]:
    """Write the files, one of them harmed; its name, and how."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    weights = [name for name in files if name.endswith((".safetensors", ".bin"))]
    name = r.choice([*files, *weights])
    ways: dict[str, Callable[[random.Random, bytes], bytes]] = {"bytes": harm_bytes}
    if name.endswith(".json"):
        ways["values"] = harm_json
    elif name.endswith(".safetensors"):
        ways["header"] = harm_header
    elif name.endswith(".txt"):
        ways["lines"] = harm_lines
    way = r.choice([*ways, *ways, *ways, "whole", "place"])
    if way == "place":
        return name, harm_place(r, folder / name)
    content = r.choice(WHOLE_FILES) if way == "whole" else ways[way](r, files[name])
    (folder / name).write_bytes(content)
    return name, way
