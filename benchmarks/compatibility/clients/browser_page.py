"""A web page in real Chromium, from another origin than the server's: chats and streams under CORS."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checking import Checks, Server

CHROMIUM = os.environ.get("CHROMIUM", "chromium")
VERSION = subprocess.run([CHROMIUM, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
PAGE = Path(__file__).with_name("browser_page.html").read_bytes()

checks = Checks((), {"chromium": VERSION})


def opened(server: Server, check: str) -> dict[str, Any]:
    """Open the page for one check, and return what it tells."""
    asked = {"url": server.url, "key": server.key, "model": server.model, "check": check}
    with _site(server.page_port) as (port, answers):
        url = f"http://127.0.0.1:{port}/#{urllib.parse.quote(json.dumps(asked))}"
        profile = tempfile.mkdtemp(dir=server.folder)
        argv = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        argv += ["--disable-background-networking", f"--user-data-dir={profile}", "--remote-debugging-port=0", url]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            try:
                told: dict[str, Any] = answers.get(timeout=70)
            finally:
                browser.terminate()
                browser.wait(20)
        shutil.rmtree(profile, ignore_errors=True)
    assert "error" not in told, told["error"]
    return told


@contextlib.contextmanager
def _site(port: int) -> Iterator[tuple[int, queue.Queue[dict[str, Any]]]]:
    answers: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(PAGE if self.path == "/" else b"")

        def do_POST(self) -> None:
            answers.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self._send(b"")

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        try:
            yield site.server_address[1], answers
        finally:
            site.shutdown()


@checks.that("GET with a key: a preflight, and the answer is readable")
def models(server: Server) -> None:
    told = opened(server, "models")
    assert told["status"] == 200, told["text"]
    assert server.model in told["text"]


@checks.that("a chat")
def chat(server: Server) -> None:
    told = opened(server, "chat")
    assert told["status"] == 200, told["text"]
    assert json.loads(told["text"])["choices"][0]["message"]["content"]


@checks.that("a streamed chat, piece by piece")
def stream(server: Server) -> None:
    told = opened(server, "stream")
    assert told["status"] == 200, told["text"]
    assert told["text"].rstrip().endswith("data: [DONE]")
    assert len(told["times"]) >= 4, told["times"]
    assert told["times"][-1] - told["times"][0] > 20, told["times"]


@checks.that("a stream left in the middle, and the next chat is served")
def leave(server: Server) -> None:
    assert opened(server, "leave")["status"] == 200


@checks.that("a refusal is readable by the page")
def refusal(server: Server) -> None:
    told = opened(server, "refusal")
    assert told["status"] == 400
    assert "temperature" in told["text"]


@checks.that("x-request-id is readable by the page")
def request_id(server: Server) -> None:
    assert opened(server, "chat")["id"]


checks.run()
