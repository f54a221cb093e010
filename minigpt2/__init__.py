"""GPT-2 in plain PyTorch, bit-identical to Hugging Face's.

The names below are imported when first used: importing torch takes a second, and `python -m
minigpt2.generate` should answer --help, or refuse an option, without it.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minigpt2.cache import KVCache
    from minigpt2.config import GPT2Config
    from minigpt2.hub import CheckpointError
    from minigpt2.model import GPT2
    from minigpt2.streaming import stream
    from minigpt2.tokenizer import Tokenizer

__all__ = ["GPT2", "CheckpointError", "GPT2Config", "KVCache", "Tokenizer", "stream"]
__version__ = "0.1.0"

# Large tensors in large pages, which a CPU reads faster. PyTorch looks when it is imported.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_HOME = {
    "GPT2": "model",
    "CheckpointError": "hub",
    "GPT2Config": "config",
    "KVCache": "cache",
    "Tokenizer": "tokenizer",
    "stream": "streaming",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
