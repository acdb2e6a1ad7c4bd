"""Finds faces in an image by an agent of this device: `python examples/faces.py PHOTO.jpg [--deadline-ms 200]`.

Start the agent first: `overspill models pull centerface --prepare`, `overspill edge run --config examples/faces.toml`.
The image goes as it is, as bytes; KServe V2's own clients can send the same (`tritonclient`).
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path

import httpx


def ask(url: str, image: bytes, headers: dict[str, str]) -> httpx.Response:
    """Send one image; the JSON part says how long the bytes behind it are."""
    element = struct.pack("<I", len(image)) + image
    tensor = {
        "name": "image",
        "datatype": "BYTES",
        "shape": [1, 1],
        "parameters": {"binary_data_size": len(element)},
    }
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"inference-header-content-length": str(len(head)), **headers}
    return httpx.post(f"{url}/v2/models/faces/infer", content=head + element, headers=headers, timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("image", type=Path, help="a photo: JPEG, PNG or WebP")
    parser.add_argument("--url", default="http://127.0.0.1:8600", help="of the agent (%(default)s)")
    parser.add_argument("--deadline-ms", type=float, help="refuse rather than answer later than this")
    given = parser.parse_args()
    headers = {} if given.deadline_ms is None else {"x-overspill-deadline-ms": f"{given.deadline_ms:g}"}
    try:
        reply = ask(given.url, given.image.read_bytes(), headers)
    except OSError as error:
        raise SystemExit(f"cannot read {given.image}: {error.strerror}") from None
    except httpx.TransportError as error:
        raise SystemExit(f"no agent answers at {given.url} ({error}); --url names another") from None
    if reply.status_code != 200:
        raise SystemExit(f"{reply.status_code}: {reply.json()['error']}")
    found = {output["name"]: output for output in reply.json()["outputs"]}
    told = reply.headers
    print(
        f"{told['x-overspill-model']} (degraded: {told['x-overspill-degraded']}), {reply.elapsed.total_seconds():.3f} s"
    )
    boxes, scores = found["boxes"]["data"], found["scores"]["data"]
    for index, score in enumerate(scores):
        left, top, right, bottom = boxes[4 * index : 4 * index + 4]
        print(f"face {index}: {score:.2f} at ({left:.0f}, {top:.0f}) to ({right:.0f}, {bottom:.0f})")


if __name__ == "__main__":
    main()
