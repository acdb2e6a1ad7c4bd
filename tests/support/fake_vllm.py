"""A small program that behaves like `vllm serve`, as far as the tier that starts it can tell; plain Python, no model.

It notes how it was started in `$FAKE_VLLM/started.jsonl`, writes lines as vLLM logs them, has a child of its own, wants
the key of `VLLM_API_KEY` below `/v1`, and answers a prompt with the numbers from 1 on. Files in that folder tell it
what to do: `fails` (exit with an error), `holds` (not ready while it is there), `slow` (a token each 50 ms).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(os.environ["FAKE_VLLM"])


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def log(level: str, text: str) -> None:
    sys.stdout.write(f"(APIServer pid={os.getpid()}) {level} 11-22 04:53:40 [fake.py:7] {text}\n")
    sys.stdout.flush()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def allowed(self) -> bool:
        if self.headers.get("authorization") == f"Bearer {os.environ['VLLM_API_KEY']}":
            return True
        self.answer(401, {"error": "Unauthorized"})
        return False

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(503 if (FOLDER / "holds").exists() else 200, "")
        elif self.path == "/metrics":
            self.answer(200, 'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n')
        elif self.path == "/v1/models" and self.allowed():
            card = {"id": flag("--served-model-name"), "owned_by": "vllm", "max_model_len": 512}
            self.answer(200, {"object": "list", "data": [card]})
        elif not self.path.startswith("/v1/"):
            self.answer(404, "Not Found")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.allowed():
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        tokens = asked.get("max_tokens") or 100
        for number in range(1, tokens + 1):
            self.event({"choices": [{"index": 0, "delta": {"content": f"{number} "}}]})
            if (FOLDER / "slow").exists():
                time.sleep(0.05)
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": tokens + 5}
        self.event({"choices": [], "usage": usage})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, tree: object) -> None:
        self.chunk(b"data: " + json.dumps(tree).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass


def main() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    told = {"pid": os.getpid(), "child": child.pid, "argv": sys.argv[1:], "env": dict(os.environ)}
    with (FOLDER / "started.jsonl").open("a") as file:
        file.write(json.dumps(told) + "\n")
    log("INFO", "starting")
    if (FOLDER / "fails").exists():
        sys.stderr.write("Traceback (most recent call last):\n  somewhere\nValueError: no such model\n")
        sys.stderr.flush()
        child.kill()
        sys.exit(1)

    def stop(*_: object) -> None:
        (FOLDER / "stopped").touch()
        child.kill()
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    Server((flag("--host"), int(flag("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
