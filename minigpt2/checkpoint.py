"""A name or a folder -> a loaded GPT2, and a GPT2 -> a folder that transformers opens."""

from __future__ import annotations

import io
import json
import os
import pickletools
import re
import secrets
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minigpt2.config import GPT2Config
from minigpt2.hub import (
    CheckpointError,
    diagnose,
    find,
    missing_files,
    read_json,
    shard_names,
)
from minigpt2.model import GPT2

# Causal masks that old checkpoints store beside the weights, by exact name: c_attn.bias also ends
# in "attn.bias".
MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")

# All that a state dict is pickled with. torch.load's weights_only lets more through: a bytearray of
# any size, for instance.
PICKLED = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor|tensor_v2|parameter)|torch \w+Storage"
)

LARGEST_HEADER = 1 << 20  # bytes; that of gpt2-xl takes 70,000

# What torch.compile and DistributedDataParallel put in front of a key, and transformers' own
# prefix.
PREFIX = re.compile(r"^(?:_orig_mod\.|module\.)*(?:transformer\.)?")


def load_pretrained(
    name_or_folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    local_files_only: bool = False,
) -> GPT2:
    """Load a checkpoint, in evaluation mode. Nothing is initialised at random, and float32 files
    asked for in float32 stay memory-mapped: pages are read when a forward pass first touches them.

    Args:
        name_or_folder, revision, local_files_only: as in hub.find.
        dtype: convert the weights to this.

    Raises:
        CheckpointError: it cannot be found, or its files and GPT2's parameters do not match one to
            one.
    """
    folder = find(name_or_folder, revision, local_files_only)
    try:
        if missing := missing_files(folder):
            raise CheckpointError(f"{folder}: not a checkpoint: {', '.join(missing)} missing")
        config = read_config(folder / "config.json")
        tensors = _tie(_collect(folder), config, folder)
    except OSError as error:
        raise CheckpointError(str(error)) from None
    # Counted before the model is built: a config that asks for a million layers is not obeyed.
    layers = len({key.split(".")[1] for key in tensors if re.match(r"h\.\d+\.", key)})
    if layers != config.n_layer:
        raise CheckpointError(
            f"{folder}: config.json says n_layer {config.n_layer}, the weights have {layers} layers"
        )
    try:
        with torch.device("meta"):  # shapes without memory
            model = GPT2(config)
    except (RuntimeError, TypeError, OverflowError):
        raise CheckpointError(
            f"{folder / 'config.json'}: a matrix of its sizes is larger than any can be"
        ) from None
    _check_match(model.state_dict(), tensors, folder)
    converted = {key: tensor.to(device=device, dtype=dtype) for key, tensor in tensors.items()}
    model.load_state_dict(converted, assign=True)
    return model.eval()


def read_config(path: Path) -> GPT2Config:
    """The config that a config.json describes.

    Raises:
        CheckpointError: it is no JSON object, lacks n_head, or as in GPT2Config.from_dict.
    """
    values = read_json(path)
    # The one size that no weight's shape would contradict.
    if "n_head" not in values:
        raise CheckpointError(f"{path}: n_head is missing: download it again, or set it")
    try:
        return GPT2Config.from_dict(values)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def save_pretrained(model: GPT2, folder: str | Path) -> None:
    """Write config.json and model.safetensors, as transformers' save_pretrained names and lays them
    out.

    A tied head is stored once. Each file appears whole or not at all: it is written under a
    temporary name first.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_saved_name(key): tensor.contiguous() for key, tensor in model.state_dict().items()}
    config = model.config.to_dict() | {"dtype": str(model.wte.weight.dtype).removeprefix("torch.")}
    weights = folder / "model.safetensors"

    def write(path: Path) -> None:
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:  # disk full, no permission
            raise OSError(f"{weights}: {error}") from None

    replace_file(weights, write)
    text = json.dumps(config, indent=2) + "\n"
    replace_file(folder / "config.json", lambda path: path.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, then put it in the place of `path` in one step.

    A link is followed, an existing file keeps its permissions, a pipe or a device is written to.

    Raises:
        OSError: it may not be written to, or the disk is full.
    """
    if path.exists() and not path.is_file():
        write(path)
        return
    path = path.resolve()
    if path.exists() and not os.access(
        path, os.W_OK, effective_ids=os.access in os.supports_effective_ids
    ):
        raise PermissionError(f"Permission denied: {path}")
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        write(temporary)
        umask = os.umask(0)
        os.umask(umask)
        # Set here, since safetensors writes files that only their owner can read.
        temporary.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~umask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _saved_name(key: str) -> str:
    return key if key.startswith("lm_head.") else "transformer." + key


def _collect(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder under GPT2's own keys: no prefix, no mask buffers."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        for stored_key, tensor in _read(file).items():
            key = PREFIX.sub("", stored_key)
            if MASK_BUFFER.fullmatch(key):
                continue
            if key in tensors:
                raise CheckpointError(f"{file}: {key} is stored twice")
            if not tensor.is_floating_point():
                raise CheckpointError(
                    f"{file}: {stored_key} holds {tensor.dtype}, expected floating-point weights"
                )
            tensors[key] = tensor
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files that a folder's weights are read from."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        return [folder / shard for shard in shard_names(index)]
    return [folder / "pytorch_model.bin"]


def _read(file: Path) -> dict[str, Tensor]:
    """The tensors of one file, memory-mapped."""
    try:
        if file.suffix == ".bin":
            return _read_pickle(file)
        _refuse_odd_headers(file)
        with safe_open(file, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in list(opened.keys())}
    except Exception as error:  # the two readers raise many kinds
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{file}: {diagnose(file)} ({reason})") from None


def _read_pickle(file: Path) -> dict[str, Tensor]:
    """torch.load, which looks at no checksum, after a look at those that the file has."""
    zipped = zipfile.is_zipfile(file)  # not in files from before PyTorch 1.6
    if zipped:
        with zipfile.ZipFile(file) as archive:
            for part in archive.infolist():
                if part.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{part.filename} is compressed, as PyTorch never writes it")
                with archive.open(part) as opened:
                    while part.CRC and opened.read(1 << 22):  # compares at the end
                        pass
        _refuse_odd_pickles(
            io.BytesIO(torch._C.PyTorchFileReader(str(file)).get_record("data.pkl"))
        )
    else:
        with file.open("rb") as opened:
            for _ in range(5):  # number, version, system, the tensors, their storages
                _refuse_odd_pickles(opened)
    # weights_only: a pickle that holds anything but tensors is refused, not run.
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    tensors = {key: value for key, value in loaded.items() if isinstance(value, Tensor)}
    for key, tensor in tensors.items():
        if not isinstance(key, str) or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"{str(key)[:99]} is not the name of a whole tensor")
    return tensors


def _refuse_odd_pickles(opened: IO[bytes]) -> None:
    """What would take any amount of memory or time: other classes than those of a state dict, and
    tuples that are used again, whose hash takes 2**n steps where they hold each other."""
    tuples: set[object] = set()
    last = ""
    for operation, value, _ in pickletools.genops(opened):
        name = operation.name
        if name.endswith("GLOBAL") and not PICKLED.fullmatch(str(value)):
            raise ValueError(f"its pickle asks for {value}")
        if name.endswith("BINGET") and value in tuples:
            raise ValueError("its pickle uses a tuple twice")
        if name.endswith("BINPUT") and last.startswith("TUPLE"):
            tuples.add(value)
        last = name


def _refuse_odd_headers(file: Path) -> None:
    """Of several entries of one name, which the format forbids, safetensors takes the last; and a
    header of many megabytes takes memory and time before it is seen to fit no model."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = opened.read(min(length, LARGEST_HEADER))
    if len(header) < length:
        raise ValueError(f"a header of {length} bytes, cut short or larger than {LARGEST_HEADER}")

    def once(pairs: list[tuple[str, object]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError("its header gives a name twice")

    json.loads(header, object_pairs_hook=once)


def _tie(tensors: dict[str, Tensor], config: GPT2Config, folder: Path) -> dict[str, Tensor]:
    """One table for both ends of a tied model, from whichever of wte and lm_head the file holds."""
    if not config.tie_word_embeddings or "lm_head.weight" not in tensors:
        return tensors
    head = tensors.pop("lm_head.weight")
    table = tensors.setdefault("wte.weight", head)
    if not torch.equal(table, head):
        raise CheckpointError(
            f"{folder}: lm_head.weight and wte.weight differ, but config.json ties them: "
            "set tie_word_embeddings to false there if the head is one of its own"
        )
    return tensors


def _check_match(expected: dict[str, Tensor], found: dict[str, Tensor], folder: Path) -> None:
    """See that keys and shapes agree one to one, and list together all that do not."""
    problems = [
        f"missing {key} {tuple(expected[key].shape)}" for key in expected if key not in found
    ]
    problems += [
        f"unexpected {key} {tuple(found[key].shape)}" for key in found if key not in expected
    ]
    for key in expected.keys() & found.keys():
        if found[key].shape != expected[key].shape:
            have, need = tuple(found[key].shape), tuple(expected[key].shape)
            problems.append(f"{key} has shape {have}, config.json needs {need}")
    if problems:
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(
            f"{folder}: the weights do not fit: {'; '.join(sorted(problems)[:20])}{more}"
        )
