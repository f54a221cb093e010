"""Compare minigpt2 with Hugging Face's GPT2LMHeadModel, stage by stage and bit by bit.

    python scripts/parity.py --size gpt2     # random weights of that shape, made harsh
    python scripts/parity.py --model gpt2    # a checkpoint: an official one, tales, a folder
    python scripts/parity.py --model official

For the official names the recorded facts (scripts/facts.py) are checked too.

Every row is a situation, every figure a largest absolute difference. The fused arithmetic is held
against Hugging Face's default attention (sdpa) and must be bit-equal: 0 everywhere. The explicit
one is held against their eager attention and must stay within rounding: 1e-5 of the largest logit
in float32, 5e-2 in bfloat16. Exit status: 0 if so, 1 if not.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, GPT2LMHeadModel

from minigpt2 import GPT2, GPT2Config
from minigpt2.hub import OFFICIAL, CheckpointError, find
from minigpt2.model import positions
from minigpt2.ops import explicit, fused, next_token_loss

SIZES = {
    "tiny": GPT2Config(vocab_size=199, n_positions=64, n_embd=48, n_layer=3, n_head=4),
    "distilgpt2": GPT2Config(n_layer=6),
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
}
# How far explicit arithmetic may be off, relative to the largest logit.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


@torch.no_grad()
def harsh_model(config: GPT2Config, seed: int = 0) -> GPT2:
    """A random model in which faults show: default initialisation, whose biases are 0 and whose
    scores are tiny, would hide most. Matrices are larger, so that
    attention is sharp and logits reach 20 at any width; norms and biases random, and
    three residual channels hold outliers, as trained GPT-2s have them."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = GPT2(config).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) if parameter.dim() == 1 else None
        if noise is None:
            parameter.mul_(6 * math.sqrt(768 / config.n_embd))
        elif ".weight" in name:
            parameter.add_(0.3 * noise)
        else:
            parameter.add_(0.2 * noise)
    outliers = torch.randperm(config.n_embd, generator=generator)[:3]
    model.h[0].mlp.c_proj.bias[outliers] += 10 * math.sqrt(config.n_embd)
    return model


def hf_twin(model: GPT2) -> GPT2LMHeadModel:
    """Hugging Face's model over the very same tensors: where a matrix lies in memory moves its last
    bits."""
    config = transformers.GPT2Config.from_dict(
        model.config.to_dict() | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    )
    with torch.device("meta"):
        twin = GPT2LMHeadModel(config)
    named = {
        f"transformer.{key}" if key != "lm_head.weight" else key: t
        for key, t in model.state_dict().items()
    }
    twin.load_state_dict(named, strict=False, assign=True)
    twin.tie_weights()
    return twin.eval()


@contextmanager
def stages(blocks: nn.ModuleList, norm: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record what enters the first block, what leaves every block, and what leaves the last
    norm."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, _args, output: seen.update({name: output})

    hooks = [
        blocks[0].register_forward_pre_hook(lambda _module, args: seen.update(embedding=args[0]))
    ]
    hooks += [block.register_forward_hook(keep(f"block {n}")) for n, block in enumerate(blocks)]
    hooks += [norm.register_forward_hook(keep("final norm"))]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference; infinite unless both are finite and have one shape and
    dtype."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype or not ours.isfinite().all():
        return float("inf")
    return (ours.double() - theirs.double()).abs().max().item()


@dataclasses.dataclass
class Row:
    situation: str
    largest: float  # absolute difference
    scale: float  # the largest absolute value compared


@torch.no_grad()
def compare(ours: GPT2, theirs: GPT2LMHeadModel, token_ids: Tensor) -> Iterator[Row]:
    """All situations, on (3, T) ids."""

    def row(name: str, mine: Tensor, other: Tensor) -> Row:
        return Row(name, difference(mine, other), other.abs().max().item())

    single = token_ids[:1]
    with (
        stages(ours.h, ours.ln_f) as mine,
        stages(theirs.transformer.h, theirs.transformer.ln_f) as other,
    ):
        logits, reference = ours(single), theirs(single).logits
    yield from (row(stage, mine[stage], other[stage]) for stage in mine)
    yield row("logits (prefill)", logits, reference)
    yield row("one token", ours(single[:, :1]), theirs(single[:, :1]).logits)
    yield row("batch of 3", ours(token_ids), theirs(token_ids).logits)
    last = ours(token_ids, logits_to_keep=1), theirs(token_ids, logits_to_keep=1).logits
    yield row("head on the last token only", *last)
    loss = (
        next_token_loss(ours(token_ids), token_ids, ours.ops),
        theirs(token_ids, labels=token_ids).loss,
    )
    yield row("loss", *loss)

    mask = torch.ones_like(token_ids)
    mask[0, : token_ids.shape[1] // 2] = 0
    mask[1, :1] = 0
    padded = ours(token_ids, mask, positions(mask))
    yield row(
        "left-padded batch",
        padded,
        theirs(token_ids, attention_mask=mask, position_ids=positions(mask)).logits,
    )
    yield from (
        row(f"cached, {name}", *pair) for name, pair in cached(ours, theirs, token_ids, None)
    )
    yield from (
        row(f"cached, left-padded, {name}", *pair)
        for name, pair in cached(ours, theirs, token_ids, mask)
    )


def cached(
    ours: GPT2, theirs: GPT2LMHeadModel, token_ids: Tensor, mask: Tensor | None
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Half the ids as a prompt, then one by one, then the last four together onto the cache."""
    T = token_ids.shape[1]
    cache = ours.new_cache(len(token_ids), T)
    theirs_cache = DynamicCache()
    steps: list[tuple[Tensor, Tensor]] = []
    edges = [0, T // 2, *range(T // 2 + 1, T - 4 + 1), T]
    for start, end in itertools.pairwise(edges):
        new = token_ids[:, start:end]
        here = None if mask is None else mask[:, :end]
        position_ids = None if here is None else positions(here)[:, start:]
        steps.append(
            (
                ours(new, here, position_ids, cache),
                theirs(
                    new,
                    attention_mask=here,
                    position_ids=position_ids,
                    cache=theirs_cache,
                    use_cache=True,
                ).logits,
            )
        )
    single = steps[1:-1]
    yield "prompt", steps[0]
    yield (
        f"{len(single)} single steps",
        (torch.cat([a for a, _ in single]), torch.cat([b for _, b in single])),
    )
    yield "4 tokens at once", steps[-1]


def report(ours: GPT2, theirs: GPT2LMHeadModel, T: int) -> bool:
    """Print one table for each dtype and arithmetic; whether all bounds hold."""
    token_ids = torch.randint(
        ours.config.vocab_size, (3, T), generator=torch.Generator().manual_seed(1)
    )
    good = True
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = ours.to(dtype), theirs.to(dtype)
        tables = {}
        for ops, attention in ((fused, "sdpa"), (explicit, "eager")):
            ours.ops = ops
            theirs.set_attn_implementation(attention)
            tables[attention] = list(compare(ours, theirs, token_ids))
        logit = next(row.scale for row in tables["sdpa"] if row.situation.startswith("logits"))
        print(f"\n{str(dtype).removeprefix('torch.')}, largest |logit| {logit:.1f}")
        print(f"{'largest difference from':<44}{'fused / sdpa':>14}{'explicit / eager':>18}")
        for exact, close in zip(tables["sdpa"], tables["eager"], strict=True):
            print(f"{exact.situation:<44}{exact.largest:>14.3g}{close.largest:>18.2g}")
            # Rounding grows with what is rounded: a residual stream that holds outliers is judged
            # by its own scale.
            bound = BOUNDS[dtype] * max(logit, close.scale)
            good = good and exact.largest == 0 and close.largest <= bound
    return good


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--size", choices=SIZES, default="tiny", help="random weights of this shape (default: tiny)"
    )
    what.add_argument(
        "--model",
        help="a checkpoint instead: an official name, tales, a folder or a Hub id; official: all "
        "official models that are on this machine",
    )
    parser.add_argument(
        "--tokens", type=int, default=24, help="length of the sequences compared, at least 12"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def show(name: str, ours: GPT2, theirs: GPT2LMHeadModel, tokens: int) -> bool:
    """Print both models' comparison; whether it holds.

    Raises:
        ValueError: the sequences do not fit the model.
    """
    window = ours.config.n_positions
    if not 12 <= tokens <= window:
        raise ValueError(f"--tokens must be from 12 to n_positions {window}, got {tokens}")
    count = sum(parameter.numel() for parameter in ours.parameters())
    print(f"{name}: {count:,} parameters")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}, {torch.get_num_threads()} threads")
    good = report(ours, theirs, tokens)
    print("\nfused is bit-equal, explicit within rounding" if good else "\nFAILED: see the table")
    return good


def check_model(name: str, tokens: int) -> bool:
    """A checkpoint beside Hugging Face's reading of it, and an official one's recorded facts."""
    folder = find(name)
    theirs = GPT2LMHeadModel.from_pretrained(folder, dtype="float32").eval()
    good = show(name, GPT2.from_pretrained(folder), theirs, tokens)
    if name in OFFICIAL:
        from facts import main as check_facts  # facts.py, beside this file

        del theirs
        print()
        good = check_facts(["--model", name]) == 0 and good
    return good


def check_official(tokens: int) -> bool:
    """check_model for those official models that are on this machine; whether there is one, and all
    hold."""
    here = []
    for name in OFFICIAL:
        try:
            find(name, local_files_only=True)
            here.append(name)
        except CheckpointError as error:
            print(f"not checked: {error}")
    results = [check_model(name, tokens) for name in here]
    print(f"\n{sum(results)} of {len(here)} official models hold, {len(OFFICIAL)} there are")
    return bool(here) and all(results)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    transformers.logging.set_verbosity_error()
    try:
        if args.model == "official":
            good = check_official(args.tokens)
        elif args.model:
            good = check_model(args.model, args.tokens)
        else:
            ours = harsh_model(SIZES[args.size], args.seed)
            good = show(f"random weights, {args.size}", ours, hf_twin(ours), args.tokens)
    except ValueError as error:
        print(f"parity.py: error: {error}", file=sys.stderr)
        return 1
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
