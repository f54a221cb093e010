"""Train a GPT-2: predict the next token, measure the error, follow the gradient.

    python scripts/train.py --data stories.txt --out weights/mine                # from scratch
    python scripts/train.py --init gpt2 --data my.txt --lr 3e-5 --out weights/tuned
    torchrun --nproc-per-node 4 scripts/train.py --data ...                      # 4 processes

--data takes files and folders of text (also .xz, .gz); <|endoftext|> separates documents, and a
file named twice weighs twice. OUT gets model.safetensors and config.json (the last weights), best/
(those of the lowest validation loss), log.jsonl (a line for each step) and training.safetensors:
a run may be stopped, even killed, at any time, and the same command goes on from there with the
steps of an unbroken run. Several hosts need an OUT that all of them see.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from train_data import Tokens, read_tokens
from train_report import Reporter
from train_state import Progress, keep_vocabulary, resume, save

from minigpt2 import GPT2, GPT2Config, Tokenizer, cli, stream
from minigpt2.evaluate import loglikelihood, processes, windows
from minigpt2.hub import find

SIZES = {"n_layer": 6, "n_head": 4, "n_embd": 256, "n_positions": 256}
LossFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]


def block_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log p(target) over the (B, T) targets that are not -100: every input predicts its
    successor."""
    logits = model(inputs).float()  # (B, T, V)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_loss(bf16: bool, compiled: bool, device_type: str) -> LossFunction:
    """block_loss, compiled, and with its matrices multiplied in bfloat16, if asked for."""
    loss_of: LossFunction = torch.compile(block_loss) if compiled else block_loss
    return torch.autocast(device_type, torch.bfloat16)(loss_of) if bf16 else loss_of


def make_optimizer(model: GPT2, args: argparse.Namespace) -> AdamW:
    """AdamW with weight decay on matrices only; the tied table is one parameter and decays once."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up to lr, then half a cosine down to a tenth of it; steps count from 0."""
    if step < args.warmup:
        return float(args.lr * (step + 1) / args.warmup)
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return float(args.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))))


def check_numbers(args: argparse.Namespace, **values: float) -> None:
    """Refuse a loss, or a gradient's norm, that is no longer a number."""
    if not all(map(math.isfinite, values.values())):
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        raise ValueError(f"{shown}: lower --lr ({args.out} keeps the last good state)")


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    blocks: Tensor,
    args: argparse.Namespace,
    loss_of: LossFunction,
) -> dict[str, float]:
    """One update from this process's blocks (B, T + 1), in args.accumulate passes. Returns the mean
    loss over the tokens of all processes, and the norm of its gradient.

    Raises:
        ValueError: one of them is no longer a number. The weights are as they were.
    """
    total = torch.zeros((), device=blocks.device)
    parts = blocks.tensor_split(args.accumulate)
    for part in parts:
        # Gradients of several processes are averaged once, with the last pass.
        alone = isinstance(model, DistributedDataParallel) and part is not parts[-1]
        with model.no_sync() if alone else contextlib.nullcontext():
            # Blocks are of one length: their share of the blocks is their share of the tokens.
            loss = loss_of(model, part[:, :-1], part[:, 1:]) * (len(part) / len(blocks))
            loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
    loss, norm = over_processes(total.item()) / args.world, norm.item()
    check_numbers(args, loss=loss, gradient=norm)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "grad_norm": norm}


@torch.no_grad()
def validation_loss(
    model: nn.Module, ids: np.ndarray, args: argparse.Namespace, loss_of: LossFunction
) -> float:
    """Mean loss over the ids in consecutive blocks: each but the first is scored once, given those
    before it in its block. The processes share the blocks."""
    size = args.batch_size // args.world // args.accumulate or 1  # as many as in training
    span = size * args.context
    total = 0.0
    model.eval()
    for start in range(0, len(ids) - 1, span * args.world):
        # The last batch may be filled in part, and be empty for the last processes: all take as
        # many passes, as --fsdp needs.
        part = torch.zeros(span + 1, dtype=torch.long)
        targets = torch.full((span,), -100)
        found = torch.from_numpy(ids[start + args.rank * span :][: span + 1].astype(np.int64))
        part[: len(found)] = found
        targets[: max(0, len(found) - 1)] = found[1:]
        inputs, targets = part[:-1].view(size, -1), targets.view(size, -1)
        loss = loss_of(model, inputs.to(args.device), targets.to(args.device))
        if len(found) > 1:
            total += loss.item() * (len(found) - 1)
    model.train()
    return over_processes(total) / (len(ids) - 1)


def over_processes(value: float) -> float:
    """The sum of all processes' values."""
    if not dist.is_initialized():
        return value
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    summed = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return summed.item()


def distribute(model: GPT2, args: argparse.Namespace) -> nn.Module:
    """The model where it is to be trained: on one device; a copy with each process, which average
    their gradients; or, with --fsdp, each matrix shared out among the processes."""
    if args.fsdp:
        mesh = init_device_mesh(torch.device(args.device).type, (args.world,))
        for part in (*model.h, model):
            fully_shard(part, mesh=mesh)
        return model
    model.to(args.device)
    return DistributedDataParallel(model) if args.world > 1 else model


def train(
    model: GPT2, tokenizer: Tokenizer, data: Tokens, held_out: Tokens, args: argparse.Namespace
) -> None:
    """Run the steps that are left, with an evaluation and a checkpoint every args.eval_every."""
    wrapped = distribute(model, args)
    optimizer = make_optimizer(model, args)
    progress = resume(model, optimizer, args.out, args.save_dtype)
    if args.rank == 0 and args.init and progress.step < 0:
        keep_vocabulary(find(args.init), args.out)
    loss_of = make_loss(args.bf16, args.compile, torch.device(args.device).type)
    wrapped.train()
    shown = contextlib.closing(Reporter(args, progress.step)) if args.rank == 0 else None
    with shown or contextlib.nullcontext() as reporter:
        for step in range(progress.step + 1, args.steps + 1):
            record: dict[str, Any] = {"step": step}
            if step > 0:
                started, rate = time.perf_counter(), learning_rate(step - 1, args)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                blocks = draw_blocks(data, step, args)
                record |= take_step(wrapped, optimizer, blocks, args, loss_of)
                speed = args.batch_size * args.context / (time.perf_counter() - started)
                record |= {"lr": rate, "tokens_per_s": speed}
            evaluating = step % args.eval_every == 0 or step == args.steps
            if evaluating:
                held = validation_loss(wrapped, held_out.ids, args, loss_of)
                check_numbers(args, validation_loss=held)  # before what is good on disk is replaced
                record |= {"validation_loss": held, "sample": write_sample(model, tokenizer, args)}
            if reporter:
                reporter.report(record)
            if evaluating:
                is_best = held < progress.best
                progress = Progress(step, min(held, progress.best))
                save(model, optimizer, progress, is_best, args.out, args.save_dtype)
                if reporter:
                    reporter.show(record)


def draw_blocks(data: Tokens, step: int, args: argparse.Namespace) -> Tensor:
    """This process's part of the step's batch, (B, context + 1). All chance in a step hangs on
    --seed and its number, so that a resumed run needs no state of random generators."""
    rng = np.random.default_rng((args.seed, step))
    blocks = data.draw(args.batch_size, args.context, rng)
    torch.manual_seed(int(rng.integers(2**62)) + args.rank)  # dropout
    return blocks.tensor_split(args.world)[args.rank].to(args.device)


def write_sample(model: GPT2, tokenizer: Tokenizer, args: argparse.Namespace) -> str:
    """What the model now writes after --prompt, with the same chance every time."""
    torch.manual_seed(args.seed)
    options = {"max_new_tokens": 60, "do_sample": True, "temperature": 0.8, "top_k": 40}
    steps = stream(model, tokenizer, args.prompt, **options)
    return args.prompt + "".join(step.text for step in steps)


def final_loss(args: argparse.Namespace, ids: list[int]) -> float:
    """The loss of the weights in OUT, as `minigpt2.evaluate perplexity` measures it: each token but
    the first scored once, in windows of --context tokens that overlap by half."""
    spans = list(windows(len(ids), args.context, max(1, args.context // 2)))
    contexts = [ids[begin:first] for begin, first, _ in spans]
    continuations = [ids[first:end] for _, first, end in spans]
    model = GPT2.from_pretrained(args.out, device=args.device)
    scores = loglikelihood(model, contexts, continuations)
    return -math.fsum(score.logprob for score in scores) / (len(ids) - 1)


def build_model(args: argparse.Namespace) -> GPT2:
    """A randomly initialised model of the size asked for, or the checkpoint that --init names."""
    torch.manual_seed(args.seed)
    dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), args.dropout)
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if not args.init:
        return GPT2(GPT2Config(**(SIZES | given), **dropout))
    if given:
        raise ValueError(f"{', '.join(given)}: --init brings its own sizes")
    loaded = GPT2.from_pretrained(args.init)
    with torch.device("meta"):
        model = GPT2(dataclasses.replace(loaded.config, **dropout))
    # Copies: training must not write to a file that is mapped into memory.
    copies = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    model.load_state_dict(copies, assign=True)
    return model


def prepare(args: argparse.Namespace) -> tuple[GPT2, Tokenizer, Tokens, Tokens]:
    """The model, its tokenizer, and the tokens to train on and to measure on.

    Raises:
        ValueError: they do not fit together.
    """
    if args.rank > 0:  # the first process downloads and tokenises, the others find it done
        try:
            dist.barrier()
        except RuntimeError:
            raise ValueError("the first process gave up") from None  # and has said why
    tokenizer = Tokenizer.from_pretrained(find(args.init) if args.init else "gpt2")
    model = build_model(args)
    args.context = args.context or model.config.n_positions
    if args.context > model.config.n_positions:
        raise ValueError(f"--context {args.context} exceeds n_positions {model.config.n_positions}")
    if tokenizer.n_vocab > model.config.vocab_size:
        have, need = model.config.vocab_size, tokenizer.n_vocab
        raise ValueError(f"{args.init}: vocab_size {have}, but its tokenizer has {need} ids")
    data = read_tokens(args.data, tokenizer, args.out / "tokens")
    if args.validation:
        held_out = read_tokens(args.validation, tokenizer, args.out / "tokens")
    else:
        data, held_out = data.split(args.held_out)
    if args.rank == 0 and args.world > 1:
        dist.barrier()
    if len(data.ids) <= args.context:
        names, need = ", ".join(map(str, args.data)), f"context + 1 = {args.context + 1}"
        raise ValueError(f"{names}: {len(data.ids)} tokens, but one block needs {need}")
    if len(held_out.ids) < 2:
        raise ValueError(f"{len(held_out.ids)} tokens to measure on: raise --held-out")
    return model, tokenizer, data, held_out


def check(args: argparse.Namespace) -> None:
    """Refuse numbers that make no sense.

    Raises:
        ValueError: such a number.
    """
    whole = {"batch_size": 1, "accumulate": 1, "steps": 0, "warmup": 0, "eval_every": 1, "seed": 0}
    for name, least in (whole | {"context": 1, "lr": 0, "weight_decay": 0, "clip": 0}).items():
        value = getattr(args, name)
        if value is not None and not least <= value < 2**31:
            bounds = f"from {least} to 2**31 - 1"
            raise ValueError(f"--{name.replace('_', '-')} must be {bounds}, got {value}")
    if not 0 < args.held_out < 1:
        raise ValueError(f"--held-out must be between 0 and 1, got {args.held_out}")
    share, rest = divmod(args.batch_size, args.world)
    if rest or args.accumulate > share:
        have = f"--batch-size {args.batch_size} does not divide into {args.world} processes"
        raise ValueError(f"{have} of --accumulate {args.accumulate} passes each")
    if args.fsdp and args.world == 1:
        raise ValueError("--fsdp shares a model out among processes: start several with torchrun")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(
        prog="train.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="text to train on: files and folders")
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument("--validation", type=Path, nargs="+", help="text to measure on")
    measured.add_argument(
        "--held-out", type=float, default=0.01, help="without it: this share, the end of the data"
    )
    add("--out", type=Path, required=True, help="folder for the checkpoint")
    add("--init", help="start from this checkpoint (a name or a folder) instead of from scratch")
    for name, size in SIZES.items():
        add(f"--{name.replace('_', '-')}", type=int, help=f"from scratch: default {size}")
    add("--context", type=int, help="tokens in a block; default: n_positions")
    add("--dropout", type=float, default=0.0)
    add("--steps", type=int, default=5000)
    add("--batch-size", type=int, default=8, help="blocks in one step, over all processes")
    add("--accumulate", type=int, default=1, help="passes in which a process takes its blocks")
    add("--lr", type=float, default=1.5e-3, help="highest learning rate")
    add("--warmup", type=int, default=100, help="steps up to it")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0: any")
    add("--eval-every", type=int, default=250, help="steps between evaluations and checkpoints")
    add("--prompt", default="", help="what the sample at each evaluation goes on from")
    add("--seed", type=int, default=0)
    add("--save-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--plot", action="store_true", help="draw the losses into OUT/loss.svg")
    add("--device", type=cli.device, default="auto", help=cli.DEVICES)
    add("--bf16", action="store_true", help="multiply matrices in bfloat16 (autocast)")
    add("--compile", action="store_true", help="torch.compile: a slow start, then faster steps")
    add("--fsdp", action="store_true", help="torchrun: share the model out, not copy it")
    add("-v", "--verbose", action="store_true", help="a traceback with an error")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    args.rank = 0
    try:
        with processes(args) as (args.rank, args.world):
            check(args)
            args.device = cli.pick_device(args)
            model, tokenizer, data, held_out = prepare(args)
            if args.rank == 0:
                count = sum(parameter.numel() for parameter in model.parameters())
                tokens = f"{len(data.ids):,} tokens to train on, {len(held_out.ids):,} held out"
                print(f"{count:,} parameters, {tokens}", flush=True)
            train(model, tokenizer, data, held_out, args)
    except ValueError:
        if args.rank > 0:
            return 1  # all processes refuse the same: the first says so
        raise
    if args.rank == 0:
        loss = final_loss(args, held_out.ids.tolist())
        how = f"windows of {args.context} tokens that overlap by half, each token scored once"
        print(f"{args.out}: validation loss {loss:.4f}, perplexity {math.exp(loss):.2f} ({how})")
    return 0


def keep_memory() -> None:
    """glibc gives the logits (400 MB for 2,048 tokens) back to the kernel after every step, and
    takes them anew page by page, which is a quarter of a step on a CPU: let it keep them."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-4, 0)  # M_MMAP_MAX: no mappings apart
            mallopt(-1, -1)  # M_TRIM_THRESHOLD: no giving back


def main(argv: Sequence[str] | None = None) -> int:
    cli.open_streams()
    args = parse_args(argv)
    return cli.run(args, "train.py", lambda: work(args))


if __name__ == "__main__":
    keep_memory()
    sys.exit(main())
