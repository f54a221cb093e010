"""Headless Chromium through chromedriver's own HTTP interface (W3C WebDriver): no client library.

Debian's packages are chromium and chromium-driver.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, fixed by the standard
KEYS = {"left": "\ue012", "up": "\ue013", "right": "\ue014", "down": "\ue015", "tab": "\ue004"}


def missing() -> str | None:
    """What this machine lacks, or None."""
    absent = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    return f"not installed: {', '.join(absent)}" if absent else None


class Browser(contextlib.AbstractContextManager["Browser"]):
    """One Chromium with a profile of its own; as a context manager it leaves nothing behind."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._driver.stdout
        started = (re.search(r"on port (\d+)\.", line) for line in self._driver.stdout)
        port = next(found[1] for found in started if found)
        self._base = f"http://127.0.0.1:{port}/session"
        options = {
            "args": [*FLAGS, f"--user-data-dir={self._folder.name}"],
            "perfLoggingPrefs": {"enableNetwork": True},
        }
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": logs}
        session = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._base += f"/{session['sessionId']}"

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._call("DELETE", "")
        self._driver.terminate()
        self._driver.wait()
        assert self._driver.stdout
        self._driver.stdout.close()
        self._folder.cleanup()

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._base + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, file: Path) -> None:
        """Load a page from a file, and wait until it has run."""
        self._call("POST", "/url", {"url": file.absolute().as_uri()})

    def run(self, script: str, *args: Any) -> Any:
        """The value that JavaScript returns; its arguments are `arguments`."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def press(self, selector: str, *keys: str) -> None:
        """Type keys, named or literal, into an element."""
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        text = "".join(KEYS.get(key, key) for key in keys)
        self._call("POST", f"/element/{found[ELEMENT]}/value", {"text": text})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """New entries: kind "browser" for the console, "performance" for DevTools events."""
        entries: list[dict[str, Any]] = self._call("POST", "/se/log", {"type": kind})
        return entries

    def requests(self) -> list[str]:
        """The addresses asked for since the last call, without the browser's own pages."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        sent = [e["params"]["request"]["url"] for e in events if e["method"] == NETWORK_REQUEST]
        return [url for url in sent if not url.startswith(("chrome:", "data:"))]

    def devtools(self, command: str, **params: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def view(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """Set the window's size in CSS pixels, and the colour scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, whole: bool = False) -> bytes:
        """A PNG of the window, or of the whole page."""
        image = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(image["data"])


NETWORK_REQUEST = "Network.requestWillBeSent"
