"""A checkpoint in the very layout of the official gpt2, from random weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch

from minigpt2 import GPT2
from minigpt2.hub import OFFICIAL


def write(model: GPT2, hub_cache: Path) -> Path:
    """Put it into a Hugging Face cache as the pinned revision of gpt2; the folder.

    As there: names without a prefix, the causal masks among the tensors, everything float32, and a
    header of 14,283 bytes, so that every tensor lies at an odd address. (The order of the tensors
    is another.)
    """
    official = OFFICIAL["gpt2"]
    folder = hub_cache / "models--openai-community--gpt2" / "snapshots" / official.revision
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    tensors = dict(model.state_dict())
    n = model.config.n_positions
    mask = torch.ones(n, n).tril().view(1, 1, n, n)
    tensors |= {f"h.{layer}.attn.bias": mask for layer in range(model.config.n_layer)}
    header, offset = {}, 0
    ordered = sorted(tensors.items(), key=lambda item: item[1].numel())
    for name, tensor in ordered:
        end = offset + 4 * tensor.numel()
        shape, offsets = list(tensor.shape), [offset, end]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}} | header, separators=(",", ":"))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 14_283) + text.encode().ljust(14_283))
        for _, tensor in ordered:
            file.write(tensor.contiguous().numpy().tobytes())
    return folder
