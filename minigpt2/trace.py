"""One prompt's way through the network, with every number on the way.

The pass is the model's own, under the explicit arithmetic: `_Recorder` is that arithmetic, writing
down what goes through it. Shapes: T tokens, C width, H heads, V vocabulary, L = n_layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import traceback
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minigpt2 import model as network
from minigpt2.config import GPT2Config
from minigpt2.decoding import decode
from minigpt2.model import GPT2
from minigpt2.ops import Explicit, explicit
from minigpt2.options import GenerationOptions
from minigpt2.packed import PackedOps
from minigpt2.sampling import NOT_NUMBERS
from minigpt2.streaming import prompt_ids
from minigpt2.texts import Request, evaluating
from minigpt2.tokenizer import Tokenizer

LENS_TOKENS = 5  # how many of each layer's best tokens the logit lens keeps
PATH_TOKENS = 5  # and each step of the greedy path


@dataclasses.dataclass(frozen=True)
class Stage:
    """One formula of the pass, in the order in which they ran."""

    name: str  # its weights' key in the checkpoint, h.0.attn.c_attn; or h.0.attn.weights
    formula: str  # the method of ops.Explicit
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    parameters: int  # 0 for the tied head: the token table is counted where it embeds
    norms: Tensor  # (T,) Euclidean length of each position's output
    line: str  # the line of model.py that called it


@dataclasses.dataclass(frozen=True)
class PathStep:
    """One token of the greedy continuation."""

    token_id: int
    candidates: list[tuple[int, float]]  # the best ids and their probabilities; the first is taken


@dataclasses.dataclass(frozen=True)
class Trace:
    """What happened to one prompt. Tensors are on the CPU; floats are float32.

    token_ids, pieces, token_bytes: T each; a piece is for display, with escapes for what does not
        print, and the bytes are what the token stands for.
    stages: every formula that ran, with its shapes and norms.
    residual: (L + 1, T, C), the stream that enters block 0, 1, ... and, last, ln_f.
    attention: (L, H, T, T), weight [l, h, i, j] of token j in what head h gathers for token i;
        rows sum to one, and are zero for j > i.
    logits: (T, V), the model's own.
    lens_ids, lens_probs: (L + 1, T, 5), the best tokens if the stream stopped at that layer, and
        their probabilities; lens_ranks: (L + 1, T), the place there of the token that wins in the
        end, 1 for the first. The last row is the model's own answer.
    path: the greedy continuation, empty unless asked for.
    parameters: (name, shape, number) of every parameter; the numbers add up to the model's.
    """

    text: str
    config: GPT2Config
    dtype: str
    token_ids: list[int]
    pieces: list[str]
    token_bytes: list[bytes]
    stages: list[Stage]
    residual: Tensor
    attention: Tensor
    logits: Tensor
    lens_ids: Tensor
    lens_probs: Tensor
    lens_ranks: Tensor
    path: list[PathStep]
    parameters: list[tuple[str, tuple[int, ...], int]]


class _Recorder(Explicit):
    """The explicit arithmetic, which also notes each call."""

    def __init__(self, model: GPT2) -> None:
        self._keys = {id(p): key.rpartition(".")[0] for key, p in model.named_parameters()}
        self._module = ""  # h.0.attn: where the latest weights lie
        self.stages: list[Stage] = []
        self.residual: list[Tensor] = []
        self.weights: list[Tensor] = []

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return self._note("embedding", ids, super().embedding(ids, table), table)

    def unembedding(self, x: Tensor, table: Tensor, top: int = 0) -> Tensor:
        return self._note("unembedding", x, super().unembedding(x, table, top), table)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self._note("linear", x, super().linear(x, weight, bias), weight, bias)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        # ln_1 reads what enters a block, ln_f what leaves the last one.
        if not self._keys[id(weight)].endswith("ln_2"):
            self.residual.append(x)
        out = super().layer_norm(x, weight, bias, epsilon)
        return self._note("layer_norm", x, out, weight, bias)

    def activation(self, name: str, x: Tensor) -> Tensor:
        return self._note("activation", x, super().activation(name, x))

    def attention_weights(self, q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        weights = super().attention_weights(q, k, mask, scale)
        self.weights.append(weights)
        return self._note("attention_weights", q, weights)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout_p: float
    ) -> Tensor:
        heads = super().attention(q, k, v, mask, scale, dropout_p)
        return self._note("attention", v, heads)

    def _note(self, formula: str, x: Tensor, out: Tensor, *parameters: Tensor) -> Tensor:
        numbers = sum(p.numel() for p in parameters)
        if parameters:
            name = self._keys[id(parameters[0])]
            self._module = name.rpartition(".")[0]
            if formula == "unembedding":
                name, numbers = "head", 0 if name == "wte" else numbers
        else:
            name = f"{self._module}.{formula.removeprefix('attention_')}"
        shapes = tuple(x.shape), tuple(out.shape)
        norms = _norms(out)
        self.stages.append(Stage(name, formula, *shapes, numbers, norms, _calling_line()))
        return out


@contextlib.contextmanager
def _recording(model: GPT2) -> Iterator[_Recorder]:
    """The model in evaluation mode and under a recorder; afterwards as it was."""
    recorder, was = _Recorder(model), model.ops
    model.ops = recorder
    try:
        with evaluating(model):
            yield recorder
    finally:
        model.ops = was


@torch.inference_mode()
def explain(
    model: GPT2,
    tokenizer: Tokenizer,
    text: str | Sequence[int],
    *,
    greedy_steps: int = 0,
    special: bool = True,
) -> Trace:
    """Pass a prompt through the model once, and keep what there is to see.

    Args:
        text: the prompt, or its ids; an empty one is <|endoftext|>.
        greedy_steps: how many tokens to continue it by, each of which is a pass of its own.
        special: whether <|endoftext|> in the text is the special token.

    Raises:
        ValueError: more tokens than n_positions, an id outside the vocabulary, or a packed model.
    """
    if isinstance(model.ops, PackedOps):
        raise ValueError("explain() looks into the plain network: call it before pack()")
    given = tokenizer.encode(text, special) if isinstance(text, str) else text
    ids = prompt_ids(tokenizer, given)
    window = model.config.n_positions
    if len(ids) > window:
        raise ValueError(f"the prompt's {len(ids)} tokens exceed n_positions {window}: shorten it")
    token_ids = torch.tensor([ids], device=model.wte.weight.device)  # (1, T)
    with _recording(model) as recorder:
        logits = model(token_ids)  # (1, T, V)
        if not logits.isfinite().all():
            raise ValueError(NOT_NUMBERS)
        model.ops = explicit  # the pass has been seen; what follows is not part of it
        lens, last = _lens(model, recorder.residual, logits)
        path = _greedy_path(model, token_ids, greedy_steps)
    assert torch.equal(last, logits), "the logit lens must end in the model's own logits"
    return Trace(
        text=text if isinstance(text, str) else tokenizer.decode(ids),
        config=model.config,
        dtype=str(logits.dtype).removeprefix("torch."),
        token_ids=ids,
        pieces=[tokenizer.piece(token_id) for token_id in ids],
        token_bytes=[tokenizer.token_bytes(token_id) for token_id in ids],
        stages=recorder.stages,
        residual=torch.cat(recorder.residual).float().cpu(),
        attention=torch.cat(recorder.weights).float().cpu(),
        logits=logits[0].float().cpu(),
        path=path,
        parameters=[(n, tuple(p.shape), p.numel()) for n, p in model.named_parameters()],
        **lens,
    )


def logit_lens(model: GPT2, stream: Tensor) -> Tensor:
    """The logits if the residual stream (B, T, C) went from here straight to the last norm and the
    head (nostalgebraist 2020): (B, T, V)."""
    table = model.wte.weight if model.lm_head is None else model.lm_head.weight
    return model.ops.unembedding(model.ln_f(stream, model.ops), table)


def _lens(model: GPT2, residual: list[Tensor], logits: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A Trace's lens_ids, lens_probs and lens_ranks, and the last layer's (1, T, V) logits."""
    winners = logits.argmax(dim=-1, keepdim=True)  # (1, T, 1)
    ids, probs, ranks = [], [], []
    for stream in residual:
        seen = logit_lens(model, stream)
        best = seen.float().softmax(dim=-1).topk(min(LENS_TOKENS, seen.shape[-1]))
        ids.append(best.indices)
        probs.append(best.values)
        ranks.append((seen > seen.gather(-1, winners)).sum(dim=-1) + 1)
    rows = {"lens_ids": ids, "lens_probs": probs, "lens_ranks": ranks}
    return {name: torch.cat(values).cpu() for name, values in rows.items()}, seen


def _greedy_path(model: GPT2, token_ids: Tensor, steps: int) -> list[PathStep]:
    path = []
    for step in decode(Request(model, token_ids, GenerationOptions(max_new_tokens=steps))):
        best = step.logits[0].softmax(dim=-1).topk(min(PATH_TOKENS, step.logits.shape[-1]))
        candidates = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        # topk may order equal scores otherwise than argmax, which is what was taken.
        candidates.sort(key=lambda pair: (-pair[1], pair[0] != int(step.token_ids[0])))
        path.append(PathStep(int(step.token_ids[0]), candidates))
    return path


def _norms(out: Tensor) -> Tensor:
    """(T,): the length of each position's vector, all heads together."""
    rows = out[0].transpose(0, 1).flatten(1) if out.dim() == 4 else out.flatten(0, -2)  # (T, ...)
    lengths: Tensor = torch.linalg.vector_norm(rows.float(), dim=-1)
    return lengths.cpu()


def _calling_line() -> str:
    """The line of model.py that asked for the running formula, past the modules that only hold
    weights."""
    for frame, number in traceback.walk_stack(None):
        code = frame.f_code
        holder = type(frame.f_locals.get("self"))
        if code.co_filename == network.__file__ and holder not in (
            network.Linear,
            network.LayerNorm,
            network.Embedding,
        ):
            return f"model.py:{number}  {linecache.getline(code.co_filename, number).strip()}"
    return "called from outside model.py"
