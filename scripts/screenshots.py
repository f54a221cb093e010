"""Render the explain page in headless Chromium, to look at and for the README.

    python scripts/screenshots.py                    # scripts/images/explain.png, the README's
    python scripts/screenshots.py --folder shots     # that, and whole pages: light, dark, phone

It needs Debian's packages chromium and chromium-driver.
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import browser

from minigpt2 import GPT2, Tokenizer, explain_html, hub
from minigpt2.trace import explain

PROMPT = "Once upon a time there was a king who had"
README = Path(__file__).parent / "images" / "explain.png"
WIDTH, HEIGHT = 1120, 900

# The README shows what no still text could: the sampling rules at work, and one head.
SETTINGS = """for (const [id, value] of [["temperature", 0.8], ["top-k", 200], ["top-p", 0.9]]) {
    document.getElementById(id).value = value;
    document.getElementById(id).dispatchEvent(new Event("input"));
}"""
CLIP = """const box = (n) => document.querySelectorAll("section")[n].getBoundingClientRect();
return [box(3).top + scrollY - 16, box(4).bottom + scrollY + 16]"""


def settle(page: browser.Browser) -> None:
    """Let a changed width or scheme be drawn."""
    page.run("return document.body.offsetHeight")
    time.sleep(0.5)


def readme_picture(page: browser.Browser, file: Path) -> None:
    page.view(WIDTH, HEIGHT)
    settle(page)
    page.run(SETTINGS)
    top, bottom = page.run(CLIP)
    clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top, "scale": 1}
    image = page.devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(base64.b64decode(image["data"]))


def whole_page(page: browser.Browser, file: Path, width: int, dark: bool, phone: bool) -> None:
    page.view(width, HEIGHT, dark, phone)
    settle(page)
    height = page.run("return document.documentElement.scrollHeight")
    page.view(width, height, dark, phone)  # as high as the page, so that nothing is left to scroll
    settle(page)
    file.write_bytes(page.screenshot())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", default="tales")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--folder", type=Path, help="write here, whole pages too")
    args = parser.parse_args(argv)
    folder = hub.find(args.model)
    model, tokenizer = GPT2.from_pretrained(folder), Tokenizer.from_pretrained(folder)
    trace = explain(model, tokenizer, args.prompt, greedy_steps=12)
    with tempfile.TemporaryDirectory() as temporary, browser.Browser() as page:
        file = Path(temporary) / "explain.html"
        explain_html.write(file, trace, tokenizer, {"model": args.model})
        page.open(file)
        readme_picture(page, args.folder / README.name if args.folder else README)
        if args.folder:
            page.open(file)
            whole_page(page, args.folder / "light.png", WIDTH, dark=False, phone=False)
            whole_page(page, args.folder / "dark.png", WIDTH, dark=True, phone=False)
            whole_page(page, args.folder / "phone.png", 390, dark=False, phone=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
