"""The name of a checkpoint -> the folder that holds its files, downloaded first where need be.

This module imports neither torch nor, until something is to be downloaded, huggingface_hub's
network half: a wrong name is refused, and a cached one found, within milliseconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants

PACKAGE = Path(__file__).parent
LARGEST_TEXT = 1 << 24  # bytes of a config, an index or a vocabulary; GPT-2's largest takes 3.5 MB
VOCABULARY_FILES = ("vocab.json", "merges.txt", "tokenizer.json")


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or not a GPT-2 that minigpt2 implements; the message says
    what to do, in one line that a terminal can show, whatever the file held."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """A message without what would move a terminal's cursor, or fill its screen."""
    text = message if len(message) <= 4000 else f"{message[:3000]} ... {message[-900:]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@dataclasses.dataclass(frozen=True)
class Official:
    """Where one of the official checkpoints lies, and what is known of its model.safetensors."""

    repo_id: str
    revision: str
    n_bytes: int
    sha256: str | None = None


OFFICIAL = {
    "gpt2": Official(
        "openai-community/gpt2",
        "607a30d783dfa663caf39e06633721c8d4cfcd7e",
        548105171,
        "248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707",
    ),
    # The sizes of medium, large and xl follow from their layout; no record of the first two's
    # hashes was found.
    "gpt2-medium": Official(
        "openai-community/gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da", 1519984962
    ),
    "gpt2-large": Official(
        "openai-community/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519", 3247159078
    ),
    "gpt2-xl": Official(
        "openai-community/gpt2-xl",
        "15ea56dee5df4983c59b2538573817e1667135e2",
        6431829964,
        "0f8b28eb05a8075f48b61b6f35332978c74fc7763fa9fb4051a1c30511736a6a",
    ),
    "distilgpt2": Official(
        "distilbert/distilgpt2",
        "2290a62682d06624634c1f46a6ad5be0f47f38aa",
        352824413,
        "e1ff18884359fe8beb795a5f414feb85a6ce3d929ad019c0d958c039d2b94a1b",
    ),
}


def find(
    name_or_folder: str | Path, revision: str | None = None, local_files_only: bool = False
) -> Path:
    """The folder of a checkpoint's files.

    gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2 (at a pinned commit unless `revision` is
    given) and tales always mean those models; write ./gpt2 for a folder of that name. Anything else
    is a folder if there is one, and a Hub id otherwise. What is in Hugging Face's cache is used as
    it lies, without asking the network.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be had now.
    """
    name = str(name_or_folder)
    try:
        return _find(name, revision, local_files_only)
    except OSError as error:  # too long a name, a cache that may not be entered
        raise CheckpointError(f"{name[:99]}: no such folder, or none to enter ({error})") from None


def _find(name: str, revision: str | None, local_files_only: bool) -> Path:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{name}: not UTF-8, which the readers of weights need: rename it"
        ) from None
    if revision and not (re.fullmatch(r"\w[\w./+-]*", revision) and ".." not in revision):
        raise CheckpointError(f"{revision} is not the name of a revision, a branch or a commit")
    is_folder = bool(name) and name not in OFFICIAL and Path(name).is_dir()
    if revision and (name == "tales" or is_folder):
        raise CheckpointError(f"{name} has no revisions, got {revision}: only the Hub's models do")
    if name == "tales":
        return _tales()
    if is_folder:
        return Path(name)
    if name not in OFFICIAL and not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise CheckpointError(f"{name}: no such folder")
    official = OFFICIAL.get(name)
    revision = revision or (official.revision if official else "main")
    repo_id = official.repo_id if official else name
    if cached := _cached(repo_id, name, revision):
        return cached
    if local_files_only or constants.HF_HUB_OFFLINE:
        missing = ", ".join(missing_files(_snapshot(repo_id, revision)))
        raise CheckpointError(
            f"{name} is not on this machine ({missing} missing in Hugging Face's cache "
            f"{constants.HF_HUB_CACHE} at revision {revision}): load it once without --offline"
        )
    if not reachable():
        raise CheckpointError(
            f"{name} is not on this machine and {constants.ENDPOINT} cannot be reached: "
            "connect, or use --model tales, which ships with minigpt2"
        )
    return _download(name, repo_id, revision)


def auto(local_files_only: bool = False) -> tuple[str, str]:
    """The model where none was named, and why: gpt2 if it is here or can be had, else tales."""
    gpt2 = OFFICIAL["gpt2"]
    try:
        if _cached(gpt2.repo_id, "gpt2", gpt2.revision):
            return "gpt2", "it is in the cache"
    except OSError as error:
        return "tales", f"Hugging Face's cache cannot be entered: {error}"
    if local_files_only or constants.HF_HUB_OFFLINE:
        return "tales", "gpt2 is not in the cache and the Hub is not to be asked"
    if not reachable():
        return "tales", "gpt2 is not in the cache and the Hub cannot be reached"
    return "gpt2", "it can be downloaded"


def reachable(timeout: float = 1.5) -> bool:
    """Whether the Hub takes connections, known within `timeout` seconds.

    huggingface_hub left to itself retries for 23 seconds. Behind a proxy it is the proxy that has
    to answer.
    """
    names = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    proxy = next((os.environ[name] for name in names if os.environ.get(name)), None)
    try:
        url = urlsplit(proxy or constants.ENDPOINT)
        address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    except ValueError:  # no such port, no such address
        return False
    answered: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection(address, timeout).close()
            answered.append(True)
        except (OSError, UnicodeError):  # of names that cannot be looked up
            pass

    # In a thread, since looking up a name has no time-out of its own.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout)
    return bool(answered)


def missing_files(folder: Path) -> list[str]:
    """What a folder lacks of a complete checkpoint: config.json and one form of the weights."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if (folder / "model.safetensors").is_file() or (folder / "pytorch_model.bin").is_file():
        return missing
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return missing + [name for name in shard_names(index) if not (folder / name).is_file()]
    return [*missing, "model.safetensors"]


def shard_names(index: Path) -> list[str]:
    """The files that a sharded checkpoint's index lists.

    Raises:
        CheckpointError: it is not such an index, or names something outside its own folder.
    """
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{index}: not an index of shards, no weight_map: download it again")
    for name in shards.values():
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*\.safetensors", name):
            raise CheckpointError(f"{index}: {name!r} is not the name of a shard beside it")
    return sorted(set(shards.values()))


def read_text(path: Path) -> str:
    """A UTF-8 file's content.

    Raises:
        CheckpointError: it cannot be read, or is something else.
    """
    try:
        if (size := path.stat().st_size) > LARGEST_TEXT:
            raise ValueError(f"{size} bytes, more than {LARGEST_TEXT}")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # UTF-8 errors are ValueErrors
        raise CheckpointError(f"{path}: {diagnose(path)} ({error})") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; errors as in `read_text`."""
    text = read_text(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {diagnose(path)} ({error})") from None
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise CheckpointError(f"{path}: expected a JSON object, found {kind}: download it again")
    return values


def diagnose(file: Path) -> str:
    """What a file that makes no sense seems to be, judged by its first bytes, and the remedy."""
    try:
        with file.open("rb") as opened:
            start = opened.read(64).lstrip()
    except OSError:
        return "it cannot be read: see to its permissions"
    for mark, kind in (
        (b"version https://git-lfs", "a git-lfs pointer, not the file: run `git lfs pull`"),
        (b"<", "an HTML page, not the file: download the file itself"),
        (b"PK", "a PyTorch zip or pickle: convert it to safetensors with transformers"),
        (b"\x80", "a Python pickle: convert it to safetensors with transformers"),
    ):
        if start.startswith(mark) and not (file.suffix == ".bin" and mark in (b"PK", b"\x80")):
            return kind
    return "damaged or cut short: download it again"


def sha256(path: Path) -> str:
    """The file's hash, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _tales() -> Path:
    # In the wheel the weights lie inside the package; in a checkout, beside it.
    for folder in (PACKAGE / "weights" / "tales", PACKAGE.parent / "weights" / "tales"):
        if folder.is_dir():
            return folder
    raise CheckpointError(
        "tales is not installed: minigpt2's wheel and a checkout's weights/ folder hold it"
    )


def _cached(repo_id: str, name: str, revision: str) -> Path | None:
    """A checkpoint in Hugging Face's cache, which transformers keeps under the name it was asked
    for."""
    folders = (_snapshot(known_as, revision) for known_as in (repo_id, name))
    return next((folder for folder in folders if not missing_files(folder)), None)


def _snapshot(repo_id: str, revision: str) -> Path:
    """Where Hugging Face's cache keeps a revision's files, whether they are there or not."""
    repository = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"
    reference = repository / "refs" / revision
    commit = read_text(reference).strip() if reference.is_file() else revision
    return repository / "snapshots" / commit


def _download(name: str, repo_id: str, revision: str) -> Path:
    from huggingface_hub import errors

    try:
        folder = _get(repo_id, revision, "config.json").parent
        weights = _get_weights(repo_id, revision)
        for file in VOCABULARY_FILES if name not in OFFICIAL else ():
            with contextlib.suppress(errors.RemoteEntryNotFoundError):
                _get(repo_id, revision, file)
    except errors.GatedRepoError:
        page = f"{constants.ENDPOINT}/{repo_id}"
        raise CheckpointError(
            f"{name} asks for permission: accept its terms on {page} and log in"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{name} has no revision {revision}") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{name} is neither a folder here nor a public model on {constants.ENDPOINT}"
        ) from None
    except errors.RemoteEntryNotFoundError as error:
        raise CheckpointError(f"{name} is not a checkpoint: {_joined(error)}") from None
    except CheckpointError:
        raise
    except Exception as error:  # disk full, no permission; the HTTP client's own, let through
        reason = _joined(error.__cause__ or error)
        raise CheckpointError(f"{name} could not be downloaded: {reason}: try again") from None
    official = OFFICIAL.get(name)
    if official and official.revision == revision:
        _verify(weights, official)
    return folder


def _get(repo_id: str, revision: str, file: str) -> Path:
    """Download one file.

    Raises:
        CheckpointError: the Hub asks to wait, or its file is not what it says itself.
        Exception: huggingface_hub's own.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

    where = f"{file} of {repo_id}"
    try:
        url = hf_hub_url(repo_id, file, revision=revision)
        etag = get_hf_file_metadata(url, timeout=5).etag or ""
        if not re.fullmatch(r"[\w-]*", etag):  # becomes the name of a file
            raise CheckpointError(f"{where}: {constants.ENDPOINT} gives it the name {etag}")
    except errors.HfHubHTTPError as error:
        if error.response.status_code == 429:  # huggingface_hub would wait, be it for an hour
            seconds = error.response.headers.get("Retry-After", "some")
            raise CheckpointError(
                f"{where}: {constants.ENDPOINT} takes no more requests for {seconds} seconds: "
                "try again later, or log in"
            ) from None
    path = Path(hf_hub_download(repo_id, file, revision=revision, etag_timeout=5))
    # The cache names a large file by its sha256, but nobody compares.
    blob = path.resolve()
    if re.fullmatch("[0-9a-f]{64}", blob.name) and sha256(blob) != blob.name:
        blob.unlink()
        path.unlink(missing_ok=True)
        raise CheckpointError(f"{where}: what came has another sha256: deleted; try again")
    return path


def _joined(error: BaseException) -> str:
    return " ".join(str(error).split())


def _get_weights(repo_id: str, revision: str) -> Path:
    """Download model.safetensors, or else the shards, or else pytorch_model.bin."""
    from huggingface_hub import errors

    with contextlib.suppress(errors.RemoteEntryNotFoundError):
        return _get(repo_id, revision, "model.safetensors")
    try:
        index = _get(repo_id, revision, "model.safetensors.index.json")
    except errors.RemoteEntryNotFoundError:
        return _get(repo_id, revision, "pytorch_model.bin")
    for shard in shard_names(index):
        _get(repo_id, revision, shard)
    return index


def _verify(path: Path, official: Official) -> None:
    """Refuse, and delete, a download that is not the official file."""
    found = f"{path.stat().st_size} bytes"
    wanted = f"{official.n_bytes} bytes"
    if found == wanted and official.sha256:
        found, wanted = f"sha256 {sha256(path)}", f"sha256 {official.sha256}"
    if found != wanted:
        path.resolve().unlink()  # the cache's blob; path itself is a link to it
        path.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: downloaded {found}, expected {wanted}: deleted; try again")
