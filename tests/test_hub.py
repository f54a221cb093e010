"""Names to folders: Hugging Face's cache, downloads from a Hub on this machine, and every way they
fail."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fakehub import Hub, serving
from huggingface_hub import constants

from minigpt2 import GPT2, CheckpointError, hub

GPT2_COMMIT = hub.OFFICIAL["gpt2"].revision


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, and no way to connect to anything."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def refuse(*_args: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tmp_path / "cache"


def fill_cache(
    cache: Path, saved: Path, repo_id: str, commit: str, reference: str = "main"
) -> Path:
    """Lay a checkpoint into the cache as huggingface_hub does: blobs, and links to them."""
    repository = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    for file in saved.iterdir():
        blob = repository / "blobs" / hub.sha256(file)
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (repository / "refs" / reference).write_text(commit)
    return snapshot


@pytest.mark.parametrize("repo_id", ["gpt2", "openai-community/gpt2"])
@pytest.mark.parametrize("with_reference", [True, False])
def test_a37_a_cached_official_model_needs_no_connection(
    repo_id: str, with_reference: bool, cache: Path, saved: Path, tiny: GPT2
) -> None:
    snapshot = fill_cache(cache, saved, repo_id, GPT2_COMMIT)
    if not with_reference:
        (snapshot.parents[1] / "refs" / "main").unlink()
    (snapshot.parents[1] / "blobs" / "0123.incomplete").write_bytes(b"")
    loaded = GPT2.from_pretrained("gpt2")
    assert torch.equal(loaded.wte.weight, tiny.wte.weight)
    assert hub.auto() == ("gpt2", "it is in the cache")


def test_a37_a_cached_hub_id_and_its_branches(cache: Path, saved: Path) -> None:
    snapshot = fill_cache(cache, saved, "someone/tiny", "a" * 40)
    assert hub.find("someone/tiny") == snapshot
    assert hub.find("someone/tiny", revision="a" * 40) == snapshot
    with pytest.raises(CheckpointError, match=r"someone/tiny is not on this machine.*revision dev"):
        hub.find("someone/tiny", revision="dev")
    with pytest.raises(CheckpointError, match=r"someone/tiny is not on this machine.*revision dev"):
        GPT2.from_pretrained("someone/tiny", revision="dev")


def test_a37_a_broken_link_is_named_with_the_remedy(cache: Path, saved: Path) -> None:
    snapshot = fill_cache(cache, saved, "gpt2", GPT2_COMMIT)
    (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(
        CheckpointError, match=r"gpt2 is not on this machine \(.*model\.safetensors"
    ) as caught:
        GPT2.from_pretrained("gpt2")
    assert "without --offline" in str(caught.value)
    assert hub.auto() == ("tales", "gpt2 is not in the cache and the Hub is not to be asked")


def test_a37_nothing_cached_offline(cache: Path) -> None:
    assert not cache.exists()
    with pytest.raises(CheckpointError, match=r"config\.json, model\.safetensors missing"):
        GPT2.from_pretrained("distilgpt2", local_files_only=True)


def test_a_cache_with_another_commit_of_an_official_model_is_not_the_pinned_one(
    cache: Path, saved: Path
) -> None:
    snapshot = fill_cache(cache, saved, "gpt2", "b" * 40)
    with pytest.raises(CheckpointError, match=GPT2_COMMIT):
        hub.find("gpt2")
    assert hub.find("gpt2", revision="main") == snapshot


@pytest.mark.parametrize("name", ["./x", "../x", "/no/such", "a/b/c", "", "a b", "x?", "~/x", "\0"])
@pytest.mark.usefixtures("cache")
def test_what_is_no_hub_id_is_a_missing_folder(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        hub.find(name)


def test_tales_is_found_in_a_checkout() -> None:
    assert hub.missing_files(hub.find("tales")) == []


def test_tales_is_found_where_a_wheel_puts_it(tmp_path: Path) -> None:
    package = tmp_path / "minigpt2"
    shutil.copytree(hub.PACKAGE, package, ignore=shutil.ignore_patterns("weights", "__pycache__"))
    inside = package / "weights" / "tales"
    shutil.copytree(hub.find("tales"), inside)
    code = "from minigpt2 import hub; print(hub.find('tales'))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, check=True
    )
    assert Path(done.stdout.decode().strip()) == inside
    pyproject = (hub.PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert '"weights/tales" = "minigpt2/weights/tales"' in pyproject


@pytest.fixture
def server(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A Hub on 127.0.0.1 that has someone/tiny and the official names, all the tiny model."""
    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    with serving({path.name: path.read_bytes() for path in saved.iterdir()}) as endpoint:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield Hub


def test_download_then_no_more_connections(server: type[Hub], tiny: GPT2) -> None:
    model = GPT2.from_pretrained("someone/tiny")
    assert torch.equal(model.wte.weight, tiny.wte.weight)
    asked = len(server.requests)
    GPT2.from_pretrained("someone/tiny")
    assert len(server.requests) == asked


def test_local_files_only_asks_nobody(server: type[Hub]) -> None:
    with pytest.raises(CheckpointError, match="someone/tiny is not on this machine"):
        GPT2.from_pretrained("someone/tiny", local_files_only=True)
    assert server.requests == []


def test_the_vocabulary_comes_along_where_there_is_one(server: type[Hub]) -> None:
    server.files["tokenizer.json"] = b"{}"
    folder = hub.find("someone/tiny")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_shards_and_pickles_are_found(server: type[Hub]) -> None:
    whole = server.files.pop("model.safetensors")
    server.files["pytorch_model.bin"] = b"x"
    assert (hub.find("someone/tiny") / "pytorch_model.bin").is_file()
    index = {"weight_map": {"wte.weight": "part-1.safetensors"}}
    server.files |= {"model.safetensors.index.json": json.dumps(index).encode()}
    server.commit = "d" * 40
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors"):
        hub.find("someone/tiny", revision="shards")
    server.files["part-1.safetensors"] = whole
    assert (hub.find("someone/tiny", revision="shards") / "part-1.safetensors").is_file()


def test_an_official_download_of_the_wrong_size_is_refused_and_deleted(server: type[Hub]) -> None:
    server.commit = GPT2_COMMIT
    size = len(server.files["model.safetensors"])
    with pytest.raises(
        CheckpointError, match=f"downloaded {size} bytes, expected 548105171 bytes: deleted"
    ):
        GPT2.from_pretrained("gpt2")
    assert not any(
        path.stat().st_size == size
        for path in Path(constants.HF_HUB_CACHE).rglob("*")
        if path.is_file()
    )
    assert not any(path.is_symlink() for path in Path(constants.HF_HUB_CACHE).rglob("model.*"))
    # The official vocabulary ships with minigpt2.
    assert not any(request.endswith(("vocab.json", "merges.txt")) for request in server.requests)


def test_an_official_download_of_the_wrong_hash_is_refused_and_deleted(
    server: type[Hub], monkeypatch: pytest.MonkeyPatch, tiny: GPT2
) -> None:
    server.commit = GPT2_COMMIT
    content = server.files["model.safetensors"]
    official = hub.Official("openai-community/gpt2", GPT2_COMMIT, len(content), "0" * 64)
    monkeypatch.setitem(hub.OFFICIAL, "gpt2", official)
    digest = hashlib.sha256(content).hexdigest()
    with pytest.raises(
        CheckpointError, match=f"downloaded sha256 {digest}, expected sha256 {'0' * 64}"
    ):
        GPT2.from_pretrained("gpt2")
    right = hub.Official("openai-community/gpt2", GPT2_COMMIT, len(content), digest)
    monkeypatch.setitem(hub.OFFICIAL, "gpt2", right)
    assert torch.equal(GPT2.from_pretrained("gpt2").wte.weight, tiny.wte.weight)


@pytest.mark.parametrize(
    ("name", "mood", "message"),
    [
        ("nobody/nothing", "well", "neither a folder here nor a public model"),
        ("someone/tiny", "401", "asks for permission"),
    ],
)
def test_what_the_hub_refuses(name: str, mood: str, message: str, server: type[Hub]) -> None:
    server.mood = mood
    with pytest.raises(CheckpointError, match=message):
        GPT2.from_pretrained(name)


def test_a_hub_that_asks_to_wait_is_not_waited_for(server: type[Hub]) -> None:
    server.mood, server.headers_sent = "429", {"Retry-After": "3600"}
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"no more requests for 3600 seconds: try again"):
        hub.find("someone/tiny")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("etag", ["../../../harmed", "/tmp/harmed", ".", "a b"])
def test_a_hub_s_name_for_a_file_cannot_lead_out_of_the_cache(
    etag: str, server: type[Hub], tmp_path: Path
) -> None:
    server.headers_sent = {"ETag": f'"{etag}"'}
    with pytest.raises(
        CheckpointError, match=r"config\.json of someone/tiny: .* gives it the name"
    ):
        hub.find("someone/tiny")
    assert not list(tmp_path.rglob("*harmed*"))


def test_what_is_not_of_the_sha256_that_the_hub_says_is_deleted(
    server: type[Hub], tiny: GPT2
) -> None:
    server.headers_sent = {"ETag": f'"{"0" * 64}"'}
    with pytest.raises(CheckpointError, match=r"config\.json .* has another sha256: deleted"):
        hub.find("someone/tiny")
    assert not [path for path in Path(constants.HF_HUB_CACHE).rglob("*0000") if path.is_file()]
    server.headers_sent = {}
    assert torch.equal(GPT2.from_pretrained("someone/tiny").wte.weight, tiny.wte.weight)


@pytest.mark.parametrize("revision", ["/etc", "../../x", "a/../../b", "a b", "\n", ".", "x?y=z"])
def test_what_is_no_revision_is_refused_unasked(revision: str, server: type[Hub]) -> None:
    with pytest.raises(CheckpointError, match="is not the name of a revision"):
        hub.find("someone/tiny", revision=revision)
    assert server.requests == []


@pytest.mark.usefixtures("cache")
def test_a_name_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"x\\udcff: not UTF-8"):
        hub.find("x\udcff")


def test_a_repository_without_a_model(server: type[Hub]) -> None:
    del server.files["config.json"]
    with pytest.raises(CheckpointError, match=r"someone/tiny is not a checkpoint: .*config\.json"):
        GPT2.from_pretrained("someone/tiny")


def test_a_proxy_has_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert not hub.reachable()
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert hub.reachable()
    for proxy_url in ("http://127.0.0.1:99999", "http://[::1", f"http://{'x' * 99}.a"):
        monkeypatch.setenv("https_proxy", proxy_url)
        assert not hub.reachable()


def test_a_hub_that_cannot_be_reached_is_known_within_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")

    def hang(*_args: object, **_options: object) -> None:
        time.sleep(10)
        raise OSError

    for lookup in (socket.create_connection, hang):
        monkeypatch.setattr(socket, "create_connection", lookup)
        started = time.monotonic()
        with pytest.raises(
            CheckpointError, match=r"127\.0\.0\.1:9 cannot be reached: connect, or use"
        ):
            hub.find("gpt2-xl")
        assert hub.auto() == ("tales", "gpt2 is not in the cache and the Hub cannot be reached")
        assert time.monotonic() - started < 2 * 2
