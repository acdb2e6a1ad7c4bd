"""Traces: every form is read, what is wrong is named by file and line, slices and loads are what they say."""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path

import pytest

from router.base.errors import ConfigError
from router.simulation.traces import SHIPPED, TraceRow, at_rate, load_trace, read_trace, scale_inputs, slice_of


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def test_plain_csv_starts_at_zero_and_is_sorted(tmp_path: Path) -> None:
    path = _file(tmp_path, "t.csv", "arrival_s,input_tokens,output_tokens\n7.5,30,4\n5.0,10,2\n")
    assert read_trace(path) == (TraceRow(0.0, 10, 2), TraceRow(2.5, 30, 4))


def test_azure_as_published(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:51.5,1,0\n"
    )
    rows = read_trace(_file(tmp_path, "azure.csv.gz", text))
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 4.314579, 4.81941], abs=1e-6)
    assert rows[1].input_tokens == 396
    assert rows[2].output_tokens == 1, "nobody can serve an answer of 0 tokens"


def test_mooncake_sessions_are_shared_first_blocks_after_those_of_all(tmp_path: Path) -> None:
    arrived = [(1000, 1500, 10, [0, 1, 2]), (2500, 900, 5, [0, 9]), (4000, 2100, 7, [0, 1, 2, 3, 4])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    text = "\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in arrived)
    rows = read_trace(_file(tmp_path, "m.jsonl.gz", text))
    assert [row.arrival_s for row in rows] == [0.0, 1.5, 3.0]
    assert rows[0].session == rows[2].session != rows[1].session
    assert [row.shared_tokens for row in rows] == [0, 0, 3 * 512]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", "arrival_s,input_tokens,output_tokens\n1,2,3\n1,x,3\n", r"t\.csv: line 3: input_tokens = 'x'"),
        ("t.csv", "arrival_s,input_tokens,output_tokens\nnan,2,3\n", r"line 2: arrival_s = 'nan'"),
        ("t.csv", "arrival_s,input_tokens,output_tokens\n1,2\n", r"line 2: output_tokens = None"),
        ("t.csv", "arrival_s,input_tokens,output_tokens\n1,2,-3\n", r"line 2: output_tokens = '-3'"),
        ("t.csv", "a,b\n1,2\n", r"t\.csv: line 1: columns a, b; expected arrival_s"),
        ("t.csv", "arrival_s,input_tokens,output_tokens\n", r"holds no requests"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", r"line 2: TIMESTAMP = 'yesterday'"),
        ("t.jsonl", '{"timestamp": 1, "input_length": 3}\n', r"t\.jsonl: line 1: expected keys"),
        ("t.jsonl", '{"timestamp": 1, "input_length": 3, "output_length": 2}\nnonsense\n', r"line 2: no JSON"),
        (
            "t.jsonl",
            '{"timestamp": 1, "input_length": 3, "output_length": 2, "hash_ids": ["a"]}\n',
            r"line 1: hash_ids: expected a list",
        ),
        ("t.parquet", "PAR1", r"t\.parquet: a trace is \.csv"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_trace(_file(tmp_path, name, text))


def test_a_damaged_archive_is_an_error_and_not_a_short_trace(tmp_path: Path) -> None:
    path = _file(tmp_path, "t.csv.gz", "arrival_s,input_tokens,output_tokens\n" + "1,2,3\n" * 1000)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ConfigError, match=r"t\.csv\.gz: cannot be read"):
        read_trace(path)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match="azure-conv, azure-code, mooncake"):
        load_trace("azure")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_traces_hold_enough_for_five_seeds(name: str) -> None:
    rows = load_trace(name)
    assert len(rows) >= 5_000
    starts = {slice_of(rows, 1_000, seed)[:3] for seed in range(5)}
    assert len(starts) == 5
    assert any(row.session for row in rows) == (name == "mooncake")


def test_shipped_traces_are_small_and_say_their_source() -> None:
    data = Path(read_trace.__code__.co_filename).parent / "data"
    assert sum(path.stat().st_size for path in data.iterdir()) <= 300_000
    told = (data / "README.md").read_text()
    assert all(file in told for file in SHIPPED.values())
    assert "CC-BY-4.0" in told
    assert "Apache-2.0" in told


def test_inputs_scale_to_a_mean_and_fit_the_window_with_their_answer() -> None:
    rows = (TraceRow(0, 100, 10), TraceRow(1, 300, 5000, "s", 200), TraceRow(2, 20_000, 10))
    scaled = scale_inputs(rows, 1000.0, 4096)
    assert scaled[0].input_tokens == round(100 * 1000 / 6800)
    assert scaled[1].shared_tokens == round(200 * 1000 / 6800)
    assert all(row.input_tokens + row.output_tokens <= 4096 for row in scaled)
    assert scaled[1].output_tokens == 2048
    big = tuple(row for row in load_trace("mooncake"))
    assert statistics.fmean(r.input_tokens for r in scale_inputs(big, 1000.0, 1 << 20)) == pytest.approx(1000, rel=0.01)
    assert scale_inputs(rows[:1], None, 4096) == rows[:1]


def test_a_slice_is_the_seeds_and_begins_at_zero() -> None:
    rows = tuple(TraceRow(float(at), at + 1, 1) for at in range(500))
    assert slice_of(rows, 100, 3) == slice_of(rows, 100, 3) != slice_of(rows, 100, 4)
    assert slice_of(rows, 100, 3)[0].arrival_s == 0
    assert slice_of(rows, 500, 3) == rows
    with pytest.raises(ConfigError, match="501 asked for, the trace has 500"):
        slice_of(rows, 501, 0)


def test_arrivals_stretch_to_a_rate_and_keep_their_shape() -> None:
    rows = (TraceRow(0, 1, 1), TraceRow(1, 1, 1), TraceRow(9, 1, 1))
    assert [row.arrival_s for row in at_rate(rows, 4.0)] == pytest.approx([0.0, 0.5 / 9, 0.5])
    assert [row.arrival_s for row in at_rate((rows[0], rows[0]), 4.0)] == [0.0, 0.25]
