"""One prompt's trace, and its terminal and JSON views. The page in a browser: test_explain_page."""

from __future__ import annotations

import html.parser
import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
from parity import hf_twin

from minigpt2 import GPT2, GPT2Config, Tokenizer, explain_html, explain_text, figures, ops
from minigpt2.explain import main
from minigpt2.trace import Trace, explain, logit_lens

TOKENIZER = Tokenizer.from_pretrained("gpt2")
CONFIG = GPT2Config(n_embd=48, n_layer=3, n_head=4, n_positions=128)
TEXT = "The cat sat on the"
MIXED = "日本のン 的 🙂 e\u0301\t\u05e9\u05dc\x00\u202e<b> " + "-" * 100
HOSTILE = [
    "</script><script>alert(1)</script>",
    '<script>alert("x")</script> &amp; \'"',
    '"><img src=x onerror=alert(1)>',
    "<!--<script>",
    "</script x",
    "<!-- <script x",
    "]]> \x00 \n \u2028\u2029 \u202e \u2019",
    "{{data}} {{policy}}",
]
SNAPSHOT = Path(__file__).parent / "snapshots" / "explain.txt"


@pytest.fixture(scope="module")
def model() -> GPT2:
    """Random, with attention that is not flat and logits that are apart."""
    torch.manual_seed(0)
    model = GPT2(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8) if parameter.dim() == 2 else parameter.add_(0.3)
    return model.eval()


@pytest.fixture(scope="module")
def trace(model: GPT2) -> Trace:
    return explain(model, TOKENIZER, TEXT, greedy_steps=4)


def run(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minigpt2.explain", *args],
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **env},
        check=False,
    )


@pytest.fixture(scope="module")
def folder(model: GPT2, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path)
    return str(path)


# ---- the trace ----


def test_tokens_carry_ids_pieces_and_bytes(trace: Trace) -> None:
    assert trace.token_ids == [464, 3797, 3332, 319, 262]
    assert trace.pieces == ["The", " cat", " sat", " on", " the"]
    assert b"".join(trace.token_bytes) == TEXT.encode()


def test_logits_are_the_models_own(model: GPT2, trace: Trace) -> None:
    twin = GPT2(CONFIG, ops.explicit).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(trace.logits, twin(torch.tensor([trace.token_ids]))[0])
    torch.testing.assert_close(trace.logits, model(torch.tensor([trace.token_ids]))[0])


def test_takes_one_pass_and_leaves_the_model_as_it_was(model: GPT2) -> None:
    calls: list[str] = []
    handle = model.register_forward_hook(lambda *_: calls.append("pass"))
    model.train()
    explain(model, TOKENIZER, TEXT)
    handle.remove()
    assert calls == ["pass"]
    assert model.training
    assert model.ops is ops.fused
    model.eval()


def test_a_failed_pass_leaves_the_model_as_it_was(model: GPT2) -> None:
    def fail(*_args: object) -> None:
        raise KeyboardInterrupt

    hook = model.h[0].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        explain(model, TOKENIZER, [1, 2])
    hook.remove()
    assert model.ops is ops.fused


def test_a_prompt_longer_than_the_window_is_refused(model: GPT2) -> None:
    with pytest.raises(ValueError, match="prompt's 129 tokens exceed n_positions 128"):
        explain(model, TOKENIZER, [1] * 129)


def test_scores_that_are_no_numbers_are_refused() -> None:
    broken = GPT2(CONFIG).eval()
    with torch.no_grad():
        broken.ln_f.bias.fill_(torch.inf)
    with pytest.raises(ValueError, match="not numbers: try it in float32"):
        explain(broken, TOKENIZER, [1, 2])


def test_the_lens_ends_in_the_logits(model: GPT2, trace: Trace) -> None:
    twin = GPT2(CONFIG, ops.explicit).eval()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(logit_lens(twin, trace.residual[-1:])[0], trace.logits)
    assert torch.equal(trace.lens_ids[-1], trace.logits.topk(5).indices)
    assert (trace.lens_ranks[-1] == 1).all()
    assert trace.residual.shape == (4, 5, 48)


def test_the_stream_grows_by_what_the_blocks_add(model: GPT2, trace: Trace) -> None:
    embedded = model.wte.weight[trace.token_ids] + model.wpe.weight[:5]
    torch.testing.assert_close(trace.residual[0], embedded)


def test_attention_rows_sum_to_one_and_see_no_future(trace: Trace) -> None:
    assert trace.attention.shape == (3, 4, 5, 5)
    torch.testing.assert_close(trace.attention.sum(dim=-1), torch.ones(3, 4, 5))
    assert not trace.attention.triu(diagonal=1).any()


def test_attention_and_stream_are_hugging_faces(model: GPT2, trace: Trace) -> None:
    twin = hf_twin(model)
    twin.set_attn_implementation("eager")
    ids = torch.tensor([trace.token_ids])
    with torch.no_grad():
        theirs = twin(ids, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(trace.attention, torch.cat(theirs.attentions))
    # Their last hidden state is ln_f's output; the stream before it is ours alone to show.
    streams = torch.cat(theirs.hidden_states[:-1])
    torch.testing.assert_close(trace.residual[:-1], streams, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(trace.logits, theirs.logits[0], atol=1e-4, rtol=1e-4)


def test_stages_tell_what_ran(trace: Trace) -> None:
    names = [stage.name for stage in trace.stages]
    block = ["ln_1", "attn.c_attn", "attn.weights", "attn.attention", "attn.c_proj"]
    block += ["ln_2", "mlp.c_fc", "mlp.activation", "mlp.c_proj"]
    blocks = [f"h.{layer}.{name}" for layer in range(3) for name in block]
    assert names == ["wte", "wpe", *blocks, "ln_f", "head"]
    by_name = {stage.name: stage for stage in trace.stages}
    assert by_name["h.1.attn.c_attn"].out_shape == (1, 5, 144)
    assert by_name["h.1.attn.weights"].out_shape == (1, 4, 5, 5)
    assert by_name["head"].out_shape == (1, 5, 50257)
    for name, source in (("h.1.mlp.c_fc", "self.c_fc(x, ops)"), ("head", "ops.unembedding")):
        assert source in by_name[name].line
    assert all(stage.norms.shape == (5,) for stage in trace.stages)
    torch.testing.assert_close(by_name["head"].norms, trace.logits.norm(dim=-1))


def test_parameters_add_up(model: GPT2, trace: Trace) -> None:
    total = sum(p.numel() for p in model.parameters())
    assert sum(row.total for row in figures.parameter_table(trace)) == total
    assert sum(stage.parameters for stage in trace.stages) == total
    assert figures.cache_bytes(trace) == 2 * 3 * 48 * 4


def test_parameters_of_the_124m_model_add_up() -> None:
    with torch.device("meta"):
        model = GPT2(GPT2Config())
    parameters = [(n, tuple(p.shape), p.numel()) for n, p in model.named_parameters()]
    rows = figures.parameter_table(_with(parameters=parameters))
    assert sum(row.total for row in rows) == 124_439_808
    matrices = sum(row.total for row in rows if row.name.startswith("h.") and len(row.shape) == 2)
    assert matrices == 12 * 12 * 768**2  # the articles' 84.9 million
    assert figures.cache_bytes(_with(config=GPT2Config())) == 73_728


def _with(**values: object) -> Trace:
    fields = dict.fromkeys(Trace.__dataclass_fields__) | {"dtype": "float32"} | values
    return Trace(**fields)  # type: ignore[arg-type]


def test_a_head_of_its_own_is_counted() -> None:
    torch.manual_seed(0)
    untied = GPT2(GPT2Config(n_embd=8, n_layer=1, n_head=1, tie_word_embeddings=False))
    trace = explain(untied, TOKENIZER, "x")
    assert trace.stages[-1].parameters == 50257 * 8
    total = sum(p.numel() for p in untied.parameters())
    assert sum(row.total for row in figures.parameter_table(trace)) == total


def test_the_path_is_greedy_generation(model: GPT2, trace: Trace) -> None:
    ids = model.generate(torch.tensor([trace.token_ids]), max_new_tokens=4)[0, 5:].tolist()
    assert [step.token_id for step in trace.path] == ids
    assert all(step.candidates[0][0] == step.token_id for step in trace.path)


def test_empty_prompt_is_end_of_text(model: GPT2) -> None:
    assert explain(model, TOKENIZER, "").token_ids == [50256]


def test_half_characters_show_their_bytes(model: GPT2) -> None:
    curly = explain(model, TOKENIZER, "\u2019")
    assert curly.token_ids == [447, 247]
    assert curly.pieces == ["\\xe2\\x80", "\\x99"]
    assert curly.token_bytes == [b"\xe2\x80", b"\x99"]


def test_bfloat16_is_traced_as_it_is_computed(model: GPT2) -> None:
    half = GPT2(CONFIG)
    half.load_state_dict(model.state_dict())
    trace = explain(half.bfloat16().eval(), TOKENIZER, TEXT)
    assert trace.dtype == "bfloat16"
    assert figures.cache_bytes(trace) == 2 * 3 * 48 * 2
    assert trace.logits.dtype == torch.float32


# ---- the figures ----


def test_next_token_figures(trace: Trace) -> None:
    answer = figures.next_token(trace, -1, 3)
    logits = trace.logits[-1].double()
    probs = logits.softmax(dim=-1)
    assert answer.best[0][0] == int(trace.logits[-1].argmax())
    assert answer.best[0][2] == pytest.approx(probs.max().item())
    assert answer.entropy_bits == pytest.approx(-(probs * probs.log2()).sum().item())
    assert answer.lowest == logits.min().item()
    ascending = probs.sort().values.cumsum(dim=-1)
    assert answer.nucleus == pytest.approx(int((ascending > 0.1).sum()), abs=1)


def test_sinks_and_the_largest_share_elsewhere(trace: Trace) -> None:
    rows = trace.attention[:, :, -1]
    for threshold in (0.1, 0.3, 0.5):
        expected = sum(bool(share > threshold) for share in rows[..., 0].flatten())
        assert figures.sinks(trace, -1, threshold) == expected
    assert figures.sinks(trace, 0) == 12  # the first position sees nothing else
    layer, head, token, share = figures.largest_elsewhere(trace) or (0, 0, 0, 0.0)
    assert share == rows[..., 1:].max().item() == rows[layer, head, token].item()
    assert figures.largest_elsewhere(trace, 0) is None


def test_what_followed(trace: Trace) -> None:
    token_id, rank, probability = figures.what_followed(trace, 1) or (0, 0, 0.0)
    order = trace.logits[1].argsort(descending=True).tolist()
    assert (token_id, rank) == (3332, order.index(3332) + 1)
    assert probability == pytest.approx(trace.logits[1].softmax(dim=-1)[3332].item(), rel=1e-5)
    assert figures.what_followed(trace, 4) is None


@pytest.mark.parametrize(
    ("length", "n", "kept"),
    [(3, 5, [0, 1, 2]), (9, 3, [0, 7, 8]), (9, 1, [0]), (4, 4, [0, 1, 2, 3])],
)
def test_window_keeps_the_first_and_the_last(length: int, n: int, kept: list[int]) -> None:
    assert figures.window(length, n) == kept


# ---- the terminal ----


def columns(line: str) -> int:
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in line)
    none = sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in line)
    return len(line) + wide - none


def test_terminal_snapshot(model: GPT2) -> None:
    """In float64, whose rounding shows in no printed digit on any machine."""
    double = GPT2(CONFIG)
    double.load_state_dict(model.state_dict())
    trace = explain(double.double().eval(), TOKENIZER, MIXED, greedy_steps=3)
    text = explain_text.render(trace, TOKENIZER, {"model": "random", "revision": None})
    assert text == SNAPSHOT.read_text(encoding="utf-8")


def test_terminal_lines_fit_80_columns(model: GPT2) -> None:
    for prompt in (MIXED, "のン" * 30 + "_" * 200, TEXT * 20):
        text = explain_text.render(explain(model, TOKENIZER, prompt), TOKENIZER, {}, bar="█")
        too_long = [line for line in text.splitlines() if columns(line) > 80]
        assert too_long == []
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)


def test_token_is_last_in_its_row(model: GPT2) -> None:
    text = explain_text.render(explain(model, TOKENIZER, MIXED), TOKENIZER, {})
    rows = [line for line in text.splitlines() if '"' in line]
    assert rows
    assert all(row.endswith('"') for row in rows)


@pytest.mark.parametrize("length", range(80))
def test_quoted_fits_its_room(length: int) -> None:
    for text in ("x" * length, "字" * length, "🙂x" * length):
        shown = explain_text.quoted(text, 30)
        assert columns(shown) <= 30
        assert shown.startswith('"')
        assert shown.endswith('"')
        assert (shown == f'"{text}"') == (columns(text) <= 28)


def test_terminal_has_colour_only_if_asked(trace: Trace) -> None:
    assert "\x1b" not in explain_text.render(trace, TOKENIZER, {})
    colored = explain_text.render(trace, TOKENIZER, {}, color=True)
    assert re.sub(r"\x1b\[\dm", "", colored) == explain_text.render(trace, TOKENIZER, {})
    assert colored.count("\x1b[0m") == len(re.findall(r"\x1b\[[12]m", colored)) > 5


# ---- JSON ----


def test_json_parses_back(model: GPT2) -> None:
    trace = explain(model, TOKENIZER, MIXED, greedy_steps=2)
    content = json.loads(json.dumps(figures.to_json(trace, TOKENIZER, {"model": "m"}, 500)))
    assert [token["id"] for token in content["tokens"]] == trace.token_ids
    assert bytes.fromhex("".join(t["bytes"] for t in content["tokens"])).decode() == MIXED
    attention = torch.tensor(content["attention"])
    torch.testing.assert_close(attention, trace.attention, atol=1e-6, rtol=0)
    assert content["parameters"]["total"] == sum(p.numel() for p in model.parameters())
    assert content["next_token"][-1]["best"][0]["id"] == int(trace.logits[-1].argmax())
    assert [step["id"] for step in content["path"]] == [step.token_id for step in trace.path]
    assert content["left_out"] == 0


def test_json_says_what_it_leaves_out(trace: Trace) -> None:
    content = figures.to_json(trace, TOKENIZER, {}, 3)
    assert content["positions"] == [0, 3, 4]
    assert content["left_out"] == 2
    assert torch.tensor(content["attention"]).shape == (3, 4, 3, 3)


# ---- the page, as text ----


class Parser(html.parser.HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))


def data_of(page: str) -> dict[str, object]:
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert not set("<>&") & set(text)  # nothing in there can be taken for a tag, by any parser
    content: dict[str, object] = json.loads(text)
    return content


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_adds_no_element(model: GPT2, trace: Trace, text: str) -> None:
    about = {"model": text, "command": text}
    page = explain_html.render(explain(model, TOKENIZER, text), TOKENIZER, about)
    plain = explain_html.render(trace, TOKENIZER, {"model": "m"})
    assert Parser(page).tags[2:] == Parser(plain).tags[2:]
    assert len(Parser(page).tags) == len(Parser(plain).tags)
    assert not re.search("[\u2028\u2029\u202e\x00]", page)
    assert data_of(page)["about"] == about
    assert '<meta charset="utf-8">' in page


def test_policy_allows_this_script_alone(trace: Trace) -> None:
    page = explain_html.render(trace, TOKENIZER, {"model": "m"})
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"https?://|src=|href=|@import|url\(", page)


def test_page_of_a_long_prompt_stays_below_5_mb(model: GPT2) -> None:
    long = explain(model, TOKENIZER, TEXT * 25)
    assert len(explain_html.render(long, TOKENIZER, {"model": "m"})) < 5e6
    for n_layer, n_head in ((12, 12), (48, 25)):
        shaped = _with(config=GPT2Config(n_layer=n_layer, n_head=n_head, n_embd=1600 * n_head))
        n = explain_html.fitting_tokens(shaped)
        assert n_layer * n_head * n * (n + 1) / 2 * 2 * 4 / 3 < 1.05e6
        assert explain_html.fitting_logits(shaped) * 50257 * 4 * 4 / 3 < 3e6


def test_page_keeps_as_much_as_asked(trace: Trace) -> None:
    page = explain_html.render(trace, TOKENIZER, {"model": "m"}, 3, 2)
    data = data_of(page)
    assert data["positions"] == [0, 3, 4]
    assert list(data["logits"]) == ["3", "4"]  # type: ignore[call-overload]


def test_page_is_replaced_in_one_step(trace: Trace, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("old")
    explain_html.write(file, trace, TOKENIZER, {"model": "m"})
    assert file.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


# ---- the command line ----


def test_command_prints_the_view(folder: str) -> None:
    done = run("-m", folder, TEXT, "-n", "2")
    assert (done.returncode, done.stderr) == (0, "")
    for title in ("Tokens", "Stages", "Parameters", "Next token", "Attention", "Logit lens"):
        assert f"\n{title}\n" in "\n" + done.stdout
    assert re.search(r"sha256: [0-9a-f]{64}\n", done.stdout)
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("args", "env", "colored"),
    [
        (["--color", "always"], {}, True),
        (["--color", "never"], {}, False),
        ([], {"NO_COLOR": ""}, False),
    ],
)
def test_command_honours_colour(
    folder: str, args: list[str], env: dict[str, str], colored: bool
) -> None:
    assert ("\x1b[1mTokens" in run("-m", folder, "x", *args, **env).stdout) == colored


def test_command_writes_page_and_json(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    done = run("-m", folder, "--html", str(file), "--json", "-f", str(tmp_path / "prompt"))
    assert done.returncode == 1
    assert done.stderr.startswith("minigpt2.explain: error: ")
    (tmp_path / "prompt").write_text(HOSTILE[0] + "\n")
    done = run("-m", folder, "--html", str(file), "--json", "-f", str(tmp_path / "prompt"))
    assert done.returncode == 0
    assert json.loads(done.stdout)["text"] == HOSTILE[0]
    assert data_of(file.read_text(encoding="utf-8"))["about"]["model"] == folder  # type: ignore[index]


@pytest.mark.parametrize(
    "args",
    [
        ["x", "--html", "/nonexistent/page.html"],
        ["x", "--html", "/"],
        ["x", "-n", "-1"],
        ["x", "--max-tokens-attention", "0"],
        ["x", "--max-tokens-logits", "0"],
        ["x", "-p", "y"],
        ["x", "--htm", "y"],
    ],
)
def test_wrong_usage_is_2_in_one_line(args: list[str]) -> None:
    done = run("-m", "tales", *args)
    assert done.returncode == 2
    assert re.fullmatch(r"minigpt2\.explain: error: .*\n", done.stderr)
    assert done.stdout == ""


def test_usage_is_checked_without_torch() -> None:
    code = "import sys, minigpt2.explain as e\ntry: e.main(['x', '-n', '-1'])\n"
    code += "finally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")


def test_failure_is_1_in_one_line(folder: str) -> None:
    for args in (["-m", "no/such/folder", "x"], ["-m", folder, "x " * 200]):
        done = run(*args)
        assert done.returncode == 1
        assert re.fullmatch(r"minigpt2\.explain: error: .*\n", done.stderr)


def test_a_reader_that_leaves_is_141(folder: str) -> None:
    command = [sys.executable, "-m", "minigpt2.explain", "-m", folder, "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_an_interrupt_is_130_and_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("minigpt2.explain.read_prompt", interrupted)
    assert main(["-m", "tales"]) == 130
    assert capsys.readouterr() == ("", "")


def test_an_ascii_terminal_shows_escapes(folder: str) -> None:
    done = run("-m", folder, "の 🙂", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "\\u306e" in done.stdout


def test_module_gives_the_api() -> None:
    from minigpt2 import explain as module

    assert module.explain is explain
    assert module.Trace is Trace
    with pytest.raises(AttributeError):
        _ = module.no_such_name
