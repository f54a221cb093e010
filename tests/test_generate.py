"""The command line, through subprocesses: bytes on standard output, exit codes, signals, JSON."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from parity import harsh_model

from minigpt2 import GPT2, GPT2Config, Tokenizer, generate, hub
from minigpt2.decoding import decode
from minigpt2.tokenizer import byte_characters

TOKENIZER = Tokenizer.from_pretrained("gpt2")
PROMPT = "Once upon a time"
TOKENIZER_CHARACTERS = list(byte_characters().values())  # of the 256 bytes, by id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that speaks GPT-2's vocabulary."""
    path = tmp_path_factory.mktemp("small")
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, eos_token_id=50256)
    harsh_model(config).save_pretrained(path)
    return path


def environment(**extra: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LC_"))
    }
    root = str(Path(generate.__file__).parents[1])
    return kept | {"PYTHONPATH": root, "HF_HUB_OFFLINE": "1"} | extra


def run(
    *arguments: str | Path, stdin: bytes = b"", **extra: str
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "minigpt2.generate", *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, capture_output=True, env=environment(**extra), timeout=60, check=False
    )


def main(
    capfd: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0
) -> tuple[str, str]:
    """The command line in this process: (stdout, stderr)."""
    try:
        code = generate.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capfd.readouterr()
    assert code == status, err
    return out, err


def greedy_text(folder: Path, prompt: str, n: int) -> str:
    model = GPT2.from_pretrained(folder)
    ids = TOKENIZER.encode(prompt)
    return TOKENIZER.decode(
        model.generate(torch.tensor([ids]), max_new_tokens=n)[0, len(ids) :].tolist()
    )


def test_standard_output_is_prompt_and_text_and_one_newline(folder: Path) -> None:
    done = run(PROMPT, "-m", folder, "-n", "8")
    assert done.stdout.decode() == PROMPT + greedy_text(folder, PROMPT, 8).rstrip("\n") + "\n"
    assert done.returncode == 0
    assert done.stderr == b""


def test_no_echo_no_stream(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = greedy_text(folder, PROMPT, 8).rstrip("\n") + "\n"
    assert main(capfd, PROMPT, "-m", folder, "-n", "8", "--no-echo", "--no-stream")[0] == text


def test_the_shipped_model_tells_the_same_story_twice() -> None:
    options = ("-m", "tales", "-n", "60", "--temperature", "0.8", "--top-k", "40", "--seed", "1")
    first, second = run(PROMPT, *options), run(PROMPT, *options)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    text = first.stdout.decode()
    assert text.startswith(PROMPT)
    assert len(text.split()) > 30


def test_auto_says_which_model_and_why() -> None:
    done = run(PROMPT, "-n", "1", "--offline")
    assert done.returncode == 0
    assert b"minigpt2.generate: model tales: gpt2 is not in the cache" in done.stderr
    assert run(PROMPT, "-n", "1", "--offline", "-q").stderr == b""


def test_auto_falls_back_within_two_seconds_and_a_named_model_fails_within_five(
    tmp_path: Path,
) -> None:
    # An address of this machine that takes no connections; hanging ones are in test_hub.py.
    extra = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    code = "import time; t = time.monotonic(); from minigpt2 import hub; print(hub.auto()[0]); "
    code += "print(time.monotonic() - t)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment(**extra), check=True
    )
    name, seconds = done.stdout.split()
    assert name == b"tales"
    assert float(seconds) < 2
    started = time.monotonic()
    failed = run(PROMPT, "-m", "gpt2", **extra)
    assert time.monotonic() - started < 5
    assert failed.returncode == 1
    assert failed.stdout == b""
    assert failed.stderr.count(b"\n") == 1
    assert b"cannot be reached" in failed.stderr


@pytest.mark.parametrize(
    ("content", "prompt"),
    [(b"Hi\n", "Hi"), (b"Hi", "Hi"), (b"Hi\n\n", "Hi\n"), (b"Hi\r\n", "Hi"), (b" Hi", " Hi")],
)
def test_files_and_stdin_lose_exactly_one_newline(
    content: bytes, prompt: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    out, _ = main(capfd, "-f", file, "-m", folder, "-n", "2", "--json")
    assert json.loads(out)["prompt"] == prompt


@pytest.mark.parametrize("arguments", [("-",), ()])
def test_stdin_is_read_where_no_prompt_is_given(arguments: tuple[str, ...], folder: Path) -> None:
    done = run(*arguments, "-m", folder, "-n", "2", "--json", stdin="Hé\n".encode())
    assert json.loads(done.stdout)["prompt"] == "Hé"


def test_stdin_is_not_read_where_one_is(folder: Path) -> None:
    reader, writer = os.pipe()  # nothing is ever written: reading would hang
    command = [sys.executable, "-m", "minigpt2.generate", "Hi", "-m", str(folder), "-n", "1"]
    done = subprocess.run(
        command, stdin=reader, capture_output=True, env=environment(), timeout=60, check=False
    )
    os.close(reader)
    os.close(writer)
    assert done.returncode == 0


def test_no_prompt_on_a_terminal_is_a_usage_error_with_an_example() -> None:
    controller, terminal = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "minigpt2.generate", "-m", "tales"],
        stdin=terminal, capture_output=True, env=environment(), timeout=60, check=False,
    )  # fmt: skip
    os.close(controller)
    os.close(terminal)
    assert done.returncode == 2
    assert b'python -m minigpt2.generate "Once upon a time"' in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", "1.5"], "top_p must be a number from 0 to 1, got 1.5"),
        (["--temperature", "-1"], "temperature must be"),
        (["--temperature", "nan"], "temperature must be"),
        (["--top-k", "-1"], "top_k must be a whole number from 0 to 2147483647, got -1"),
        (["-n", "-5"], "max_new_tokens must be"),
        (["-n", "x"], "invalid int value"),
        (
            ["--repetition-penalty", "0"],
            "repetition_penalty must be a number from 0.0001 to",
        ),
        (["--num-return-sequences", "0"], "num_return_sequences must be"),
        (["--num-beams", "0"], "num_beams must be"),
        (["--num-beams", "2", "--num-return-sequences", "3"], "exceeds num_beams 2"),
        (["--stop", ""], "--stop must not be empty"),
        (["--logprobs", "3"], "--logprobs needs --json"),
        (["--logprobs", "99", "--json"], "--logprobs must be from 0 to 50"),
        (["--seed", "-1"], "--seed must be"),
        (["--dtype", "int3"], "invalid choice"),
        (["--tempera", "1"], "unrecognized arguments"),
        (["--device", "nonsense"], "'nonsense' is none of cpu, cuda, cuda:1, mps, xpu"),
        (["--device", "hpu"], "'hpu' is none of cpu, cuda, cuda:1, mps, xpu"),
        (["-p", "two"], "give one prompt"),
        (["-f", "x.txt"], "give one prompt"),
    ],
)
def test_wrong_usage_is_one_line_and_2_before_any_model(
    arguments: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_model(*_args: object) -> None:
        raise AssertionError("a model was looked for")

    monkeypatch.setattr(hub, "find", no_model)
    out, err = main(capfd, PROMPT, *arguments, "-m", "gpt2", status=2)
    assert out == ""
    assert err.startswith("minigpt2.generate: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_usage_errors_do_not_import_torch() -> None:
    code = (
        "import sys\nfrom minigpt2 import generate\n"
        "try: generate.main(['x', '--top-p', '7'])\n"
        "except SystemExit as e: print(e.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment(), check=True
    )
    assert done.stdout == b"2 False\n"


def test_the_package_never_imports_transformers(folder: Path) -> None:
    code = (
        "import sys\nfrom minigpt2 import generate\n"
        f"generate.main(['x', '-m', {str(folder)!r}, '-n', '1'])\n"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment(), check=True
    )
    assert done.stdout.endswith(b"\nFalse\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "no/such/folder"], "no/such/folder: no such folder"),
        (["-f", "no-such-file.txt"], "No such file"),
    ],
)
def test_failures_are_one_line_and_1(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    prompt = [] if "-f" in arguments else [PROMPT]
    out, err = main(capfd, *prompt, *arguments, status=1)
    assert out == ""
    assert err.startswith("minigpt2.generate: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_traceback_with_verbose_only(capfd: pytest.CaptureFixture[str]) -> None:
    _, err = main(capfd, PROMPT, "-m", "no/such/folder", "-v", status=1)
    assert "Traceback" in err
    assert "minigpt2.generate: error: no/such/folder" in err.splitlines()[-1]


def test_a_prompt_longer_than_the_window(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    long = "a " * 100
    _, err = main(capfd, long, "-m", folder, "-q", status=1)
    assert "tokens exceed n_positions 64" in err
    out, _ = main(capfd, long, "-m", folder, "-n", "3", "--context-overflow", "slide", "--json")
    assert len(json.loads(out)["token_ids"]) == 3


def test_json_can_be_parsed_back(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = main(
        capfd, PROMPT, "-m", folder, "-n", "4", "--json", "--logprobs", "2", "--seed", "7",
        "-t", "0.5", "--num-return-sequences", "2", "--stop", "zzz",
    )  # fmt: skip
    lines = [json.loads(line) for line in out.splitlines()]
    assert len(lines) == 2
    for found in lines:
        assert found["model"] == str(folder)
        assert found["prompt"] == PROMPT
        assert found["prompt_token_ids"] == TOKENIZER.encode(PROMPT)
        assert found["text"] == TOKENIZER.decode(found["token_ids"])
        assert found["finish_reason"] == "length"
        assert found["usage"] == {"prompt_tokens": 4, "completion_tokens": 4}
        assert found["settings"]["seed"] == 7
        assert found["settings"]["temperature"] == 0.5
        assert found["settings"]["do_sample"] is True
        assert found["settings"]["stop"] == ["zzz"]
        assert set(found["timing_s"]) == {"load", "first_token", "generate"}
        assert [entry["token_id"] for entry in found["logprobs"]] == found["token_ids"]
        assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in found["logprobs"])


def test_several_texts_are_separated(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("-m", folder, "-n", "5", "-t", "1", "--seed", "3", "--num-return-sequences", "3")
    out, _ = main(capfd, "Hi", *options)
    texts = out.split("\n---\n")
    assert len(texts) == 3
    assert all(text.startswith("Hi") for text in texts)
    parsed, _ = main(capfd, "Hi", *options, "--json")
    expected = ["Hi" + json.loads(line)["text"].rstrip("\n") for line in parsed.splitlines()]
    assert [text.rstrip("\n") for text in texts] == expected


def test_beams(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = GPT2.from_pretrained(folder)
    ids = TOKENIZER.encode("Hi")
    best = model.generate(
        torch.tensor([ids]), max_new_tokens=6, num_beams=3, num_return_sequences=2
    )
    out, _ = main(
        capfd, "Hi", "-m", folder, "-n", "6", "--num-beams", "3", "--num-return-sequences", "2",
        "--json", "--logprobs", "0",
    )  # fmt: skip
    found = [json.loads(line) for line in out.splitlines()]
    assert [line["token_ids"] for line in found] == best[:, len(ids) :].tolist()


def test_any_sampling_flag_samples_and_zero_is_greedy(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    greedy = greedy_text(folder, "Hi", 6).rstrip("\n")
    for flags in ((), ("-t", "0"), ("--top-k", "1"), ("--top-p", "0"), ("-t", "1e-40")):
        assert main(capfd, "Hi", "-m", folder, "-n", "6", "-q", *flags)[0] == f"Hi{greedy}\n", flags


def test_the_seed_is_the_peers(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = GPT2.from_pretrained(folder)
    ids = TOKENIZER.encode("Hi")
    torch.manual_seed(11)
    expected = model.generate(
        torch.tensor([ids]), max_new_tokens=6, do_sample=True, temperature=2.0
    )
    out, _ = main(capfd, "Hi", "-m", folder, "-n", "6", "-t", "2", "--seed", "11", "--json")
    assert json.loads(out)["token_ids"] == expected[0, len(ids) :].tolist()


def test_zero_is_a_seed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runs = [main(capfd, "Hi", "-m", folder, "-n", "6", "-t", "2", "--seed", "0") for _ in "ab"]
    assert runs[0] == runs[1]
    assert "seed" not in runs[0][1]  # it was not drawn


def test_a_drawn_seed_is_shown_and_repeats_the_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, err = main(capfd, "Hi", "-m", folder, "-n", "6", "-t", "2")
    seed = err.split("seed ")[1].split()[0]
    assert main(capfd, "Hi", "-m", folder, "-n", "6", "-t", "2", "--seed", seed)[0] == out


def test_a38_an_empty_prompt_and_a_newline(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, err = main(capfd, "--prompt", "", "-m", folder, "-n", "3")
    assert "starting from <|endoftext|>" in err
    assert "<|endoftext|>" not in out
    parsed, _ = main(capfd, "\n", "-m", folder, "-n", "1", "--json")
    assert json.loads(parsed)["prompt_token_ids"] == [198]
    assert run("-m", folder, "-n", "2", stdin=b"").returncode == 0


def test_a_space_at_the_end_gets_a_hint(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "ends in a space" in main(capfd, "Hi ", "-m", folder, "-n", "1")[1]
    assert main(capfd, "Hi ", "-m", folder, "-n", "1", "-q")[1] == ""


def test_a13_end_of_text_in_the_prompt(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompt = "a<|endoftext|>b"
    for flags, ids in (
        ((), [64, 50256, 65]),
        (("--plain-special",), [64, 27, 91, 437, 1659, 5239, 91, 29, 65]),
    ):
        out, _ = main(capfd, prompt, "-m", folder, "-n", "1", "--json", *flags)
        assert json.loads(out)["prompt_token_ids"] == ids
        assert json.loads(out)["prompt"] == prompt


def test_a14_bytes_that_are_no_utf8(folder: Path, tmp_path: Path) -> None:
    by_argument = run(os.fsdecode(b"caf\xe9"), "-m", folder, "-n", "1", "--no-stream")
    assert by_argument.returncode == 0, by_argument.stderr
    assert by_argument.stdout.decode().startswith("caf�")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert run("-f", tmp_path / "latin", "-m", folder, "-n", "1").stdout == by_argument.stdout


def test_a19_an_ascii_terminal_never_crashes(folder: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run("\U0001f44d é", "-m", folder, "-n", "3", **plain)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    latin = run("\U0001f44d é", "-m", folder, "-n", "3", PYTHONIOENCODING="latin-1")
    assert latin.returncode == 0
    assert b"\\U0001f44d" in latin.stdout


def test_color(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = main(capfd, "Hi", "-m", folder, "-n", "2", "--color", "always")
    assert out.startswith("\x1b[1mHi\x1b[0m")
    for color in ("never", "auto"):
        assert "\x1b" not in main(capfd, "Hi", "-m", folder, "-n", "2", "--color", color)[0]


@pytest.mark.parametrize(
    ("extra", "bold"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_color_on_a_terminal(extra: dict[str, str], bold: bool, folder: Path) -> None:
    controller, terminal = pty.openpty()
    subprocess.run(
        [sys.executable, "-m", "minigpt2.generate", "Hi", "-m", str(folder), "-n", "1"],
        stdout=terminal, stderr=subprocess.DEVNULL, env=environment(**({"TERM": "xterm"} | extra)),
        timeout=60, check=True,
    )  # fmt: skip
    os.close(terminal)
    assert (b"\x1b[1m" in os.read(controller, 4096)) is bold
    os.close(controller)


def test_statistics_on_request(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, err = main(capfd, "Hi", "-m", folder, "-n", "4", "-v", "-t", "1", "--seed", "5")
    assert f"{folder}, cpu, float32, 1 prompt tokens, 4 tokens, " in err
    assert err.endswith("tok/s, seed 5, length\n")


@contextlib.contextmanager
def start(*arguments: str | Path, module: str = "generate") -> Iterator[subprocess.Popen[bytes]]:
    """A running command line that takes SIGINT, even where these tests run with it ignored."""
    command = [sys.executable, "-u", "-m", f"minigpt2.{module}", *map(str, arguments)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def test_a_reader_that_goes_away_ends_it_silently_with_141(folder: Path) -> None:
    arguments = ("Hi", "-m", folder, "-n", "5000", "--context-overflow", "slide", "--ignore-eos")
    with start(*arguments) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert len(running.stdout.read(10)) == 10  # as head -c 10 does
        running.stdout.close()
        assert running.wait(timeout=60) == 141
        assert running.stderr.read() == b""


def test_ctrl_c_keeps_the_text_so_far_and_exits_130(folder: Path) -> None:
    arguments = ("Hi", "-m", folder, "-n", "100000", "--context-overflow", "slide", "--ignore-eos")
    with start(*arguments) as running:
        assert running.stdout is not None
        assert running.stdout.read(10).startswith(b"Hi")
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
        assert running.returncode == 130
    assert b"Traceback" not in err
    assert out.endswith(b"\n")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see the import")
@pytest.mark.parametrize("module", ["generate", "explain"])
def test_ctrl_c_while_torch_is_imported(module: str, folder: Path) -> None:
    with start("Hi", "-m", folder, module=module) as running:
        maps = Path(f"/proc/{running.pid}/maps")
        while "libtorch_cpu" not in maps.read_text():
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
        assert (running.returncode, out, err) == (130, b"", b"")


def test_ctrl_c_after_three_tokens(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def three(*args: object, **options: object) -> object:
        for count, step in enumerate(decode(*args, **options)):  # type: ignore[arg-type]
            if count == 3:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr("minigpt2.streaming.decode", three)
    out, _ = main(capfd, "Hi", "-m", folder, "-n", "50", "--json", status=130)
    found = json.loads(out)
    assert len(found["token_ids"]) == 3
    assert found["finish_reason"] == "interrupted"
    out, _ = main(capfd, "Hi", "-m", folder, "-n", "50", status=130)
    assert out == "Hi" + found["text"].rstrip("\n") + "\n"


def test_an_emoji_across_tokens_comes_whole(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [50169, 235, 8582, 237, 121]
    script = iter(ids)

    def scripted(_scores: torch.Tensor, *_rest: object) -> torch.Tensor:
        return torch.tensor([next(script)])

    monkeypatch.setattr("minigpt2.decoding.pick", scripted)
    out, _ = main(capfd, "Hi", "-m", folder, "-n", "5")
    assert out == "Hi \U0001f44d\U0001f3fd\n"


def test_version_and_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(capfd, "--version")[0].startswith("minigpt2 0.")
    out, _ = main(capfd, "--help")
    assert "hidden top_k of 50" in out
    assert "repetition penalty, temperature, top-k, top-p" in " ".join(out.split())


def shell(folder: Path, redirections: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run with streams closed or redirected by a shell."""
    line = f'exec "{sys.executable}" -m minigpt2.generate "$@" {redirections}'
    return subprocess.run(
        ["sh", "-c", line, "sh", "-m", str(folder), "-n", "3", *arguments],
        capture_output=True, env=environment(), timeout=60, check=False,
    )  # fmt: skip


def test_closed_streams(folder: Path) -> None:
    text = shell(folder, "", "Hi", "-q").stdout
    without_stderr = shell(folder, "2>&-", "Hi ", "-t", "1", "--json")
    assert without_stderr.returncode == 0
    assert json.loads(without_stderr.stdout)["prompt"] == "Hi "  # no note strays into the output
    assert shell(folder, ">&-", "Hi").returncode == 0
    assert shell(folder, "<&-").returncode == 0  # an empty prompt
    assert shell(folder, "2>/dev/full", "Hi").stdout == text


def test_a_full_disk_is_one_line(folder: Path) -> None:
    done = shell(folder, ">/dev/full", "Hi")
    assert done.returncode == 1
    assert done.stderr.startswith(b"minigpt2.generate: error: ")
    assert b"No space" in done.stderr
    assert b"Traceback" not in done.stderr


def test_nothing_is_printed_before_a_failure_is_known(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, err = main(
        capfd, "Hi", "-m", folder, "-n", "9999", "--context-overflow", "error", status=1
    )
    assert out == ""
    assert "exceed n_positions 64" in err


def test_an_interrupt_before_the_first_token(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("minigpt2.beam._search", interrupted)
    out, _ = main(capfd, "Hi", "-m", folder, "--num-beams", "2", "--json", status=130)
    assert json.loads(out)["finish_reason"] == "interrupted"


def test_an_interrupt_gives_out_what_was_held_back(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = iter([13, 198, 198])

    def scripted(_scores: torch.Tensor, *_rest: object) -> torch.Tensor:
        try:
            return torch.tensor([next(ids)])
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("minigpt2.decoding.pick", scripted)
    out, _ = main(capfd, "Hi", "-m", folder, "--stop", ".\n\nXYZ", "--json", status=130)
    assert json.loads(out)["text"] == ".\n\n"


def test_a_revision_is_the_hubs_alone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for model in (str(folder), "tales"):
        _, err = main(capfd, "Hi", "-m", model, "--revision", "xyz", status=1)
        assert "has no revisions, got xyz" in err


def test_an_argument_in_a_locale_of_bytes_is_what_it_was(folder: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run("\u00e9", "-m", folder, "-n", "1", "--json", **plain)
    assert json.loads(done.stdout)["prompt_token_ids"] == [2634]


def test_scores_that_are_no_numbers_are_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = harsh_model(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64))
    with torch.no_grad():
        broken.ln_f.bias.fill_(torch.inf)
    broken.save_pretrained(tmp_path)
    for more in ((), ("-t", "1"), ("--num-beams", "2")):
        out, err = main(capfd, "Hi", "-m", tmp_path, *more, status=1)
        assert out == ""
        assert "not numbers: try it in float32" in err


def test_a_vocabulary_with_gaps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    harsh_model(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64)).save_pretrained(
        tmp_path
    )
    vocab = {TOKENIZER_CHARACTERS[n]: n for n in range(256)} | {"<|endoftext|>": 50256}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    out, _ = main(capfd, "Hi", "-m", tmp_path, "-n", "20", "--ignore-eos", "-q", "--json")
    assert all(token_id < 256 or token_id == 50256 for token_id in json.loads(out)["token_ids"])
