"""What a training run keeps in its folder: the state that it goes on from, checkpoints, a log."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from minigpt2 import GPT2
from minigpt2.checkpoint import replace_file
from minigpt2.hub import VOCABULARY_FILES

STATE = "training.safetensors"


@dataclasses.dataclass
class Progress:
    """How far a run has come."""

    step: int = -1  # the last one that was saved; -1: none
    best: float = math.inf  # the lowest validation loss


@torch.no_grad()
def save(
    model: GPT2, optimizer: Optimizer, progress: Progress, is_best: bool, out: Path, dtype: str
) -> None:
    """Write the state to OUT, and the weights for use: to OUT, and to OUT/best if they are.

    The state is one file, so that it is of one step whenever the process is killed. Of several
    processes all call this, and the first writes.
    """
    if isinstance(model, FSDPModule):
        model.reshard()  # an evaluation leaves the tables whole, apart from the optimizer's
    first = not dist.is_initialized() or dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    for key, shared in _named_tensors(model, optimizer):
        whole = shared.full_tensor() if isinstance(shared, DTensor) else shared
        if first:
            tensors[key] = whole.cpu()
    if not first:
        return
    metadata = {"step": str(progress.step), "best": repr(progress.best)}
    metadata["config"] = json.dumps(_sizes(model))
    try:
        if is_best:
            _export(model, tensors, out / "best", dtype)
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / STATE, lambda path: save_file(tensors, path, metadata))
        _export(model, tensors, out, dtype)
    except SafetensorError as error:  # a full disk, for instance
        raise OSError(f"{out} cannot be written: {error}") from None


@torch.no_grad()
def resume(model: GPT2, optimizer: Optimizer, out: Path, dtype: str) -> Progress:
    """Take up the state in OUT, if there is one, and write its weights for use once more: a kill
    may have come between the two.

    Raises:
        ValueError: it is of other sizes or damaged, or OUT holds a checkpoint without a state.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    for leftover in out.rglob(".*.tmp") if first else ():  # of files that a kill cut short
        leftover.unlink()
    if not (out / STATE).is_file():
        if (out / "config.json").exists() or (out / "model.safetensors").exists():
            raise ValueError(f"{out} holds a checkpoint without {STATE}: choose another --out")
        return Progress()
    try:
        with safe_open(out / STATE, "pt") as file:
            metadata, keys = file.metadata(), list(file.keys())
            tensors = {key: file.get_tensor(key) for key in keys}
        progress = Progress(int(metadata["step"]), float(metadata["best"]))
        there, here = dict(json.loads(metadata["config"])), _sizes(model)
        if progress.step < 0 or math.isnan(progress.best):
            raise ValueError(f"step {progress.step}, best {progress.best}")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{out / STATE} is damaged ({error}): choose another --out") from None
    if differing := [key for key in here if here[key] != there.get(key)]:
        names = ", ".join(f"{key} {there.get(key)}, not {here[key]}" for key in differing)
        raise ValueError(f"{out} holds a run of {names}: choose another --out")
    parameters = dict(model.named_parameters())
    if odd := _odd_tensors(tensors, parameters):
        raise ValueError(f"{out / STATE} is damaged ({', '.join(odd[:9])}): choose another --out")
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        parameter = parameters[name]
        if isinstance(parameter, DTensor) and tensor.dim():
            tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
        if kind == "model":
            parameter.copy_(tensor)
        else:  # of the optimizer: a copy, since the file is mapped into memory
            optimizer.state[parameter][kind] = tensor.to(parameter.device, copy=True)
    if first:
        _export(model, tensors, out, dtype)
    return progress


def _odd_tensors(tensors: dict[str, Tensor], parameters: dict[str, Parameter]) -> list[str]:
    """What is not, for each parameter, its value and AdamW's step and moments (none before the
    first step), of the same shape."""
    stepped = any(key.startswith("exp_avg") for key in tensors)
    expected = {
        f"{kind}.{name}": () if kind == "step" else tuple(parameter.shape)
        for name, parameter in parameters.items()
        for kind in ("model", *(("exp_avg", "exp_avg_sq", "step") if stepped else ()))
    }
    fits = {
        key
        for key in expected.keys() & tensors.keys()
        if tensors[key].shape == expected[key] and tensors[key].is_floating_point()
    }
    return sorted((expected.keys() | tensors.keys()) - fits)


def keep_vocabulary(source: Path, out: Path) -> None:
    """Copy the vocabulary files of a checkpoint that has its own."""
    for name in (*VOCABULARY_FILES, "added_tokens.json"):
        for folder in (out, out / "best"):
            if (source / name).is_file():
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, folder / name)


def _export(model: GPT2, tensors: dict[str, Tensor], folder: Path, dtype: str) -> None:
    """Write the whole weights as a folder that GPT2.from_pretrained and transformers open."""
    with torch.device("meta"):
        saved = GPT2(model.config)
    weights = {name: tensors[f"model.{name}"] for name in saved.state_dict()}
    converted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    saved.load_state_dict(converted, assign=True)
    saved.save_pretrained(folder)


def _named_tensors(model: GPT2, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter
        for kind, value in optimizer.state.get(parameter, {}).items():  # AdamW: step and moments
            yield f"{kind}.{name}", value


def _sizes(model: GPT2) -> dict[str, Any]:
    """The config, as JSON has it, without what may change from run to run."""
    values = json.loads(json.dumps(dataclasses.asdict(model.config)))
    return {key: value for key, value in values.items() if not key.endswith("_pdrop")}
