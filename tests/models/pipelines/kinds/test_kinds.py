"""Built-in stages: what each computes, beside a plain calculation of the same."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from models.pipelines.declared.contract import Array
from models.pipelines.kinds.centre_boxes import CentreBoxes
from models.pipelines.kinds.decode_image import DecodeImage
from models.pipelines.kinds.normalise import Normalise
from models.pipelines.kinds.pool import Pool
from models.pipelines.kinds.resize import Resize
from models.pipelines.kinds.suppression import Suppression
from models.pipelines.kinds.tokenize import Tokenize, _Tokenizer
from models.pipelines.kinds.top_k import TopK
from models.pipelines.kinds.unit import Unit
from router.base.errors import ArtifactError, ConfigError, ContextTooLong, InvalidRequest


def coded(pixels: Array, form: str, **more: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **more)
    return file.getvalue()


def image(*files: bytes) -> dict[str, Array]:
    array = np.empty((len(files), 1), object)
    array[:, 0] = files
    return {"image": array}


def picture(height: int = 6, width: int = 8) -> Array:
    return np.random.default_rng(7).integers(0, 256, (height, width, 3)).astype(np.uint8)


def test_images_are_decoded_whatever_their_form() -> None:
    pixels, decode = picture(), DecodeImage().open()
    found = decode(image(coded(pixels, "PNG"), coded(pixels, "WEBP", lossless=True), coded(pixels[..., 0], "PNG")))
    assert np.array_equal(found["pixels"][0], pixels)
    assert np.array_equal(found["pixels"][1], pixels)
    assert np.array_equal(found["pixels"][2], np.repeat(pixels[..., :1], 3, axis=2))  # grey
    turned = Image.Exif()
    turned[0x0112] = 6  # it was taken with the camera on its side
    upright = decode(image(coded(pixels, "PNG", exif=turned)))["pixels"][0]
    assert np.array_equal(upright, np.rot90(pixels, -1))


@pytest.mark.parametrize("file", [b"", b"nope", coded(picture(), "PNG")[:60], coded(picture(), "JPEG")[:200]])
def test_what_is_no_image_is_refused_by_name(file: bytes) -> None:
    with pytest.raises(InvalidRequest, match="`image`: ") as refused:
        DecodeImage().open()(image(file))
    assert refused.value.param == "image"


def test_what_is_a_program_and_no_picture_is_not_run() -> None:
    """Pillow hands PostScript to an interpreter, where one is installed."""
    page = io.BytesIO()
    Image.fromarray(picture()).save(page, "EPS")
    with pytest.raises(InvalidRequest, match="no image of a known format"):
        DecodeImage().open()(image(page.getvalue()))


def test_an_image_too_large_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(InvalidRequest, match="8 × 6 pixels"):
        DecodeImage(max_pixels=47).open()(image(coded(picture(), "PNG")))


def png_header(width: int, height: int) -> bytes:
    """A PNG of 75 bytes that says it has so many pixels."""
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    )
    written = (
        len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big") for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


@pytest.mark.parametrize("sides", [(8000, 8000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_refused_by_its_header(sides: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match=r"pixels.* 50000000 at most: shrink it"):
        DecodeImage().open()(image(png_header(*sides)))


def tiled(side: int) -> bytes:
    """A grey TIFF of 8 × 6 pixels in one tile of `side` × `side`, packed."""
    data = zlib.compress(bytes(side * side) if side < 100 else b"")
    short, long = 3, 4
    kinds = {256: long, 257: long, 322: long, 323: long, 324: long, 325: long}
    tags = {256: 8, 257: 6, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 134, 325: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, kinds.get(tag, short), 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


def test_a_tile_beyond_its_image_is_refused_by_its_header() -> None:
    """It is unpacked whole: 2 megabytes of zeros, packed, would take 2 gigabytes."""
    decode = DecodeImage().open()
    assert decode(image(tiled(16)))["pixels"][0].shape == (6, 8, 3)
    with pytest.raises(InvalidRequest, match="50000 × 50000 pixels"):
        decode(image(tiled(50_000)))


def test_a_jpeg_of_many_scans_is_refused() -> None:
    """Each takes thirty bytes, and as long as the whole image."""
    decode = DecodeImage().open()
    plain = coded(picture(64, 64), "JPEG", progressive=True)
    assert decode(image(plain))["pixels"][0].shape == (64, 64, 3)
    thumbnail = plain[:2] + b"\xff\xe1\x01\x92" + 200 * b"\xff\xda" + plain[2:] + 200 * b"\xff\xda"
    assert decode(image(thumbnail))["pixels"][0].shape == (64, 64, 3)
    last = plain[plain.rindex(b"\xff\xda") : -2]
    with pytest.raises(InvalidRequest, match="a JPEG of more than 100 scans"):
        decode(image(plain[:-2] + 100 * last + plain[-2:]))
    with pytest.raises(InvalidRequest, match="a JPEG of more than 100 scans"):  # a marker that has no length
        decode(image(plain[:-2] + 100 * (b"\xff\x01" + last) + plain[-2:]))


def test_a_header_that_takes_seconds_is_refused() -> None:
    """It is read in Python, piece by piece: sixteen megabytes took eight seconds of everybody's."""
    decode, many = DecodeImage().open(), 200_000
    jpeg, png, gif = (coded(picture(), form) for form in ("JPEG", "PNG", "GIF"))
    empty = bytes(4) + b"tEXt" + zlib.crc32(b"tEXt").to_bytes(4, "big")
    for flood in (
        jpeg[:2] + many * b"\xff\xfe\0\2" + jpeg[2:],
        jpeg[:2] + many * b"\xff" + jpeg[2:],
        png[:33] + many * empty + png[33:],
        gif[:-1].replace(b",", many * b"!\xfe\1a\0" + b",", 1) + b";",
        b"P6 #" + many * b" " + b"\n8 6 255\n" + bytes(8 * 6 * 3),
    ):
        with pytest.raises(InvalidRequest, match=r"a header of more than 100000 pieces"):
            decode(image(flood))
    large = np.random.default_rng(0).integers(0, 255, (1500, 1500, 3), np.uint8)
    assert decode(image(coded(large, "PNG")))["pixels"][0].shape == large.shape


def test_pictures_of_other_depths_and_colours_are_what_they_show() -> None:
    decode = DecodeImage().open()

    def decoded(file: bytes) -> Array:
        pixels = decode(image(file))["pixels"][0]
        assert pixels.dtype == np.uint8
        return pixels

    grey = np.arange(48, dtype=np.uint16).reshape(6, 8) * 1300
    for form in ("PNG", "TIFF"):
        assert np.array_equal(decoded(coded(grey, form))[..., 1], grey >> 8)
    assert decoded(b"P5 2 1 65535\n" + struct.pack(">2H", 256, 32768))[0, :, 0].tolist() == [1, 128]
    with pytest.raises(InvalidRequest, match="floats a pixel, whose white nobody knows"):
        decode(image(coded(np.zeros((4, 4), np.float32), "TIFF")))
    flat = np.full((16, 16, 3), (204, 51, 102), np.uint8)
    for mode, form in (("CMYK", "JPEG"), ("CMYK", "TIFF"), ("P", "PNG"), ("RGBA", "PNG"), ("YCbCr", "JPEG")):
        file = io.BytesIO()
        Image.fromarray(flat).convert(mode).save(file, form)
        assert np.abs(decoded(file.getvalue()).astype(int) - flat).max() < 16, (mode, form)
    for form in ("GIF", "PNG", "WEBP"):
        file = io.BytesIO()
        first, *others = (Image.fromarray(np.full_like(flat, shade)) for shade in (255, 0, 0))
        first.save(file, form, save_all=True, append_images=others)
        assert decoded(file.getvalue()).min() > 250, form


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_an_orientation_that_is_none_is_passed_over() -> None:
    for tags in (b"Exif\0\0garbage", b"Exif\0\0MM\0*\xff\xff\xff\xff"):
        assert DecodeImage().open()(image(coded(picture(), "JPEG", exif=tags)))["pixels"][0].shape == (6, 8, 3)


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from(["fit", "stretch", "crop"]))
def test_a_resized_image_tells_where_its_points_went(height: int, width: int, mode: Any) -> None:
    resize = Resize(24, 16, mode)
    found = resize.open()({"pixels": np.full((1, height, width, 3), 200, np.uint8)})
    resized, placed = found["resized"][0], found["placed"][0]
    assert resized.shape == (16, 24, 3)
    corners = np.array([[0, 0], [width, height]]) * placed[:2] + placed[2:]
    filled = (resized == 200).all(axis=2)
    if mode == "fit":  # black beyond the image, and nothing of it lost
        right, bottom = np.round(corners[1]).astype(int)
        assert filled[:bottom, :right].all()
        assert filled.sum() == bottom * right
    else:
        assert filled.all()
        assert (corners[0] <= 1e-3).all()
        assert (corners[1] >= np.array([24, 16]) - 1e-3).all()


def test_pixels_become_what_a_network_was_trained_on() -> None:
    pixels = picture()[None]
    found = Normalise(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), bgr=True).open()({"resized": pixels})["normalised"]
    plain = (pixels[..., ::-1] / 255 - np.array([0.5, 0.4, 0.3])) / np.array([0.2, 0.3, 0.4])
    assert found.dtype == np.float32
    assert np.abs(found - plain.transpose(0, 3, 1, 2)).max() < 1e-5


def test_a_face_is_where_its_map_says() -> None:
    """Heat at row 2, column 3: centre ((3 + 0.25 + 0.5) · 4, (2 + 0.5 + 0.5) · 4), 8 wide and 16 high."""
    heat, sizes = np.zeros((1, 1, 8, 8), np.float32), np.zeros((1, 2, 8, 8), np.float32)
    offsets, points = np.zeros((1, 2, 8, 8), np.float32), np.full((1, 10, 8, 8), 0.5, np.float32)
    heat[0, 0, 2, 3] = 0.9
    sizes[0, :, 2, 3] = np.log([4, 2])
    offsets[0, :, 2, 3] = 0.5, 0.25
    placed = np.array([[0.5, 0.5, 0, -1]], np.float32)  # half the size, and a row cut off above
    batch = {"heat": heat, "sizes": sizes, "offsets": offsets, "points": points, "placed": placed}
    found = CentreBoxes().open()(batch)
    assert found["scores"][0].tolist() == [np.float32(0.9)]
    left, top, right, bottom = 11, 4, 19, 20
    assert found["boxes"][0].tolist() == [[2 * left, 2 * (top + 1), 2 * right, 2 * (bottom + 1)]]
    assert found["landmarks"][0].tolist() == [[[30, 26]] * 5]
    nothing = CentreBoxes(above=0.95).open()(batch)
    assert [array[0].shape for array in nothing.values()] == [(0, 4), (0,), (0, 5, 2)]


def overlap(one: Array, other: Array) -> float:
    near, far = np.maximum(one[:2], other[:2]), np.minimum(one[2:], other[2:])
    shared = np.prod(np.maximum(far - near, 0))
    return float(shared / (np.prod(one[2:] - one[:2]) + np.prod(other[2:] - other[:2]) - shared))


@given(st.lists(st.tuples(*[st.integers(0, 20)] * 2, *[st.integers(1, 12)] * 2, st.integers(1, 100)), max_size=20))
def test_suppression_keeps_the_best_of_those_that_overlap(drawn: list[tuple[int, ...]]) -> None:
    boxes = np.array([[x, y, x + w, y + h] for x, y, w, h, _ in drawn], np.float32).reshape(-1, 4)
    scores = np.array([score / 100 for *_, score in drawn], np.float32)
    kind = Suppression(overlap=0.4, above=0.3, top=50)
    kept = kind.kept(boxes, scores)
    assert (scores[kept] > 0.3).all()
    assert sorted(scores[kept], reverse=True) == list(scores[kept])
    for at, first in enumerate(kept):
        assert all(overlap(boxes[first], boxes[other]) < 0.4 for other in kept[at + 1 :])
    for dropped in set(range(len(boxes))) - set(kept.tolist()):
        better = [best for best in kept if scores[best] >= scores[dropped]]
        covered = any(overlap(boxes[best], boxes[dropped]) >= 0.4 - 1e-6 for best in better)
        assert scores[dropped] <= np.float32(0.3) or covered
    found = kind.open()({"boxes": boxes[None], "scores": scores[None]})
    assert found["count"][0].tolist() == [len(kept)]
    assert Suppression(overlap=0.4, above=0.3, top=1).kept(boxes, scores).tolist() == kept[:1].tolist()


def test_the_likeliest_classes_by_name(tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("cat\ndog\nbird\n", encoding="utf-8")
    found = TopK(3, 2, str(labels)).open()({"logits": np.array([[0, 2, 1]], np.float32)})
    assert found["labels"].tolist() == [[b"dog", b"bird"]]
    raised = np.exp([2, 1]) / np.exp([0, 1, 2]).sum()
    assert np.abs(found["probabilities"] - raised).max() < 1e-6
    with pytest.raises(ConfigError, match="names 3 classes, the model has 4"):
        TopK(4, 2, str(labels)).open()
    with pytest.raises(ConfigError, match="No such file"):
        TopK(4, 2, str(tmp_path / "none")).open()


def test_vectors_of_tokens_become_one() -> None:
    hidden = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    mask = np.array([[1, 1]], np.int64)  # the model has padded further
    assert Pool(4).open()({"hidden": hidden, "attention_mask": mask})["pooled"].tolist() == [[2, 3, 4, 5]]
    first = Pool(4, "first").open()({"hidden": hidden, "attention_mask": mask})["pooled"]
    assert first.tolist() == [[0, 1, 2, 3]]
    lengths = np.linalg.norm(
        Unit(4).open()({"pooled": np.array([[3, 0, 4, 0], [0, 0, 0, 0]], np.float32)})["vector"], axis=1
    )
    assert lengths.tolist() == [1, 0]


def test_a_tokenizer_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match="not a tokenizer"):
        Tokenize(str(tmp_path / "tokenizer.json")).open()


@pytest.mark.real_model
def test_texts_become_ids(models_root: Path) -> None:
    path = str(models_root / "all-minilm-l6-v2" / "source" / "tokenizer.json")
    texts = np.array([[b"hello"], ["größer als zwei".encode()]], object)
    found = Tokenize(path, mask="FP32").open()({"text": texts})
    assert found["input_ids"][0].tolist() == [101, 7592, 102]
    assert [len(ids) for ids in found["input_ids"]] == [len(mask) for mask in found["attention_mask"]]
    with pytest.raises(ContextTooLong, match="the pipeline takes 4"):
        Tokenize(path, max_tokens=4).open()({"text": texts})
    assert len(Tokenize(path, max_tokens=4, cut=True).open()({"text": texts})["input_ids"][1]) == 4
    with pytest.raises(InvalidRequest, match="not valid UTF-8"):
        Tokenize(path).open()({"text": np.array([[b"\xff"]], object)})


@pytest.mark.parametrize("cut", [False, True])
def test_a_text_that_is_surely_too_long_is_refused_or_cut_before_it_is_tokenized(*, cut: bool) -> None:
    seen: list[str] = []

    class Backend:
        def encode_batch_fast(self, texts: list[str]) -> list[SimpleNamespace]:
            seen.extend(texts)
            return [SimpleNamespace(ids=[1, 2, 3, 4]) for _ in texts]

    backend: Any = Backend()
    tokenizer = _Tokenizer(Tokenize(tokenizer="t", max_tokens=3, cut=cut), backend)
    batch = {"text": np.array([[b"a" * 301]], object)}
    if cut:
        assert tokenizer(batch)["input_ids"][0].tolist() == [1, 2, 3]
        assert seen == ["a" * 300]
    else:
        with pytest.raises(ContextTooLong, match="`text`: 301 characters, the pipeline takes 3 tokens"):
            tokenizer(batch)
        assert not seen
