"""Training throughput beside a plain loop over transformers' GPT2LMHeadModel: same size, same data,
same precision, same settings of AdamW.

    python scripts/benchmark_train.py    # 6 layers, width 256, 8 blocks of 256 tokens in a step

Each contender is a process of its own, since how its C library keeps memory is part of the speed.
All wait but the one that is measured; their turns are interleaved. Tokens per second are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import train
from torch import Tensor, nn
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel
from transformers import logging as transformers_logging

from minigpt2 import GPT2, GPT2Config

MODES = {
    "float32": {"bf16": False, "compiled": False},
    "bfloat16": {"bf16": True, "compiled": False},
    "bfloat16, compiled": {"bf16": True, "compiled": True},
}
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
NO_DROPOUT = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
Step = Callable[[Tensor], object]


def ours(size: dict[str, int], bf16: bool, compiled: bool) -> Step:
    """A step of scripts/train.py."""
    args = argparse.Namespace(accumulate=1, clip=1.0, world=1, out="", device="cpu")
    args.lr, args.weight_decay = ADAMW["lr"], ADAMW["weight_decay"]
    model = GPT2(GPT2Config(**size, **NO_DROPOUT))
    optimizer, loss_of = train.make_optimizer(model, args), train.make_loss(bf16, compiled, "cpu")
    return lambda blocks: train.take_step(model, optimizer, blocks, args, loss_of)


def theirs(size: dict[str, int], bf16: bool, compiled: bool) -> Step:
    """A step as it is usually written."""
    transformers_logging.set_verbosity_error()  # about a loss it names by itself
    model: nn.Module = GPT2LMHeadModel(TheirConfig(**size, **NO_DROPOUT)).train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    forward = torch.compile(model) if compiled else model

    def step(blocks: Tensor) -> float:
        ids = blocks[:, :-1]
        with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def contend(
    connection: Connection, make: Callable[..., Step], mode: str, size: dict[str, int], shape: Any
) -> None:
    """A process: for every number of steps that comes in, the seconds they take go out."""
    if make is ours:
        train.keep_memory()
    torch.manual_seed(0)
    step = make(size, **MODES[mode])
    blocks = torch.randint(50257, (4, *shape))
    while count := connection.recv():
        started = time.perf_counter()
        for n in range(count):
            step(blocks[n % len(blocks)])
        connection.send(time.perf_counter() - started)


def train_speed(
    runs: int, steps: int = 3, batch: int = 8, layers: int = 6, width: int = 256, context: int = 256
) -> None:
    """Print tokens per second in each mode, ours and theirs."""
    size = {"n_layer": layers, "n_head": 4, "n_embd": width, "n_positions": context}
    spawn = multiprocessing.get_context("spawn")
    contenders: dict[tuple[str, str], Connection] = {}
    processes = []
    for mode in MODES:
        for make in (ours, theirs):
            here, there = spawn.Pipe()
            given = (there, make, mode, size, (batch, context + 1))
            processes.append(spawn.Process(target=contend, args=given, daemon=True))
            processes[-1].start()
            contenders[mode, make.__name__] = here

    def seconds(connection: Connection, count: int) -> float:
        connection.send(count)
        return connection.recv()

    for connection in contenders.values():
        seconds(connection, 2)  # warm up, compile
    measured = [
        {name: seconds(connection, steps) for name, connection in contenders.items()}
        for _ in range(runs)
    ]
    speed = {
        name: steps * batch * context / statistics.median(run[name] for run in measured)
        for name in contenders
    }
    plain = speed["float32", "theirs"]
    print(f"{'tokens/s':<22}{'minigpt2':>10}{'transformers':>14}{'ratio':>8}  over plain float32")
    for mode in MODES:
        mine, other = speed[mode, "ours"], speed[mode, "theirs"]
        print(f"{mode:<22}{mine:>10,.0f}{other:>14,.0f}{mine / other:>7.2f}x{mine / plain:>7.2f}x")
    for connection in contenders.values():
        connection.send(0)
    for process in processes:
        process.join()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="in each run")
    parser.add_argument("--batch", type=int, default=8)
    for name, default in (("layers", 6), ("width", 256), ("context", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    train_speed(**vars(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
