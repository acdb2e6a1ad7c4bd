"""The API's description as one page: no script, nothing loaded from elsewhere, as a device may have no internet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1c2733;background:#fff}
h1{font-size:1.6rem}h2{margin-top:2.5rem;border-bottom:1px solid #ccd3da}
details{border:1px solid #dde3e9;border-radius:6px;margin:.5rem 0;padding:.4rem .8rem}
summary{cursor:pointer}code,pre{font:13px/1.45 ui-monospace,monospace}b{font:600 13px ui-monospace,monospace}
pre{background:#f5f7f9;padding:.6rem;overflow:auto}table{border-collapse:collapse;width:100%}
td{border-top:1px solid #e7ecf0;padding:.25rem .6rem .25rem 0;vertical-align:top}
@media(prefers-color-scheme:dark){body{color:#dfe6ec;background:#12181e}pre{background:#1b242c}
details{border-color:#2b3741}td,h2{border-color:#2b3741}a{color:#8ab8ff}}
"""


def render(described: Mapping[str, Any]) -> str:
    """Return the page, in HTML."""
    info = described["info"]
    sections: dict[str, list[str]] = {}
    for path, page in described["paths"].items():
        for method, operation in page.items():
            sections.setdefault(operation["tags"][0], []).append(_operation(path, method, operation))
    body = [f"<h1>{escape(info['title'])}</h1>", f"<p>{escape(info['description'])}</p>"]
    body.append(
        f"<p>Version {escape(info['version'])}. <a href='openapi.json'>openapi.json</a> is the same for programs: "
        "Swagger UI, Postman and generators of clients read it.</p>"
    )
    for tag, operations in sections.items():
        body += [f"<h2>{escape(tag)}</h2>", *operations]
    body.append("<h2>Bodies</h2>")
    body += [_schema(name, schema) for name, schema in described["components"]["schemas"].items()]
    head = (
        f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escape(info['title'])}</title>"
    )
    return f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(p['name'])}</code><td>{p['in']}, {p['schema']['type']}"
        f"<td>{escape(p.get('description', ''))}</tr>"
        for p in operation.get("parameters", ())
    )
    takes = operation.get("requestBody")
    name = takes["content"]["application/json"]["schema"].get("$ref", "").rpartition("/")[2] if takes else ""
    body = f"<p>Body: <a href='#{escape(name)}'>{escape(name)}</a></p>" if name else ""
    replies = "".join(
        f"<tr><td>{status}<td>{escape(told['description'])}</tr>" for status, told in operation["responses"].items()
    )
    key = "" if "security" in operation else " (no key needed)"
    return (
        f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> {escape(operation['summary'])}{key}"
        f"</summary>{body}<table>{rows}</table><table>{replies}</table></details>"
    )


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    shown = escape(json.dumps(schema, indent=1))
    return f"<details id='{escape(name)}'><summary><code>{escape(name)}</code></summary><pre>{shown}</pre></details>"
