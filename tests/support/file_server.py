"""A file server that can do what bad networks do: cut connections, forget ranges, change files, answer 5xx."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Served:
    """One file and its troubles; the lists are used up request by request.

    Attributes:
        cuts: after so many bytes of a body the connection is cut.
        statuses: answered instead of the file.
        gate: the body's second half waits for it.
    """

    body: bytes
    cuts: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    ranges: bool = True
    etag: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    redirect_to: str = ""
    gate: threading.Event | None = None


class FileServer:
    """Serves `files` by path; notes every request as (path, range header or nothing)."""

    def __init__(self) -> None:
        self.files: dict[str, Served] = {}
        self.requests: list[tuple[str, str]] = []
        self.halfway = threading.Event()
        self.url = ""

    def put(self, path: str, body: bytes, **troubles: object) -> Served:
        self.files[path] = Served(body, **troubles)  # type: ignore[arg-type]
        return self.files[path]


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: FileServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def do_GET(self) -> None:
        self.owner.requests.append((self.path, self.headers.get("range", "")))
        served = self.owner.files.get(self.path)
        if served is None or served.statuses:
            self._empty(404 if served is None else served.statuses.pop(0))
        elif served.redirect_to:
            self._empty(302, {"location": served.redirect_to, **served.headers})
        else:
            self._body(served)

    def _empty(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", "0")
        self.end_headers()

    def _body(self, served: Served) -> None:
        tag = '"' + hashlib.md5(served.body).hexdigest() + '"'  # noqa: S324 — an ETag
        wanted = self.headers.get("range", "")
        same = self.headers.get("if-range") in (None, tag)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and served.ranges and same else 0
        if start >= len(served.body) and start:
            self._empty(416)
            return
        body = served.body[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("content-range", f"bytes {start}-{len(served.body) - 1}/{len(served.body)}")
        if served.etag:
            self.send_header("etag", tag)
        for name, value in served.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if served.cuts:
            self.wfile.write(body[: served.cuts.pop(0)])
            self.close_connection = True
            return
        half = len(body) // 2
        self.wfile.write(body[:half])
        self.wfile.flush()
        self.owner.halfway.set()
        if served.gate is not None:
            served.gate.wait(20)
        try:
            self.wfile.write(body[half:])
        except OSError:  # the client was killed
            self.close_connection = True


@contextmanager
def file_server() -> Iterator[FileServer]:
    owner = FileServer()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": owner}))
    server.daemon_threads = True
    owner.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="file-server")
    thread.start()
    try:
        yield owner
    finally:
        for served in owner.files.values():
            if served.gate is not None:
                served.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
