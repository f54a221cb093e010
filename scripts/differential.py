"""Draw random options and compare minigpt2's generate with Hugging Face's, id for id.

    python scripts/differential.py --cases 2000

Every case draws a config, prompts (some left-padded), and options: greedy, sampling, beams, beam
sampling, penalties, several ends of text, lengths. Both sides get the same torch seed. A case
counts as different unless all ids are equal. Where beams find fewer texts than asked for, Hugging
Face returns empty ones and we one again. Exit status: 0 if none differs, 1 otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from parity import harsh_model, hf_twin
from tqdm import tqdm
from transformers import GPT2LMHeadModel

from minigpt2 import GPT2, GPT2Config

V = 99
CONFIGS = [
    GPT2Config(vocab_size=V, n_positions=48, n_embd=32, n_layer=2, n_head=4, eos_token_id=None),
    GPT2Config(vocab_size=V, n_positions=48, n_embd=48, n_layer=1, n_head=3, eos_token_id=None,
               scale_attn_by_inverse_layer_idx=True),
    GPT2Config(vocab_size=V, n_positions=48, n_embd=32, n_layer=3, n_head=2, eos_token_id=None,
               activation_function="relu"),
]  # fmt: skip


@functools.cache
def models(number: int) -> tuple[GPT2, GPT2LMHeadModel]:
    """One of the models, softened so that sampling has a choice."""
    ours = harsh_model(CONFIGS[number], seed=number)
    with torch.no_grad():
        ours.wte.weight.mul_(0.35)
    theirs = hf_twin(ours)
    theirs.generation_config.top_k = None
    return ours, theirs


@dataclasses.dataclass
class Case:
    model: int
    ids: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]
    use_cache: bool


def draw(seed: int) -> Case:
    """The case of this seed."""
    r = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    B, T = r.randint(1, 4), r.randint(1, 12)
    ids = torch.randint(1, V - 1, (B, T), generator=generator)  # neither pad, 0 and 98, as text
    mask = None
    eos = r.choice([[], [], [3], [3, 5], list(range(10, 18))])
    pad = r.choice([None, 0, 98]) if eos else r.choice([0, 98])
    if r.random() < 0.5:
        mask = torch.ones_like(ids)
        for row in range(B):
            length = r.choice([0, r.randint(0, T - 1)])
            mask[row, :length] = 0
            ids[row, :length] = eos[0] if pad is None else pad
    options: dict[str, Any] = {
        "max_new_tokens": r.randint(1, 16),
        "pad_token_id": pad,
        "eos_token_id": eos,
    }
    kind = r.choice(["greedy", "sample", "sample", "beam", "beam sample"])
    options["do_sample"] = "sample" in kind
    if "beam" in kind:
        options["num_beams"] = r.randint(2, 5)
        options["num_return_sequences"] = r.randint(1, options["num_beams"])
        options["length_penalty"] = r.choice([1.0, 0.0, 2.0, -1.0, 0.5])
        options["early_stopping"] = r.choice([False, True, "never"])
    elif kind == "sample":
        options["num_return_sequences"] = r.choice([1, 1, 2, 3])
    if options["do_sample"]:
        options["temperature"] = r.choice([1.0, 0.3, 0.8, 2.5])
        options["top_k"] = r.choice([0, 0, 1, 4, 50, 500])
        options["top_p"] = r.choice([1.0, 1.0, 0.1, 0.6, 0.95])
        options["min_p"] = r.choice([0.0, 0.0, 0.05, 0.3])
    options["repetition_penalty"] = r.choice([1.0, 1.0, 1.3, 0.7])
    options["no_repeat_ngram_size"] = r.choice([0, 0, 0, 1, 2, 3])
    options["min_new_tokens"] = r.choice([0, 0, 0, r.randint(1, options["max_new_tokens"])])
    if r.random() < 0.3:
        words = [[r.randrange(V)], [r.randrange(V), r.randrange(V)], [3]]
        options["bad_words_ids"] = r.sample(words, r.randint(1, 3))
    return Case(r.randrange(len(CONFIGS)), ids, mask, options, use_cache=r.random() < 0.7)


def run(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ours, theirs) of a case."""
    ours, theirs = models(case.model)
    torch.manual_seed(seed)
    mine = ours.generate(case.ids, attention_mask=case.mask, **case.options)
    off = {"eos_token_id": [], "min_new_tokens": 0}  # theirs means off by None
    options = {
        name: None if name in off and value == off[name] else value
        for name, value in case.options.items()
    }
    torch.manual_seed(seed)
    other = theirs.generate(case.ids, attention_mask=case.mask, use_cache=case.use_cache, **options)
    return mine, other


def _same(mine: torch.Tensor, other: torch.Tensor, case: Case) -> bool:
    """Whether the texts of one prompt are equal, but for one again where theirs is empty."""
    o, rows = case.options, mine.tolist()
    fill = (o["pad_token_id"] or o["eos_token_id"][0]) if o["eos_token_id"] else -1
    empty = (other[:, case.ids.shape[1] :] == fill).all(dim=1)
    again = torch.tensor([row in rows[:i] for i, row in enumerate(rows)])
    return bool(((mine == other).all(dim=1) | (empty & again)).all())


def differs(seed: int) -> str | None:
    """None where both sides give the same ids, else what was asked and what came."""
    case = draw(seed)
    mine, other = run(case, seed)
    if mine.shape == other.shape:
        rows = case.options.get("num_return_sequences", 1)
        pairs = zip(mine.split(rows), other.split(rows), strict=True)
        if all(_same(a, b, case) for a, b in pairs):
            return None
    return f"seed {seed}: {case.options}\nours   {mine.tolist()}\ntheirs {other.tolist()}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--cases", type=int, default=250)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    found = [
        text for seed in tqdm(range(args.first, args.first + args.cases)) if (text := differs(seed))
    ]
    for text in found[:10]:
        print(text)
    print(f"{len(found)} of {args.cases} cases differ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
