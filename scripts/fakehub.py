"""As much of the Hub as a download needs, on this machine, in good and bad moods."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import threading
import time
from collections.abc import Iterator
from typing import ClassVar


class Hub(http.server.BaseHTTPRequestHandler):
    """Has someone/tiny and the official names, all with the same files."""

    files: ClassVar[dict[str, bytes]] = {}
    commit = "c" * 40
    requests: ClassVar[list[str]] = []
    headers_sent: ClassVar[dict[str, str]] = {}  # besides the usual ones, or in their place
    mood = "well"

    def answer(self) -> None:
        self.requests.append(f"{self.command} {self.path}")
        if "/resolve/" not in self.path:  # the client's own inquiries
            self.send_error(404)
            return
        _, owner, name, _, _revision, file = self.path.split("/")
        status, code = (int(self.mood), None) if self.mood.isdigit() else (200, None)
        if f"{owner}/{name}" != "someone/tiny" and not owner.startswith("openai"):
            status, code = 404, "RepoNotFound"
        elif status == 200 and file not in self.files:
            status, code = 404, "EntryNotFound"
        elif status == 401:
            code = "GatedRepo"
        body = self.files.get(file, b"") if status == 200 else b""
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        headers = {
            "X-Repo-Commit": self.commit,
            "ETag": f'"{hashlib.sha256(body).hexdigest()}"',
            "Content-Length": str(len(body)),
        }
        for header, value in (headers | self.headers_sent).items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.send_body(body)

    do_GET = do_HEAD = answer  # noqa: N815 (http.server's names)

    def send_body(self, body: bytes) -> None:
        with contextlib.suppress(OSError):  # a client that was killed
            if self.mood == "cut":  # less than was promised, and the connection closed
                self.wfile.write(body[: len(body) // 2])
            elif self.mood == "stalled":
                self.wfile.write(body[:100])
                self.wfile.flush()
                time.sleep(30)
            elif self.mood == "slow":
                for start in range(0, len(body), 4096):
                    self.wfile.write(body[start : start + 4096])
                    time.sleep(0.01)
            else:
                self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def serving(files: dict[str, bytes]) -> Iterator[str]:
    """Such a Hub with these files, in a good mood; its address."""
    Hub.files, Hub.requests, Hub.mood, Hub.commit = dict(files), [], "well", "c" * 40
    Hub.headers_sent = {}
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()
