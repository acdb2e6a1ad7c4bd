"""Random requests to a tier: half of them such as clients send, the others anything."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from benchmarks.tenants.surface import AWAY, EMBEDS, KEYS, MARKS, OPERATOR, PASSES, SECRET_MODEL
from router.tenants.keys_file import digest_of

_MODELS = ("tiny", SECRET_MODEL, AWAY, EMBEDS, PASSES, "none")
_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models"),
    *("/v1/files", "/v1/batches", "/v1/deferred", "/v1/usage", "/v1/status", "/v1/scale", "/v1/scale/tiny"),
    *("/tokenize", "/detokenize", "/v1/rerank", "/v1/score", "/v1/audio/transcriptions", "/rerank", "/score"),
    *("/v1/audio/speech", "/v1/audio/translations", "/v2/rerank"),
    *("/v2", "/v2/health/ready", "/v2/models/stats", "/v2/repository/index"),
    *(f"/v1/models/{model}" for model in _MODELS),
    *(f"/v2/models/{model}" for model in _MODELS),
    *(f"/v2/models/{model}/{end}" for model in _MODELS for end in ("infer", "generate", "generate_stream", "config")),
    *(f"/v2/models/{model}/{end}" for model in _MODELS for end in ("stats", "ready", "versions/1", "versions/2/infer")),
    *(f"/v2/repository/models/{model}/{end}" for model in _MODELS for end in ("load", "unload")),
    *("/metrics", "/health/ready", "/health", "/version", "/openapi.json", "/docs", "/ping", "/", "/v1"),
)
_HEADERS = (
    *("x-overspill-priority", "x-overspill-locality", "x-overspill-deadline-ms", "x-overspill-ttft-slo-ms"),
    *("x-overspill-session", "x-overspill-cache-salt", "x-overspill-cache", "x-overspill-instance"),
    *("x-overspill-demand", "x-overspill-hops", "x-overspill-defer", "x-overspill-shorten", "x-overspill-late-value"),
    *("x-overspill-min-quality", "x-overspill-attempts-left", "x-overspill-secret", "x-request-id"),
    *("x-stainless-retry-count", "idempotency-key", "client-cert", "x-forwarded-client-cert", "x-forwarded-for"),
    *("accept", "accept-encoding", "content-type", "content-length", "content-encoding", "origin", "cookie"),
    *("traceparent", "authorization", "x-api-key", "inference-header-content-length", "upgrade", "expect", "te"),
)
_VALUES = (
    *("", "0", "1", "-1", "hit", "local-only", "any", "allow", "gzip", "application/json", "*/*", "é", "x" * 300),
    *(
        "a b",
        "\t",
        "1e9",
        "multipart/form-data; boundary=b",
        "application/octet-stream",
        "application/openmetrics-text",
    ),
)
_METHODS = ("GET", "GET", "POST", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "BREW")
_QUERIES = (
    *("/", "?x=1", "%2e%2e/", "?since=2026-11-01", "?tenant=red", "/../metrics", ";a", "%00"),
    *(
        "?all=true",
        "?limit=1&after=batch_",
        "?limit=-1",
        "?order=up",
        "?purpose=batch_output",
        "?x-overspill-locality=any",
    ),
)
_PASSED = ("/v1/rerank", "/v1/score", "/v1/audio/speech", "/v1/audio/transcriptions")
_MOST_KNOWN = 40


@dataclass(frozen=True)
class Drawn:
    """A request.

    Attributes:
        who: a tenant's name, or nobody's.
    """

    who: str
    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def __str__(self) -> str:
        return f"{self.who or 'nobody'}: {self.method} {self.path} {self.headers} {self.body[:200]!r}"

    def says(self, text: str) -> bool:
        return text in self.path or text in repr(self.headers) or text in repr(self.body)


@dataclass
class Drawing:
    """Draws, and remembers which files, batches and deferred requests there are, so that others ask for them too."""

    draw: random.Random
    known: list[tuple[str, str]] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)

    def learn(self, who: str, names: list[str]) -> None:
        """A tenant was told of its own. Whose it is, is never forgotten: an operator acts on all, and owns none."""
        self.owners.update(dict.fromkeys(names, who))
        self.known += [(who, name) for name in names]
        self.known = self.known[-_MOST_KNOWN:]

    def owner(self, name: str) -> str | None:
        return self.owners.get(name)

    def request(self) -> Drawn:
        draw = self.draw
        who = draw.choice([*KEYS, *(name for name in KEYS if name != OPERATOR), "", "stranger"])
        headers = [*self._key(who), ("x-request-id", f"{MARKS.get(who, 'nobody')}-{draw.randrange(50)}")]
        kind = draw.random()
        if kind < 0.4:
            return self._asked(who, headers)
        if kind < 0.5:
            return self._job(who, headers)
        return self._anything(who, headers)

    def _key(self, who: str) -> list[tuple[str, str]]:
        if who in KEYS:
            return [("authorization", f"Bearer {KEYS[who]}")]
        if not who:
            return []
        red = KEYS["red"]
        wrong = self.draw.choice([red[:-1], f"{red}0", red.upper(), digest_of(red.encode()), "é"])
        return [("authorization", self.draw.choice(["Bearer ", "bearer  ", "Basic ", ""]) + wrong)]

    def _asked(self, who: str, headers: list[tuple[str, str]]) -> Drawn:
        """Something that a client would send."""
        draw, model = self.draw, self._model()
        path = draw.choice(
            [
                *("/v1/chat/completions", "/v1/chat/completions", "/v1/completions", "/v1/responses"),
                *_PASSED,
                *("/v1/embeddings", "/tokenize", "/detokenize", f"/v2/models/{model}/infer"),
                *(f"/v2/models/{model}/generate", f"/v2/models/{model}/generate_stream"),
            ]
        )
        if path in _PASSED:
            model = draw.choice([PASSES, PASSES, model])
        sound = path == "/v1/audio/transcriptions"
        headers.append(("content-type", "multipart/form-data; boundary=b" if sound else "application/json"))
        if model == AWAY or draw.random() < 0.1:  # nobody is there to answer: do not wait for it
            headers += [("x-overspill-ttft-slo-ms", "1"), ("x-overspill-defer", "allow")]
        return Drawn(who, "POST", path, _raw(headers), self._body(path, who, model))

    def _job(self, who: str, headers: list[tuple[str, str]]) -> Drawn:
        """Something about files, batches and deferred requests, one's own or another's."""
        draw, mark = self.draw, MARKS.get(who, "nobody")
        what = draw.randrange(4)
        if what == 0 or not self.known:
            line = {"custom_id": mark, "method": "POST", "url": "/v1/chat/completions"}
            chat = {"model": draw.choice(["tiny", EMBEDS, "none"]), "messages": [{"role": "user", "content": mark}]}
            text = json.dumps({**line, "body": chat} if draw.random() < 0.9 else line)
            form = '--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\ncontent-disposition: '
            form += f'form-data; name="file"; filename="{mark}.jsonl"\r\n\r\n{text}\r\n--b--\r\n'
            headers.append(("content-type", "multipart/form-data; boundary=b"))
            return Drawn(who, "POST", "/v1/files", _raw(headers), form.encode())
        name = draw.choice([name for _, name in self.known])
        if what == 1:
            asked = {"input_file_id": name, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            headers.append(("content-type", "application/json"))
            body = json.dumps({**asked, "metadata": {"who": mark}}).encode()
            return Drawn(who, "POST", "/v1/batches", _raw(headers), body)
        root = {"f": "files", "b": "batches", "d": "deferred"}[name[0]]
        end = draw.choice(["", "", "/content" if root == "files" else "/cancel"])
        method = draw.choice(["GET", "GET", "DELETE" if draw.random() < 0.3 else "POST"])
        return Drawn(who, method, f"/v1/{root}/{name}{end}", _raw(headers), b"")

    def _anything(self, who: str, headers: list[tuple[str, str]]) -> Drawn:
        draw, mark = self.draw, MARKS.get(who, "nobody")
        path = draw.choice([*_PATHS, *(f"/v1/decisions/{other}-{draw.randrange(50)}" for other in MARKS.values())])
        body = draw.choice([b"", b"{}", b"null", b"\xff" * 10, self._body(path, who, self._model()), b"[" * 500])
        if draw.random() < 0.3:
            path += draw.choice(_QUERIES)
        if draw.random() < 0.5:
            headers.append(("content-type", "application/json"))
        values = [*_VALUES, f"{KEYS['red']}x", mark]
        headers += [(draw.choice(_HEADERS), draw.choice(values)) for _ in range(draw.randrange(5))]
        return Drawn(who, draw.choice(_METHODS), path, _raw(headers), body)

    def _model(self) -> str:
        return self.draw.choice(["tiny", "tiny", "tiny", *_MODELS])

    def _body(self, path: str, who: str, model: str) -> bytes:
        mark = MARKS.get(who, "nobody")
        prompt = self.draw.choice([f"say {mark}", "say what others say", ""])
        if path.startswith("/v1/audio/t"):
            part = '--b\r\ncontent-disposition: form-data; name="{}"\r\n\r\n{}\r\n'
            return f"{part.format('model', model)}{part.format('file', mark)}--b--\r\n".encode()
        fields = self._of_a_task(path, prompt, mark)
        if path.startswith("/v2/models"):
            return json.dumps(fields).encode()
        return json.dumps({"model": model, **(fields or self._of_an_answer(path, prompt))}).encode()

    def _of_a_task(self, path: str, prompt: str, mark: str) -> dict[str, object]:
        """The fields of what asks for no answer in OpenAI's words, none of what does."""
        draw = self.draw
        tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [prompt]}
        kinds: dict[str, dict[str, object]] = {
            "/generate": {"text_input": prompt, "parameters": {"max_tokens": draw.choice([1, 8, "x"])}},
            "/v2/models": {"inputs": [tensor], "parameters": {"temperature": 0}},
            "/embeddings": {"input": draw.choice([prompt, [prompt, prompt], [1, 2], []])},
            "/detokenize": {"tokens": draw.choice([[1, 2], [-1], "x"])},
            "/tokenize": {"prompt": prompt},
            "/rerank": {"query": prompt, "documents": [prompt, mark]},
            "/score": {"text_1": prompt, "text_2": mark},
            "/speech": {"input": prompt},
        }
        return next((fields for part, fields in kinds.items() if part in path), {})

    def _of_an_answer(self, path: str, prompt: str) -> dict[str, object]:
        draw, responses = self.draw, "responses" in path
        body: dict[str, object] = {
            "temperature": draw.choice([0, 0, 1, "hot"]),
            "max_output_tokens" if responses else "max_tokens": draw.choice([1, 8, 8, -1]),
        }
        if draw.random() < 0.2:
            body["stream"] = True
        if draw.random() < 0.2 and not responses:
            body["n"] = draw.choice([1, 2, 3, 0, 10**9])
        if "chat" in path:
            return {**body, "messages": [{"role": "user", "content": prompt}]}
        return {**body, "input" if responses else "prompt": prompt}


def _raw(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
