"""Train a GPT-2 on text files.

    python scripts/train.py --data stories.txt --validation held_out.txt --out weights/mine

Texts may be .txt, .xz or .gz; <|endoftext|> separates documents. Naming a file twice weights it
twice. The run can be stopped at any time: the same command goes on from OUT/training.pt, and its
steps are those of an unbroken run.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gzip
import lzma
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minigpt2 import GPT2, GPT2Config, Tokenizer
from minigpt2.checkpoint import replace_file
from minigpt2.tokenizer import END_OF_TEXT

LossFunction = Callable[[GPT2, Tensor], Tensor]
OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}


def read_tokens(paths: Sequence[Path], tokenizer: Tokenizer, n_positions: int) -> np.ndarray:
    """All documents' ids behind one another, each opened by <|endoftext|>: (N,) uint16.

    Raises:
        ValueError: together the files are shorter than one block of n_positions + 1 tokens.
    """
    ids: list[np.ndarray] = []
    for path in paths:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            documents = file.read().split(END_OF_TEXT)
        for document in filter(None, (document.strip("\n") for document in documents)):
            ids.append(
                np.array([tokenizer.end_of_text_id, *tokenizer.encode(document)], dtype=np.uint16)
            )
    total = sum(map(len, ids))
    if total <= n_positions:
        names = ", ".join(map(str, paths))
        raise ValueError(
            f"{names}: {total} tokens, but one block needs n_positions + 1 = {n_positions + 1}"
        )
    return np.concatenate(ids)


def random_blocks(
    tokens: np.ndarray, batch_size: int, length: int, rng: np.random.Generator
) -> Tensor:
    """(batch_size, length + 1) windows drawn anywhere in the tokens: inputs and, one later, their
    targets."""
    starts = rng.integers(0, len(tokens) - length, size=batch_size)
    return torch.from_numpy(
        np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
    )


def block_loss(model: GPT2, blocks: Tensor) -> Tensor:
    """Mean loss of blocks (B, T + 1): every one of the T inputs predicts its successor."""
    # The last column is only a target, so it is fed nowhere: shift by hand, score all T positions.
    logits = model(blocks[:, :-1])
    return model.ops.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]), blocks[:, 1:].reshape(-1)
    )


@torch.no_grad()
def validation_loss(
    model: GPT2, tokens: np.ndarray, batch_size: int, loss_of: LossFunction
) -> float:
    """Mean loss over the tokens cut into consecutive blocks (the last, short one is left out)."""
    length = model.config.n_positions
    count = (len(tokens) - 1) // length
    blocks = np.stack([tokens[n * length : (n + 1) * length + 1] for n in range(count)]).astype(
        np.int64
    )
    model.eval()
    losses = [
        loss_of(model, part).item() * len(part)
        for part in torch.from_numpy(blocks).split(batch_size)
    ]
    model.train()
    return sum(losses) / count


def make_optimizer(model: GPT2, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; the tied table is one parameter and decays once."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up to lr, then half a cosine down to a tenth of it."""
    if step < args.warmup:
        return float(args.lr * (step + 1) / args.warmup)
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return float(args.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))))


def check_loss(loss: float, args: argparse.Namespace) -> None:
    """Refuse a loss that is no longer a number."""
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}: lower --lr ({args.out} keeps the last good state)")


def take_step(
    model: GPT2,
    optimizer: torch.optim.Optimizer,
    args: argparse.Namespace,
    next_blocks: Callable[[], Tensor],
    loss_of: LossFunction,
) -> float:
    """One update from args.accumulate passes; their mean loss.

    Raises:
        ValueError: the loss is no longer a number. The weights are as they were.
    """
    total = 0.0
    for _ in range(args.accumulate):
        loss = loss_of(model, next_blocks()) / args.accumulate
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    check_loss(total, args)
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(model: GPT2, args: argparse.Namespace, tokens: np.ndarray, held_out: np.ndarray) -> None:
    """Run args.steps steps, with an evaluation and a checkpoint every args.eval_every."""
    length = model.config.n_positions
    optimizer = make_optimizer(model, args)
    rng = np.random.default_rng(args.seed)
    first = resume(model, optimizer, rng, args.out)
    loss_of: LossFunction = torch.compile(block_loss) if args.compile else block_loss
    if args.bf16:
        loss_of = torch.autocast("cpu", torch.bfloat16)(loss_of)
    model.train()
    steps = range(first + 1, args.steps + 1)
    with tqdm(steps, initial=first, total=args.steps, unit="step", mininterval=5) as bar:
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step - 1, args)
            blocks = functools.partial(random_blocks, tokens, args.batch_size, length, rng)
            loss = take_step(model, optimizer, args, blocks, loss_of)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            if step % args.eval_every == 0 or step == args.steps:
                held = validation_loss(model, held_out, args.batch_size, loss_of)
                check_loss(held, args)  # before what is good on disk is replaced
                seen = f"{step * args.batch_size * args.accumulate * length:,}"
                report = f"step {step}  tokens {seen}  train {loss:.4f}  validation {held:.4f}"
                bar.write(report, sys.stdout)
                save(model, optimizer, rng, step, args.out)


def save(
    model: GPT2, optimizer: torch.optim.Optimizer, rng: np.random.Generator, step: int, out: Path
) -> None:
    """The weights in bfloat16 for use, and everything in full for resuming."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"rng": rng.bit_generator.state, "torch_rng": torch.get_rng_state()}  # data, dropout
    replace_file(out / "training.pt", lambda path: torch.save(state, path))


def resume(
    model: GPT2, optimizer: torch.optim.Optimizer, rng: np.random.Generator, out: Path
) -> int:
    """Take up OUT/training.pt where there is one; the step to go on from."""
    if not (out / "training.pt").is_file():
        return 0
    state = torch.load(out / "training.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    rng.bit_generator.state = state["rng"]
    torch.set_rng_state(state["torch_rng"])
    return int(state["step"])


def build_model(args: argparse.Namespace) -> GPT2:
    """A randomly initialised model of the size asked for, or the checkpoint that --init names."""
    torch.manual_seed(args.seed)
    dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), args.dropout)
    if args.init:
        loaded = GPT2.from_pretrained(args.init)
        model = GPT2(dataclasses.replace(loaded.config, **dropout))
        model.load_state_dict(
            loaded.state_dict()
        )  # a copy: training must not write to the memory-mapped file
        return model
    sizes = {name: getattr(args, name) for name in ("n_layer", "n_head", "n_embd", "n_positions")}
    return GPT2(GPT2Config(**sizes, **dropout))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="text to train on")
    parser.add_argument(
        "--validation", type=Path, nargs="+", required=True, help="text held out to measure on"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument(
        "--init", help="start from this checkpoint (a name or a folder) instead of from scratch"
    )
    parser.add_argument("--n-layer", type=int, default=6)
    parser.add_argument("--n-head", type=int, default=4)
    parser.add_argument("--n-embd", type=int, default=256)
    parser.add_argument("--n-positions", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument(
        "--batch-size", type=int, default=8, help="blocks of n_positions tokens in one pass"
    )
    parser.add_argument(
        "--accumulate", type=int, default=1, help="passes whose gradients make one step"
    )
    parser.add_argument("--lr", type=float, default=1.5e-3, help="highest learning rate")
    parser.add_argument("--warmup", type=int, default=100, help="steps up to it")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument(
        "--eval-every", type=int, default=250, help="steps between evaluations and checkpoints"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--bf16", action="store_true", help="multiply matrices in bfloat16 (autocast)"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile: a slow start, then faster steps"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        model = build_model(args)
        tokenizer = Tokenizer.from_pretrained(args.init or "gpt2")
        length = model.config.n_positions
        tokens = read_tokens(args.data, tokenizer, length)
        held_out = read_tokens(args.validation, tokenizer, length)
        count = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"{count:,} parameters, {len(tokens):,} tokens to train on, {len(held_out):,} held out"
        )
        started = time.monotonic()
        train(model, args, tokens, held_out)
        print(f"{args.out}: done in {time.monotonic() - started:.0f} s")
    except (ValueError, OSError, lzma.LZMAError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
