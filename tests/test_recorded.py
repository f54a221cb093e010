"""A trained model from outside this project, with the activations that minGPT recorded for it.

The recording lies beside some checkouts (shared/fixtures/gpt-nano-sort) and is not part of this
repository.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minigpt2 import GPT2, GPT2Config
from minigpt2.ops import Explicit, Fused

FOLDER = Path(__file__).parents[2] / "shared" / "fixtures" / "gpt-nano-sort"
TRANSPOSED = ("c_attn.weight", "attn.c_proj.weight", "c_fc.weight", "mlp.c_proj.weight")


def read(name: str) -> dict[str, Tensor]:
    entries = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return {
        key.removeprefix("transformer."): torch.frombuffer(
            bytearray(base64.b64decode(entry["data"])), dtype=torch.float32
        ).view(entry["shape"])
        for key, entry in entries.items()
        if "data" in entry
    }


class RecordExplicit(Explicit):
    """Keeps what goes in and out of each operation, in order."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {}

    def keep(self, name: str, value: Tensor) -> Tensor:
        self.seen.setdefault(name, []).append(value)
        return value

    def layer_norm(self, *args):  # type: ignore[no-untyped-def]
        return self.keep("ln", super().layer_norm(*args))

    def linear(self, *args):  # type: ignore[no-untyped-def]
        return self.keep("linear", super().linear(*args))

    def activation(self, *args):  # type: ignore[no-untyped-def]
        return self.keep("gelu", super().activation(*args))

    def attention(self, q: Tensor, k: Tensor, *args):  # type: ignore[no-untyped-def]
        self.keep("q", q), self.keep("k", k), self.keep("v", args[0])
        self.keep("weights", self.attention_weights(q, k, args[1], args[2]))
        return self.keep("heads", super().attention(q, k, *args))


class RecordFused(RecordExplicit, Fused):
    """The same over the kernels."""


@pytest.fixture(scope="module")
def recording() -> tuple[GPT2, dict[str, Tensor]]:
    if not FOLDER.is_dir():
        pytest.skip(f"the recording of gpt-nano-sort is not beside this checkout ({FOLDER.name})")
    weights = {key: t for key, t in read("model.json").items() if not key.endswith(("attn.bias",))}
    weights |= {key: t for key, t in read("model.json").items() if key.endswith("c_attn.bias")}
    weights = {key: t.T if key.endswith(TRANSPOSED) else t for key, t in weights.items()}
    config = GPT2Config(
        n_layer=3, n_head=3, n_embd=48, vocab_size=3, n_positions=11, tie_word_embeddings=False
    )
    model = GPT2(config).eval()
    model.load_state_dict(weights)
    return model, read("t0-partials.json")


@torch.no_grad()
@pytest.mark.parametrize("record", [RecordExplicit, RecordFused])
def test_every_recorded_activation(
    record: type[RecordExplicit], recording: tuple[GPT2, dict[str, Tensor]]
) -> None:
    model, recorded = recording
    ops = record()
    model.ops = ops
    blocks: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda *args: blocks.append(args[2])) for block in model.h]
    logits = model(recorded["idx"].long())
    for hook in hooks:
        hook.remove()
    seen = ops.seen
    ours = {
        "ln1": seen["ln"][0],
        "qkv": seen["linear"][0],
        "q": seen["q"][0],
        "k": seen["k"][0],
        "v": seen["v"][0],
        "attSm": seen["weights"][0],
        "y": seen["heads"][0].transpose(1, 2).reshape(3, 11, 48),
        "yProj": seen["linear"][1],
        "ln2": seen["ln"][1],
        "fc": seen["linear"][2],
        "gelu": seen["gelu"][0],
        "mlp": seen["linear"][3],
        "block0": blocks[0],
        "block1": blocks[1],
        "block2": blocks[2],
        "ln_f": seen["ln"][-1],
        "lm_head": logits,
        "probs": logits.softmax(-1),
    }
    for name, value in ours.items():
        expected = recorded[name].view_as(value)
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-5, msg=name)
