"""nginx in front as it comes, HTTP/1.0 to the server, answers buffered unless that says otherwise; and over HTTP/2."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checking import Checks, Pieces, Server, finished

NGINX, CURL = os.environ["NGINX"], os.environ["CURL"]
FOUND = re.search(r"nginx/([\d.]+)", subprocess.run([NGINX, "-v"], capture_output=True, text=True, check=True).stderr)
checks = Checks((), {"nginx": FOUND[1] if FOUND else "of unknown version"})
CONFIGURATION = """\
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  upstream tier {{ server {address}; keepalive 4; }}
  server {{ listen 127.0.0.1:{plain}; location / {{ proxy_pass http://tier; }} }}
  server {{
    listen 127.0.0.1:{h2} http2;
    location / {{ proxy_pass http://tier; proxy_http_version 1.1; proxy_set_header connection ""; }}
  }}
}}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def front(server: Server) -> Iterator[tuple[str, str]]:
    """Run it before a server; yields its URL for HTTP/1.1, and that for HTTP/2."""
    folder = Path(server.folder) / "nginx"
    folder.mkdir(exist_ok=True)
    plain, h2 = free_port(), free_port()
    told = {"folder": folder, "address": server.url.partition("//")[2], "plain": plain, "h2": h2}
    (folder / "nginx.conf").write_text(CONFIGURATION.format(**told), encoding="utf-8")
    with (folder / "said.log").open("wb") as said:
        running = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=said)
    try:
        for port in (plain, h2):
            listens(port)
        yield f"http://127.0.0.1:{plain}", f"http://127.0.0.1:{h2}"
    finally:
        running.terminate()
        running.wait(20)


def listens(port: int) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError(f"nginx does not listen on port {port}")


def asked(server: Server, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Tell a story of the sea."}], "max_tokens": 40, "temperature": 0}
    return {"model": server.model, **body, **more}


@contextlib.contextmanager
def answered(server: Server, url: str, body: dict[str, Any], **more: str) -> Iterator[http.client.HTTPResponse]:
    """Ask through it, and leave whatever of the answer was not read."""
    lines = {"authorization": f"Bearer {server.key}", "content-type": "application/json", **more}
    asking = http.client.HTTPConnection(url.partition("//")[2], timeout=80)
    with contextlib.closing(asking):
        asking.request("POST", "/v1/chat/completions", json.dumps(body), lines)
        reply = asking.getresponse()
        assert reply.status == 200, reply.read(200)
        yield reply


def curl(server: Server, url: str, body: dict[str, Any], *options: str) -> str:
    lines = ["-H", f"authorization: Bearer {server.key}", "-H", "content-type: application/json"]
    where = f"{url}/v1/chat/completions"
    return finished([CURL, "-sS", "-f", "--max-time", "80", *options, *lines, "-d", json.dumps(body), where])


@checks.that("a chat, and its request id comes back")
def chat(server: Server) -> None:
    told = {"x-request-id": "through-nginx"}
    with front(server) as (url, _), answered(server, url, asked(server), **told) as reply:
        assert json.load(reply)["choices"][0]["message"]["content"]
        if server.ours:
            assert reply.headers["x-request-id"] == told["x-request-id"]


@checks.that("a stream arrives as it is made, with buffering on")
def streamed(server: Server) -> None:
    pieces = Pieces()
    with front(server) as (url, _), answered(server, url, asked(server, stream=True)) as reply:
        while line := reply.readline():
            pieces.add(line.decode() if line.startswith(b"data: {") else "")
    pieces.came_over_time()


@checks.that("HTTP/2: a chat, and a stream as it is made")
def http2(server: Server) -> None:
    with front(server) as (_, url):
        told = json.loads(curl(server, url, asked(server), "--http2-prior-knowledge"))
        assert told["usage"]["completion_tokens"] > 0
        events = curl(server, url, asked(server, stream=True), "--http2-prior-knowledge", "-N")
        assert events.rstrip().endswith("data: [DONE]")


@checks.that("a stream left in the middle, and the next chat is served")
def left(server: Server) -> None:
    with front(server) as (url, _):
        with answered(server, url, asked(server, stream=True, max_tokens=400)) as reply:
            assert reply.readline()
        told = json.loads(curl(server, url, asked(server, max_tokens=4)))
        assert told["choices"][0]["message"]["content"]


@checks.that("a body of a megabyte, and eight chats at once")
def large(server: Server) -> None:
    with front(server) as (url, _):
        with answered(server, url, asked(server, max_tokens=4, user="x" * 900_000)) as reply:
            assert reply.read()
        with ThreadPoolExecutor(8) as pool:
            replies = pool.map(lambda _: curl(server, url, asked(server, max_tokens=4)), range(8))
            assert all(json.loads(reply)["choices"] for reply in replies)


checks.run()
