"""The page in a real browser: what it shows, what it keeps, what it asks the network for."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
import torch
from torch import Tensor

from minigpt2 import GPT2, GPT2Config, Tokenizer, explain_html
from minigpt2.options import GenerationOptions
from minigpt2.sampling import pick, processors
from minigpt2.trace import Trace, explain

pytestmark = pytest.mark.skipif(
    browser.missing() is not None, reason=f"the page needs a browser; {browser.missing()}"
)

TOKENIZER = Tokenizer.from_pretrained("gpt2")
TEXT = "The cat sat on the mat\u2019s"
HOSTILE = (
    "</script x </script><script>document.title='run'</script> <b>\"'&amp; \x00\u2028\u202e\u2019"
)
SETTINGS = [
    (1, 0, 1),
    (0, 0, 1),
    (0, 5, 0.5),
    (0.1, 0, 1),
    (0.7, 0, 1),
    (2, 0, 1),
    (1, 1, 1),
    (1, 2, 1),
    (1, 40, 1),
    (1, 1000, 1),
    (1, 50257, 1),
    (1, 50256, 1),
    (1, 0, 0),
    (1, 0, 0.05),
    (1, 0, 0.5),
    (1, 0, 0.9),
    (1, 0, 0.95),
    (1, 0, 0.99),
    (0.8, 40, 0.95),
    (0.7, 50, 0.9),
    (1.5, 200, 0.5),
    (1.3, 0, 0.73),
    (0.35, 7, 0.999),
    (5, 0, 0.9),
    (10, 300, 0.25),
    (1e-31, 0, 0.9),
]


def random_model(config: GPT2Config) -> GPT2:
    torch.manual_seed(0)
    model = GPT2(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12) if parameter.dim() == 2 else parameter.add_(0.3)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> GPT2:
    return random_model(GPT2Config(n_embd=48, n_layer=3, n_head=4, n_positions=256))


@pytest.fixture(scope="module")
def trace(model: GPT2) -> Trace:
    return explain(model, TOKENIZER, TEXT, greedy_steps=3)


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    with browser.Browser() as opened:
        opened.view(1200, 900)
        yield opened


@pytest.fixture(scope="module")
def file(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    explain_html.write(path, trace, TOKENIZER, {"model": "tales", "command": "python"})
    return path


@pytest.fixture
def page(chromium: browser.Browser, file: Path) -> browser.Browser:
    """The page of TEXT, freshly opened, and then nothing wrong in it."""
    chromium.open(file)
    return chromium


@pytest.fixture(autouse=True)
def _silent(chromium: browser.Browser) -> Iterator[None]:
    """Whatever a test does: no message in the console, and no request but for the file itself."""
    chromium.log("browser")
    chromium.requests()
    yield
    assert chromium.log("browser") == []
    assert [url for url in chromium.requests() if not url.startswith("file:///")] == []


def texts(page: browser.Browser) -> dict[str, str]:
    """Each section's visible text and drawings, by its number."""
    script = """return Object.fromEntries([...document.querySelectorAll("section")].map((s, i) =>
        [i + 1, s.innerText + [...s.querySelectorAll("[aria-checked=true]")].map((b) => b.ariaLabel)
            + [...s.querySelectorAll("canvas[id]")].map((c) => c.toDataURL())]));"""
    found: dict[str, str] = page.run(script)
    return found


def set_input(page: browser.Browser, name: str, value: object) -> None:
    script = (
        "$(arguments[0]).value = arguments[1]; $(arguments[0]).dispatchEvent(new Event('input'))"
    )
    page.run(script, name, value)


def kept(logits: Tensor, temperature: float, top_k: int, top_p: float) -> list[int]:
    """The ids that minigpt2's own sampling leaves of (V,) logits."""
    options = GenerationOptions(
        do_sample=True, temperature=temperature, top_k=top_k, top_p=float(top_p)
    )
    scores = logits[None]
    for rule in processors(options, 1, None, []):
        scores = rule(torch.zeros(1, 1, dtype=torch.long), scores)
    if not options.samples:
        return pick(scores, False).tolist()
    return (scores[0] > -math.inf).nonzero()[:, 0].tolist()


FOUND = "return [[...found.order.subarray(found.start)].sort((a, b) => a - b), found.close];"
KEEP = "const logits = Float32Array.from(arguments[0]);"
KEEP += "const found = keep(logits, sorted(logits), ...arguments[1]);" + FOUND


# ---- it opens ----


def test_asks_for_nothing_but_itself(chromium: browser.Browser, file: Path) -> None:
    chromium.open(file)
    assert chromium.requests() == [file.as_uri()]
    assert chromium.run("return document.title") == "minigpt2 explain: tales"


def test_the_policy_blocks_everything_else(page: browser.Browser) -> None:
    """The page could not load or run anything foreign if it tried."""
    page.run("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))")
    page.run("""const s = document.createElement("script"); s.textContent = "window.foreign = 1";
        document.body.append(s)""")
    assert page.run("return window.foreign === undefined")
    blocked = [entry["message"] for entry in page.log("browser")]
    page.requests()  # the image was asked for, and refused
    assert len(blocked) == 2
    assert all("Content Security Policy" in message for message in blocked)


def test_every_section_says_something(page: browser.Browser) -> None:
    found = texts(page)
    assert list(found) == [str(n) for n in range(1, 9)]
    for n, words in {
        "1": ["␣cat", "id 3797", "20 63 61 74", "\\xe2\\x80", "e2 80"],
        "2": ["h.0.attn.c_attn", "(1, 9, 144)", "2,412,336", "model.py:"],
        "3": [
            "h.*.mlp.c_fc.weight",
            "48 \u00d7 192",
            "\u00d7 3",
            "2,509,536",
            "1,152 bytes a token",
        ],
        "4": ["50,257", "tokens kept", "--prompt="],
        "5": ["of 12 heads", "looks at"],
        "6": ["embedding", "h.2", "winner's rank"],
        "7": ["back", "step"],
        "8": ["tales", "python"],
    }.items():
        for word in words:
            assert word in found[n], (n, word)


def test_the_parameter_table_adds_up(page: browser.Browser, model: GPT2) -> None:
    script = """const n = (td) => Number(td.textContent.replace(/\\D/g, ""));
        return [[...$("parameters").rows].map((r) => [n(r.cells[2]), n(r.cells[3]), n(r.cells[4])]),
            n($("total").rows[0].cells[4])]"""
    rows, total = page.run(script)
    assert all(each * copies == together for each, copies, together in rows)
    assert sum(row[2] for row in rows) == total == sum(p.numel() for p in model.parameters())


def test_hostile_text_stays_text(
    chromium: browser.Browser, model: GPT2, tmp_path: Path, file: Path
) -> None:
    chromium.open(file)
    count = "return document.querySelectorAll('script, style, img, b').length"
    plain = chromium.run("return document.querySelectorAll('script, style').length")
    path = tmp_path / "page.html"
    about = {"model": HOSTILE, "command": HOSTILE}
    explain_html.write(path, explain(model, TOKENIZER, HOSTILE), TOKENIZER, about)
    chromium.open(path)
    assert chromium.run("return document.querySelectorAll('script, style').length") == plain
    assert chromium.run(count.replace(", b'", "'")) == plain
    assert chromium.run("return document.title").startswith(
        "minigpt2 explain: </script x </script>"
    )
    shown = chromium.run(
        "return [...document.querySelectorAll('#tokens .token')].map(t => t.textContent)"
    )
    assert "".join(shown).startswith("</script␣x␣</script><script>")
    assert {"\\x00", "\\xe2\\x80"} <= set(shown)
    everything = chromium.run("return $('tokens').textContent")
    assert not set("\x00\u2028\u202e") & set(everything)


def test_64_tokens_of_a_124m_model_load_in_2_seconds(
    chromium: browser.Browser, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = GPT2(GPT2Config())
    ids = TOKENIZER.encode(TEXT * 10)[:64]
    path = tmp_path / "page.html"
    explain_html.write(path, explain(model, TOKENIZER, ids), TOKENIZER, {"model": "random"})
    assert path.stat().st_size < 5e6
    started = time.perf_counter()
    chromium.open(path)
    assert time.perf_counter() - started < 2
    assert chromium.run("return [$('heads').children.length, N]") == [144, 64]


# ---- sampling ----


@pytest.mark.parametrize("setting", SETTINGS)
def test_sliders_keep_what_sampling_keeps(
    page: browser.Browser, trace: Trace, setting: tuple[float, int, float]
) -> None:
    for name, value in zip(("temperature", "top-k", "top-p"), setting, strict=True):
        set_input(page, name, value)
    expected = kept(trace.logits[-1], *setting)
    assert page.run("return $('kept').textContent") == f"{len(expected):,}"
    ids, close = page.run("const found = state.lastKept;" + FOUND)
    assert ids == expected
    assert page.run("return $('close').hidden") != close


def test_sliders_move_the_numbers(page: browser.Browser) -> None:
    for name, at, value in (
        ("temperature", 0.5, "0.5"),
        ("top-p", 0.3, "0.3"),
        ("top-k", 50, "224"),
    ):
        set_input(page, f"{name}-range", at)
        assert page.run("return $(arguments[0]).value", name) == value
    assert page.run("return $('kept').textContent") != "50,257"
    assert page.run("return document.querySelectorAll('#best .cut').length") > 0
    set_input(page, "top-k", 3)
    assert float(page.run("return $('top-k-range').value")) == pytest.approx(10, abs=1)
    assert page.run("return $('kept').textContent") in ("1", "2", "3")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.02, 1, 5])
def test_keeps_as_sampling_does_on_random_logits(
    page: browser.Browser, seed: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3000, generator=generator) * spread
    if seed % 2:
        logits = (logits * 4 / spread).round() / 4 * spread  # many ties
    narrow = 0
    for setting in itertools.product((0.3, 1, 1.7), (0, 1, 10, 500), (0.0, 0.2, 0.9, 1.0)):
        ids, close = page.run(KEEP, logits.tolist(), setting)
        expected = kept(logits, *setting)
        narrow += close
        # Where float32 sums decide, the page says so, and is off by a token at most.
        assert len(ids) == len(expected) or (close and abs(len(ids) - len(expected)) == 1), setting
        if len(ids) == len(expected) and seed % 2 == 0:
            assert ids == expected, setting
        elif len(ids) == len(expected):  # which of equal tokens goes first is open in torch's sort
            assert torch.equal(logits[ids].sort().values, logits[expected].sort().values), setting
    assert narrow < 10


@pytest.mark.parametrize("p", [0.125, 0.25, 0.5, 0.625, 0.75, 0.875])
def test_boundary_of_exact_sums(page: browser.Browser, p: float) -> None:
    """Eight equal tokens: every sum is exact, and one that is 1 - p is dropped."""
    ids, close = page.run(KEEP, [0.5] * 8, (1, 0, p))
    assert len(ids) == len(kept(torch.full((8,), 0.5), 1, 0, p)) == 8 * p
    assert close


def test_scaling_can_make_ties(page: browser.Browser) -> None:
    """Two neighbours in float32 that a division sends to the same number: top-k keeps both."""
    low = torch.tensor(1.0)
    high = torch.nextafter(low, torch.tensor(2.0))
    for temperature in (1.1, 1.3, 1.7, 3.0):
        logits = torch.stack([high, low, torch.tensor(0.5), low, high])
        for k in (1, 2, 3):
            ids, _ = page.run(KEEP, logits.tolist(), (temperature, k, 1))
            assert ids == kept(logits, temperature, k, 1)


def test_mass_and_entropy(page: browser.Browser, trace: Trace) -> None:
    for name, value in (("temperature", 0.8), ("top-k", 30), ("top-p", 0.9)):
        set_input(page, name, value)
    probs = (trace.logits[-1].double() / 0.8).softmax(dim=-1)
    chosen = probs[kept(trace.logits[-1], 0.8, 30, 0.9)]
    mass, entropy = page.run("return [state.lastKept.mass, state.lastKept.entropy]")
    assert mass == pytest.approx(chosen.sum().item(), rel=1e-5)
    final = chosen / chosen.sum()
    assert entropy == pytest.approx(-(final * final.log2()).sum().item(), rel=1e-5)
    assert page.run("return $('entropy').textContent") == f"{entropy:.2f}"


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31 - 1, 2**32 + 7, 2**53 - 1])
@pytest.mark.parametrize("setting", [(1, 0, 1), (0.7, 40, 0.9), (2, 0, 0.95)])
def test_draws_the_token_that_torch_draws(
    page: browser.Browser, trace: Trace, seed: int, setting: tuple[float, int, float]
) -> None:
    for name, value in zip(
        ("temperature", "top-k", "top-p", "seed"), (*setting, seed), strict=True
    ):
        set_input(page, name, value)
    scores = trace.logits[-1:] / setting[0]
    forbidden = torch.ones_like(scores, dtype=torch.bool)
    forbidden[0, kept(trace.logits[-1], *setting)] = False
    generator = torch.Generator().manual_seed(seed)
    expected = int(pick(scores.masked_fill(forbidden, -math.inf), True, generator))
    text = page.run("return $('draw').textContent")
    assert f"Seed {seed} draws" in text
    assert f"(id {expected}," in text


def test_a_seed_draws_the_same_token_again(page: browser.Browser) -> None:
    before = page.run("return $('draw').textContent")
    page.run("$('another').click()")
    assert page.run("return $('seed').value") == "1"
    set_input(page, "seed", 0)
    assert page.run("return $('draw').textContent") == before
    set_input(page, "temperature", 0)
    assert page.run("return $('draw').textContent").startswith("Temperature 0 always takes")


@pytest.mark.parametrize("value", ["", "-1", "1e300", "0.5"])
def test_nonsense_in_a_field_is_harmless(page: browser.Browser, value: str) -> None:
    for name in ("temperature", "top-k", "top-p", "seed", "threshold"):
        set_input(page, name, value)
    assert int(page.run("return $('kept').textContent").replace(",", "")) >= 1


# ---- the command line it shows ----


def test_command_line_is_the_settings(page: browser.Browser) -> None:
    for name, value in (("temperature", 0.8), ("top-k", 30), ("top-p", 0.9), ("seed", 5)):
        set_input(page, name, value)
    page.run("choose(4)")
    command = "python -m minigpt2.generate -m tales --temperature 0.8 --top-k 30 --top-p 0.9"
    command += " --seed 5 -n 1 --prompt='The cat sat on the'"
    assert page.run("return $('command').textContent") == command
    set_input(page, "temperature", 0)
    assert "--temperature" not in page.run("return $('command').textContent")
    page.run("choose(6)")  # ends in half of the apostrophe
    assert page.run("return $('command').textContent").startswith("(no prompt gives exactly")


@pytest.mark.parametrize("text", ["it's", "a\nb", "\u202e'\\x", "tab\t", '$(x) `y` "z"', "-n 日本"])
def test_quoting_survives_a_shell(page: browser.Browser, text: str) -> None:
    import subprocess

    quoted = page.run("return quote(arguments[0])", text)
    assert "\u202e" not in quoted
    script = f"printf %s {quoted}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert done.stdout.decode() == text


# ---- the position, and what follows it ----


def test_choosing_a_token_changes_every_section(page: browser.Browser) -> None:
    before = texts(page)
    page.run("document.querySelectorAll('#tokens button')[2].click()")
    after = texts(page)
    assert [n for n in before if before[n] == after[n]] == ["8"]  # where it all comes from stays
    assert page.run("return $('chosen').textContent").startswith("position 2 of 8")
    assert "guess number" in after["7"]


def test_arrow_keys_choose_tokens(page: browser.Browser) -> None:
    page.press("#tokens [aria-checked=true]", "left", "left")
    assert page.run("return position()") == 6
    page.press("#tokens [aria-checked=true]", "right")
    assert page.run("return position()") == 7
    assert page.run("return document.activeElement.getAttribute('aria-checked')") == "true"
    assert page.run("return document.querySelectorAll('#tokens [tabindex=\"0\"]').length") == 1


def test_arrow_keys_choose_heads_and_stages(page: browser.Browser) -> None:
    page.run("$('heads').children[5].click()")
    page.press("#heads [aria-checked=true]", "down", "right")
    assert page.run("return [state.layer, state.head]") == [2, 2]
    page.press("#stages [aria-checked=true]", "right", "right")
    assert "ops.Explicit.layer_norm" in page.run("return $('stage').textContent")


def test_every_control_is_reached_by_tab(page: browser.Browser) -> None:
    page.run("document.querySelector('#before').focus()")
    seen = []
    for _ in range(40):
        page.press(":focus", "tab")
        seen.append(page.run("const e = document.activeElement; return e.id || e.parentElement.id"))
        if seen[-1] == "step":
            break
    wanted = ["tokens", "block", "stages", "temperature", "temperature-range", "top-k"]
    wanted += ["top-p", "seed", "another", "command", "key", "order", "hide", "threshold", "heads"]
    assert [name for name in wanted if name not in seen] == []


def test_controls_have_names(page: browser.Browser) -> None:
    """What a screen reader says for each control and drawing."""
    tree = page.devtools("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "radio", "slider", "spinbutton", "combobox", "checkbox", "image", "region"}
    relevant = [n for n in tree if n.get("role", {}).get("value") in roles and not n["ignored"]]
    nameless = [n for n in relevant if not n.get("name", {}).get("value")]
    assert len(relevant) > 50
    assert nameless == []


def test_attention_is_the_traces(page: browser.Browser, trace: Trace) -> None:
    script = "return arguments[0].map(([l, h, q, k]) => weight(l, h, q, k))"
    places = list(itertools.product(range(3), range(4), range(9), range(9)))
    shown = torch.tensor(page.run(script, places)).view(3, 4, 9, 9)
    torch.testing.assert_close(shown.float(), trace.attention, atol=1e-5, rtol=0)


def test_sinks_are_counted(page: browser.Browser, trace: Trace) -> None:
    for threshold in (0.05, 0.5, 0.9):
        set_input(page, "threshold", threshold)
        expected = int((trace.attention[:, :, -1, 0] > threshold).sum())
        assert page.run("return $('sinks').textContent").startswith(f"{expected} of 12 heads")
        assert page.run("return document.querySelectorAll('#heads .sink').length") == expected


def choose_option(page: browser.Browser, name: str, value: object) -> None:
    script = (
        "$(arguments[0]).value = arguments[1]; $(arguments[0]).dispatchEvent(new Event('change'))"
    )
    page.run(script, name, value)


def test_heads_sort_by_their_share_on_a_token(page: browser.Browser, trace: Trace) -> None:
    choose_option(page, "key", 1)
    choose_option(page, "order", "share")
    labels = page.run("return [...$('heads').children].map((b) => b.ariaLabel)")
    shares = trace.attention[:, :, -1, 1].flatten()
    layer, head = divmod(int(shares.argmax()), 4)
    assert labels[0].startswith(f"layer {layer} head {head}, ")
    found = [float(label.split()[4].rstrip("%").lstrip("<")) for label in labels]
    assert found == sorted(found, reverse=True)


def test_hiding_the_first_token_rescales(page: browser.Browser, trace: Trace) -> None:
    before = page.run("return [largest(0, 0), $('head').toDataURL()]")
    page.run("$('hide').click()")
    after = page.run("return [largest(0, 0), $('head').toDataURL()]")
    assert before[0] == pytest.approx(1)
    assert after[0] == pytest.approx(trace.attention[0, 0, :, 1:].max().item(), abs=1e-5)
    assert before[1] != after[1]


def test_the_lens_shows_the_models_answer_last(page: browser.Browser, trace: Trace) -> None:
    last = page.run("return [...$('lens').rows].at(-1).cells[9].title")
    probability, token_id = trace.logits[-1].softmax(dim=-1).max(dim=-1)
    assert last.startswith(TOKENIZER.piece(int(token_id)).replace(" ", "␣"))
    assert float(last.split()[-1].rstrip("%")) == pytest.approx(100 * probability.item(), abs=0.06)
    page.run("$('lens').rows[2].cells[1].click()")
    assert page.run("return position()") == 0


def test_steps_along_the_greedy_path(page: browser.Browser, trace: Trace) -> None:
    page.run("choose(0)")
    for expected in range(1, 9):
        page.run("$('step').click()")
        assert page.run("return state.at") == expected
    for step in trace.path:
        page.run("$('step').click()")
        shown = page.run("return [$('so-far').lastChild.textContent, $('candidates').rows.length]")
        assert shown == [TOKENIZER.piece(step.token_id), 5]
    assert page.run("return $('step').disabled")
    page.run("for (let i = 0; i < 11; i++) $('back').click()")
    assert page.run("return [state.at, $('back').disabled]") == [0, True]


def test_what_is_left_out_is_said(chromium: browser.Browser, trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    explain_html.write(path, trace, TOKENIZER, {"model": "m"}, 4, 2)
    chromium.open(path)
    assert chromium.run("return positions") == [0, 6, 7, 8]
    assert "5 tokens here took part" in chromium.run("return $('tokens').textContent")
    chromium.run("choose(1)")
    assert "last 2 positions only" in chromium.run("return $('partial').textContent")
    assert chromium.run("return [$('rules').disabled, $('best').rows.length]") == [True, 20]
    assert chromium.run("return [...$('looks').rows].at(-1).textContent").startswith("all others")
    chromium.run("choose(3)")
    assert chromium.run("return [$('rules').disabled, $('partial').hidden]") == [False, True]


# ---- how it looks ----


@pytest.mark.parametrize("width", [320, 390, 768, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_sticks_out(chromium: browser.Browser, file: Path, width: int, dark: bool) -> None:
    try:
        chromium.view(width, 800, dark, phone=width < 700)
        chromium.open(file)
        assert chromium.run("return document.documentElement.scrollWidth") <= width
        background = chromium.run("return getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(16, 21, 27)") == dark
    finally:
        chromium.view(1200, 900)


def test_text_has_contrast(page: browser.Browser) -> None:
    """Every colour of text against every ground it is used on: WCAG's 4.5 in both schemes."""
    script = """return arguments[0].map((n) => color(n))"""
    try:
        for dark in (False, True):
            page.view(1200, 900, dark)
            inks = page.run(script, ["ink", "soft", "mark", "accent"])
            grounds = page.run(script, ["card", "page", "tint"])
            for ink, ground in itertools.product(inks, grounds):
                assert contrast(ink, ground) >= 4.5, (dark, ink, ground)
            steps = "Array.from({length: 101}, (_, i) => shade(i / 100))"
            shades = page.run(f"return {steps}.map((c) => [c, inkOn(c)])")
            for ground, ink in shades:
                assert contrast(ink, "#" + bytes(ground).hex()) >= 4.5, (dark, ground)
            lightness = [luminance("#" + bytes(ground).hex()) for ground, _ in shades]
            assert lightness == sorted(lightness, reverse=not dark)  # readable without hue
    finally:
        page.view(1200, 900)


def luminance(color: str) -> float:
    digits = color[1:] if len(color) == 7 else "".join(2 * c for c in color[1:])
    parts = [byte / 255 for byte in bytes.fromhex(digits)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_cut_and_sink_are_told_without_colour(page: browser.Browser) -> None:
    set_input(page, "top-k", 2)
    rows: list[Any] = page.run("return [...$('best').rows].map((r) => r.innerText)")
    assert all(("cut" in row) == (rank >= 2) for rank, row in enumerate(rows))
    star = "return getComputedStyle(document.querySelector('#heads .sink b'), '::after').content"
    set_input(page, "threshold", 0)
    assert page.run(star) == '"*"'
