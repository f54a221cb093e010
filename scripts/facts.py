"""Check recorded facts about GPT-2 against minigpt2.

    python scripts/facts.py --model gpt2

The facts are data, in tests/facts: what five articles about GPT-2 state (s...), and values that
public test suites, READMEs and papers recorded from the official weights (o-...). Each has a kind,
and CHECKS holds one function for each kind. Exit status: 0 if every fact that can be checked here
holds, 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt2 import GPT2, Tokenizer
from minigpt2.decoding import decode
from minigpt2.hub import OFFICIAL, CheckpointError, find, sha256
from minigpt2.ops import Explicit, next_token_loss
from minigpt2.options import GenerationOptions
from minigpt2.sampling import Processor, repetition_penalty
from minigpt2.texts import Request
from minigpt2.tokenizer import VOCAB_BPE

FOLDER = Path(__file__).parent.parent / "tests" / "facts"

# Kinds that the model alone cannot decide.
NOT_CHECKED = {
    "cfg": "classifier-free guidance is not implemented",
    "contrastive": "contrastive search is not implemented",
    "cuda": "recorded in float16 or with the random generator of a GPU",
    "external": "not a property of the model",
    "hellaswag": "needs the data set: python -m minigpt2.evaluate hellaswag FILE",
    "illustrative": "the article calls the values illustrative, or names no model and setting",
    "lambada": "needs the data sets: python -m minigpt2.evaluate lambada or perplexity FILE",
    "library": "about a version of transformers, not about GPT-2",
    "loss": "needs the data set: python -m minigpt2.evaluate perplexity FILE",
    "paper": "needs the paper's data sets and its unpublished de-tokenizers",
    "ppl": "needs WikiText-2: python -m minigpt2.evaluate perplexity FILE --stride 512",
    "sample": "a draw from the random generator of an unrecorded PyTorch version",
    "timing": "depends on the machine",
}


@dataclasses.dataclass(frozen=True)
class Fact:
    """One statement. An article's has a claim; actual is the right value where the article's
    (expected) is wrong. A recorded value has a source."""

    id: str
    model: str | None  # an official name, or None where it concerns no model
    kind: str
    input: Any
    expected: Any
    needs_official_weights: bool
    claim: str = ""
    source: str = ""
    actual: Any = None
    tolerance: float = 0.0

    @property
    def right(self) -> Any:
        return self.expected if self.actual is None else self.actual

    @property
    def origin(self) -> str:
        wrong = "" if self.actual is None else ", wrong there"
        return self.source or f"article {self.id[1]}{wrong}: {self.claim}"


@dataclasses.dataclass(frozen=True)
class Result:
    got: Any
    ok: bool


class NotChecked(Exception):  # noqa: N818 (not an error)
    """This fact cannot be checked here; the message says why."""


def load_facts() -> list[Fact]:
    files = (FOLDER / "seed_facts.json", FOLDER / "official_facts.json")
    contents = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    return [Fact(**values) for content in contents for values in content]


@torch.inference_mode()
def check(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> Result:
    """Compute what the fact states.

    Raises:
        NotChecked: it cannot be computed here.
    """
    if fact.kind in NOT_CHECKED:
        raise NotChecked(NOT_CHECKED[fact.kind])
    got = CHECKS[fact.kind](fact, model, tokenizer)
    return Result(got, agrees(got, fact.right, fact.tolerance))


def agrees(got: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Whether two JSON-like values are equal, numbers within the tolerance. A dictionary may hold
    more than is expected; {"lt": x} and {"gt": x} expect a number below or above x."""
    if isinstance(expected, dict) and expected.keys() & {"lt", "gt"}:
        return bool(expected.get("gt", -math.inf) < got < expected.get("lt", math.inf))
    if isinstance(expected, dict):
        return isinstance(got, dict) and all(
            key in got and agrees(got[key], value, tolerance) for key, value in expected.items()
        )
    if isinstance(expected, list):
        same = isinstance(got, list) and len(got) == len(expected)
        return same and all(agrees(*pair, tolerance) for pair in zip(got, expected, strict=True))
    numbers = (int, float)
    if type(got) in numbers and type(expected) in numbers:
        return bool(abs(got - expected) <= tolerance)
    return type(got) is type(expected) and bool(got == expected)


# --- What several checks need


def text_of(fact: Fact) -> str:
    text = fact.input if isinstance(fact.input, str) else fact.input["text"]
    assert isinstance(text, str)
    return text


def ids_of(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> Tensor:
    return torch.tensor([tokenizer.encode(text_of(fact))], device=model.wte.weight.device)


def last_logits(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> Tensor:
    """(V,) float64: the scores of the token after the text."""
    logits: Tensor = model(ids_of(fact, model, tokenizer))
    return logits[0, -1].double()


def last_probs(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> Tensor:
    return last_logits(fact, model, tokenizer).softmax(dim=-1)


def single_id(token: str, tokenizer: Tokenizer) -> int:
    (token_id,) = tokenizer.encode(token)
    return token_id


class Recorder(Explicit):
    """The explicit arithmetic, keeping each layer's attention weights."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def attention_weights(self, q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        self.layers.append(super().attention_weights(q, k, mask, scale))
        return self.layers[-1]


def attention_of(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> Tensor:
    """(L, H, T, T): from each token (row) to each (column), in every head."""
    recorder, former = Recorder(), model.ops
    model.ops = recorder
    try:
        model(ids_of(fact, model, tokenizer))
    finally:
        model.ops = former
    return torch.cat(recorder.layers)


def stages_of(token_ids: Tensor, model: GPT2) -> dict[str, Tensor]:
    """What enters the first block, what leaves the last, what leaves the final norm, the logits."""
    seen: dict[str, Tensor] = {"token_ids": token_ids}
    hooks = [
        model.h[0].register_forward_pre_hook(lambda _module, x: seen.update(embedding=x[0])),
        model.h[-1].register_forward_hook(lambda _module, _x, y: seen.update(block=y)),
        model.ln_f.register_forward_hook(lambda _module, _x, y: seen.update(final_norm=y)),
    ]
    try:
        return seen | {"logits": model(token_ids)}
    finally:
        for hook in hooks:
            hook.remove()


def plain_loop(token_ids: Tensor, model: GPT2, steps: int) -> Tensor:
    """Greedy decoding as the articles write it: no cache, the whole text again for every token."""
    for _ in range(steps):
        logits = model(token_ids[:, -model.config.n_positions :], logits_to_keep=1)
        token_ids = torch.cat([token_ids, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return token_ids


def left_padded(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """The prompts as one batch, padded on the left by <|endoftext|>: (B, T) ids and their mask."""
    prompts = [p if isinstance(p, list) else tokenizer.encode(p) for p in fact.input["prompts"]]
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    rows = [[tokenizer.end_of_text_id] * n + p for n, p in zip(pads, prompts, strict=True)]
    mask = [[0] * n + [1] * (longest - n) for n in pads]
    device = model.wte.weight.device
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)


def count_parameters(model: GPT2, pattern: str) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if re.fullmatch(pattern, name))


# --- One function for each kind


def check_token_ids(fact: Fact, _model: GPT2, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(fact.input)


def check_n_tokens(fact: Fact, _model: GPT2, tokenizer: Tokenizer) -> int:
    return len(tokenizer.encode(fact.input))


def check_pieces(fact: Fact, _model: GPT2, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(fact.input)]


def check_decode(fact: Fact, _model: GPT2, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(fact.input)


def check_vocabulary_size(_fact: Fact, _model: GPT2, tokenizer: Tokenizer) -> int:
    return tokenizer.n_vocab


def check_vocabulary(_fact: Fact, _model: GPT2, tokenizer: Tokenizer) -> list[int]:
    """Single bytes, merged tokens, special tokens."""
    ordinary = [i for i in range(tokenizer.n_vocab) if i != tokenizer.end_of_text_id]
    n_bytes = sum(len(tokenizer.token_bytes(token_id)) == 1 for token_id in ordinary)
    return [n_bytes, len(ordinary) - n_bytes, tokenizer.n_vocab - len(ordinary)]


def check_byte_fallback(_fact: Fact, _model: GPT2, tokenizer: Tokenizer) -> int:
    """How many of the 256 bytes are tokens: with all of them, any text can be encoded."""
    tokens = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.n_vocab)}
    return sum(bytes([byte]) in tokens for byte in range(256))


def check_softmax_toy(fact: Fact, _model: GPT2, _tokenizer: Tokenizer) -> list[float]:
    """In percent."""
    scores = torch.tensor(fact.input["scores"], dtype=torch.float64) / fact.input["temperature"]
    percent: list[float] = (100 * scores.softmax(dim=-1)).tolist()
    return percent


def check_exp_toy(fact: Fact, _model: GPT2, _tokenizer: Tokenizer) -> list[float]:
    powers = [math.exp(score) for score in fact.input]
    return [*powers, sum(powers)]


def check_weight_memory(fact: Fact, _model: GPT2, _tokenizer: Tokenizer) -> list[float]:
    """The size of weights of so many bits, as a part of float16's."""
    return [bits / torch.finfo(torch.float16).bits for bits in fact.input]


def check_const(fact: Fact, model: GPT2, _tokenizer: Tokenizer) -> list[int]:
    values = dataclasses.asdict(model.config)
    values["n_layer * n_head"] = model.config.n_layer * model.config.n_head
    return [values[name] for name in fact.input]


def check_params(_fact: Fact, model: GPT2, _tokenizer: Tokenizer) -> dict[str, int]:
    return dataclasses.asdict(model.config) | {"n_params": count_parameters(model, ".*")}


def check_param_count(fact: Fact, model: GPT2, _tokenizer: Tokenizer) -> int:
    return count_parameters(model, fact.input)


def check_share(fact: Fact, model: GPT2, _tokenizer: Tokenizer) -> float:
    part, whole = fact.input
    return count_parameters(model, part) / count_parameters(model, whole)


def check_tensor_count(_fact: Fact, model: GPT2, _tokenizer: Tokenizer) -> list[int]:
    """Matrices, and parameters of any shape."""
    parameters = list(model.parameters())
    return [sum(p.dim() == 2 for p in parameters), len(parameters)]


def check_file(fact: Fact, _model: GPT2, _tokenizer: Tokenizer) -> dict[str, Any]:
    paths = [VOCAB_BPE] if fact.input == "merges.txt" else []  # one file under two names
    with contextlib.suppress(CheckpointError):
        paths.insert(0, find(fact.model or "", local_files_only=True) / fact.input)
    for path in paths:
        if path.is_file():
            return {"bytes": path.stat().st_size, "sha256": sha256(path)}
    raise NotChecked(f"{fact.input} of {fact.model} is not on this machine")


def check_shape(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> list[list[int]]:
    ids = ids_of(fact, model, tokenizer).expand(fact.input.get("rows", 1), -1)
    seen = stages_of(ids, model)
    shapes = {
        "token_ids": ids.shape,
        "token_ids[0]": ids[0].shape,
        "embedding[0]": seen["embedding"][0].shape,
        "block[0]": seen["block"][0].shape,
        "logits": seen["logits"].shape,
        "logits[:, -1]": seen["logits"][:, -1].shape,
        "logits[0, -1]": seen["logits"][0, -1].shape,
    }
    return [list(shapes[name]) for name in fact.input["of"]]


def check_prob(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> dict[str, float]:
    probs = last_probs(fact, model, tokenizer)
    return {token: probs[single_id(token, tokenizer)].item() for token in fact.expected}


def check_prob_sum(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> float:
    return last_logits(fact, model, tokenizer).double().softmax(dim=-1).sum().item()


def check_topk_order(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> list[str]:
    best = last_logits(fact, model, tokenizer).topk(len(fact.expected)).indices
    return [tokenizer.decode([token_id]) for token_id in best.tolist()]


def check_argmax_id(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> int:
    return int(last_logits(fact, model, tokenizer).argmax())


def check_mass(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> float:
    return last_probs(fact, model, tokenizer).topk(fact.input["k"]).values.sum().item()


def check_logit_range(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> list[float]:
    return [x.item() for x in last_logits(fact, model, tokenizer).aminmax()]


def check_nucleus_size(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> int:
    """The smallest number of tokens whose probabilities reach p together."""
    falling = last_probs(fact, model, tokenizer).sort(descending=True).values
    return int((falling.cumsum(dim=-1) < fact.input["p"]).sum()) + 1


def check_rank(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> dict[str, Any]:
    logits = last_logits(fact, model, tokenizer)
    above = logits > logits[single_id(fact.input["token"], tokenizer)]
    return {"top": tokenizer.decode([int(logits.argmax())]), "rank": int(above.sum()) + 1}


def check_logit(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> dict[str, Any]:
    logits = model(ids_of(fact, model, tokenizer))
    value, token_id = logits[0, -1].max(dim=-1)
    token = tokenizer.decode([int(token_id)])
    shape = list(logits.shape)
    return {"argmax": int(token_id), "token": token, "logit": value.item(), "shape": shape}


def check_hidden(fact: Fact, model: GPT2, _tokenizer: Tokenizer) -> list[float]:
    """The first features of the first token after the final norm."""
    ids = torch.tensor([fact.input], device=model.wte.weight.device)
    features: list[float] = stages_of(ids, model)["final_norm"][0, 0, : len(fact.expected)].tolist()
    return features


def check_text_loss(fact: Fact, model: GPT2, _tokenizer: Tokenizer) -> float:
    ids = torch.tensor([fact.input], device=model.wte.weight.device)
    return next_token_loss(model(ids), ids, model.ops).item()


def check_attention(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> float:
    where = [fact.input[name] for name in ("layer", "head", "query", "key")]
    return attention_of(fact, model, tokenizer)[tuple(where)].item()


def check_attention_count(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> dict[str, Any]:
    """Heads in which the last token gives one token more than so much; and the nearest miss or
    hit."""
    weights = attention_of(fact, model, tokenizer)[:, :, -1, fact.input["key"]].flatten()  # (L*H,)
    limit = fact.input["above"]
    nearest = weights[(weights - limit).abs().argmin()].item()
    return {"heads": int((weights > limit).sum()), "of": len(weights), "nearest": nearest}


def check_log_probs(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> dict[str, Any]:
    """Greedy new tokens, and the log-probabilities of the first ones, as many as are recorded."""
    ids, mask = left_padded(fact, model, tokenizer)
    options = GenerationOptions(max_new_tokens=fact.input["max_new_tokens"])
    steps = list(decode(Request(model, ids, options, mask)))
    new = torch.stack([step.token_ids for step in steps], dim=1)  # (B, n)
    all_log_probs = torch.stack([step.logits.log_softmax(dim=-1) for step in steps], dim=1)
    log_probs = all_log_probs.gather(-1, new.unsqueeze(-1)).squeeze(-1)  # (B, n)
    recorded = len(fact.expected["log_probs"][0])
    return {"ids": new.tolist(), "log_probs": log_probs[:, :recorded].tolist()}


def check_continuation(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> list[Any]:
    """generate's rows: ids where ids are recorded, else texts without <|endoftext|>."""
    ids, mask = left_padded(fact, model, tokenizer)
    words = [tokenizer.encode(word) for word in fact.input.get("bad_words", ())]
    rows = model.generate(
        ids,
        attention_mask=mask,
        generator=torch.Generator(ids.device).manual_seed(0),
        processors=extra_rules(fact, ids.shape[1]),
        bad_words_ids=words,
        **fact.input["options"],
    ).tolist()[: fact.input.get("rows")]
    if isinstance(fact.expected[0], list):
        return rows
    end = tokenizer.end_of_text_id
    return [tokenizer.decode(i for i in row if i != end) for row in rows]


def extra_rules(fact: Fact, prompt_length: int) -> list[Processor]:
    """Rules that generate has no option for: a repetition penalty on padding too (TensorFlow's), or
    on new tokens alone; a temperature in beam search, where scores are log-probabilities."""
    on_all, on_new, t = (
        fact.input.get(key, 1.0) for key in ("penalty_on_all", "penalty_on_new", "temperature")
    )
    rules: list[tuple[bool, Processor]] = [
        (on_all != 1, lambda ids, s: repetition_penalty(s, ids, on_all)),
        (on_new != 1, lambda ids, s: repetition_penalty(s, ids[:, prompt_length:], on_new)),
        (t != 1, lambda _, s: (s / t).log_softmax(dim=-1)),
    ]
    return [rule for active, rule in rules if active]


def check_argmax_invariance(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> bool:
    logits = model(ids_of(fact, model, tokenizer))
    return torch.equal(logits.argmax(dim=-1), logits.softmax(dim=-1).argmax(dim=-1))


def check_n_predictions(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> int | None:
    """How many tokens get a prediction; None if one changes with the tokens behind it."""
    ids = ids_of(fact, model, tokenizer)
    logits = model(ids)
    for k in range(1, ids.shape[1]):
        changed = torch.cat([ids[:, :k], (ids[:, k:] + 1) % model.config.vocab_size], dim=1)
        if not torch.allclose(model(changed)[:, :k], logits[:, :k], rtol=1e-5, atol=1e-4):
            return None
    return int(logits.shape[1])


def check_loop(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> int | None:
    """The length after so many greedy steps; None if generate's cache changes a token."""
    ids, steps = ids_of(fact, model, tokenizer), fact.input["max_new_tokens"]
    looped = plain_loop(ids, model, steps)
    generated = model.generate(ids, max_new_tokens=steps, eos_token_id=())
    return looped.shape[1] if torch.equal(looped, generated) else None


def check_equality(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> bool:
    return check_loop(fact, model, tokenizer) is not None


def check_tying(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> bool:
    seen = stages_of(ids_of(fact, model, tokenizer), model)
    logits = seen["final_norm"] @ model.wte.weight.T
    return torch.allclose(seen["logits"], logits, rtol=1e-4, atol=1e-4)


def check_causal(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> bool:
    """Rows of attention sum to one; no head looks right of the diagonal, and some head looks at
    every place up to it."""
    weights = attention_of(fact, model, tokenizer)
    total, largest = weights.sum(dim=-1), weights.amax(dim=(0, 1))
    ones = torch.allclose(total, torch.ones_like(total), rtol=0, atol=1e-5)
    return ones and torch.equal(largest > 0, torch.ones_like(largest, dtype=torch.bool).tril())


def check_cache(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> bool:
    """As check_causal; and one more token leaves the keys and values of the others as they are."""
    ids = ids_of(fact, model, tokenizer)
    T = ids.shape[1]
    short, long = (model.new_cache(1, n) for n in (T - 1, T))
    model(ids[:, :-1], cache=short)
    model(ids, cache=long)
    same = all(
        torch.allclose(a, b[..., : T - 1, :], rtol=1e-4, atol=1e-4)
        for a, b in ((short.keys, long.keys), (short.values, long.values))
    )
    return same and check_causal(fact, model, tokenizer)


def check_stop(fact: Fact, model: GPT2, tokenizer: Tokenizer) -> int | None:
    """The last id of a text that was made to end at its second new token; None if it goes on."""
    ids = ids_of(fact, model, tokenizer)
    end = model.config.eos_token_ids[0]

    def end_at_second(seen: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -math.inf)
        forced[:, end] = 0
        return forced if seen.shape[1] == ids.shape[1] + 1 else scores

    row = model.generate(ids, max_new_tokens=5, min_new_tokens=1, processors=[end_at_second])[0]
    return int(row[-1]) if len(row) == ids.shape[1] + 2 else None


def check_crop(_fact: Fact, model: GPT2, _tokenizer: Tokenizer) -> int | None:
    """The longest text that is read at once, if a longer one is refused, and is continued as if
    only its last tokens were there."""
    window = model.config.n_positions
    ids = torch.arange(window + 2, device=model.wte.weight.device)[None] % model.config.vocab_size
    try:
        model(ids[:, : window + 1], logits_to_keep=1)
    except ValueError:
        slid = model.generate(ids, max_new_tokens=2, context_overflow="slide", eos_token_id=())
        return window if torch.equal(plain_loop(ids, model, 2), slid) else None
    return None


CHECKS: dict[str, Callable[[Fact, GPT2, Tokenizer], Any]] = {
    "argmax_id": check_argmax_id,
    "argmax_invariance": check_argmax_invariance,
    "attention": check_attention,
    "attention_count": check_attention_count,
    "beam": check_continuation,
    "byte_fallback": check_byte_fallback,
    "cache": check_cache,
    "causal": check_causal,
    "const": check_const,
    "crop": check_crop,
    "decode": check_decode,
    "equality": check_equality,
    "exp_toy": check_exp_toy,
    "file": check_file,
    "greedy": check_continuation,
    "greedy-leftpad": check_continuation,
    "greedy-processors": check_continuation,
    "hidden": check_hidden,
    "logit": check_logit,
    "logit_range": check_logit_range,
    "logprob": check_log_probs,
    "loop": check_loop,
    "mass": check_mass,
    "n_predictions": check_n_predictions,
    "n_tokens": check_n_tokens,
    "nucleus_size": check_nucleus_size,
    "param_count": check_param_count,
    "params": check_params,
    "pieces": check_pieces,
    "prob": check_prob,
    "prob_sum": check_prob_sum,
    "rank": check_rank,
    "shape": check_shape,
    "share": check_share,
    "softmax_toy": check_softmax_toy,
    "stop": check_stop,
    "tensor_count": check_tensor_count,
    "text_loss": check_text_loss,
    "token_ids": check_token_ids,
    "topk_order": check_topk_order,
    "tying": check_tying,
    "vocabulary": check_vocabulary,
    "vocabulary_size": check_vocabulary_size,
    "weight_memory": check_weight_memory,
}


# --- The command


def shown(value: Any, width: int = 34) -> str:
    """A value in one line; floats with six digits."""

    def rounded(part: Any) -> Any:
        return float(f"{part:.6g}") if isinstance(part, float) else part

    if isinstance(value, dict):
        value = {key: rounded(part) for key, part in value.items()}
    elif isinstance(value, list):
        value = [rounded(part) for part in value]
    text = json.dumps(rounded(value), ensure_ascii=True)
    return text if len(text) <= width else text[: width - 3] + "..."


def report(facts: Iterable[Fact], model: GPT2, tokenizer: Tokenizer) -> bool:
    """Print one line for each fact; whether all that could be checked hold."""
    checked, failed, not_checked = 0, 0, list[str]()
    print(f"{'fact':<6} {'expected':<34} {'got':<34} {'verdict':<7} source")
    for fact in facts:
        try:
            result = check(fact, model, tokenizer)
        except NotChecked as reason:
            not_checked.append(f"{fact.id:<6} {shown(fact.right):<34} {reason}: {fact.origin}")
            continue
        checked += 1
        failed += not result.ok
        verdict = "ok" if result.ok else "FAILED"
        columns = f"{shown(fact.right):<34} {shown(result.got):<34} {verdict:<7}"
        print(f"{fact.id:<6} {columns} {fact.origin}")
        if not result.ok:
            print(f"       expected {fact.right!a} within {fact.tolerance:g}")
            print(f"       got      {result.got!a}")
    print(f"\nnot checked here\n{'fact':<6} {'expected':<34} why, and source")
    print("\n".join(not_checked))
    print(f"\n{checked} facts checked, {failed} failed, {len(not_checked)} not checked here")
    return failed == 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=OFFICIAL, default="gpt2", help="(default: gpt2)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    name = parse_args(argv).model
    try:
        model = GPT2.from_pretrained(name)
    except CheckpointError as error:
        print(f"facts.py: error: {error}", file=sys.stderr)
        return 1
    facts = [fact for fact in load_facts() if fact.model in (name, None)]
    return 0 if report(facts, model, Tokenizer.from_pretrained(name)) else 1


if __name__ == "__main__":
    sys.exit(main())
