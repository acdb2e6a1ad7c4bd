"""Files and batches through the real SDK, on a real dispatcher and a real socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from router.jobs.calendar import Calendar
from tests.support.gateway_fakes import client_of, gateway_deps
from tests.support.job_tier import Echo, as_file, ended, job_tier, line, lines_of, submit
from tests.support.waiting import until


async def test_a_batch_answers_every_line_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    async with job_tier(tmp_path) as (_, client):
        lines = [line(f"id-{number}", f"word {number}") for number in range(40)]
        batch = await submit(client, lines, metadata={"team": "search"})
        assert batch.status == "validating"
        assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", "/v1/chat/completions", "24h")
        assert batch.expires_at - batch.created_at == 86_400

        done = await ended(client, batch.id)
        assert done.status == "completed"
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (40, 40, 0)
        assert done.error_file_id is None
        assert done.metadata == {"team": "search"}
        assert done.in_progress_at <= done.finalizing_at <= done.completed_at
        answers = await lines_of(client, done.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [each["custom_id"] for each in lines]
        for number, answer in enumerate(answers):
            assert answer["error"] is None
            assert answer["response"]["status_code"] == 200
            assert answer["response"]["request_id"]
            body = answer["response"]["body"]
            assert body["object"] == "chat.completion"
            assert body["choices"][0]["message"]["content"] == f"word {number}"
        assert done.output_file_id is not None
        output = await client.files.retrieve(done.output_file_id)
        assert output.purpose == "batch_output"
        assert output.filename == f"{batch.id}_output.jsonl"


async def test_what_a_file_is_and_that_it_can_be_listed_read_and_deleted(tmp_path: Path) -> None:
    async with job_tier(tmp_path) as (_, client):
        content = as_file([line("a", "x" * 700_000), line("b", "y")])
        file = await client.files.create(file=("große datei.jsonl", content), purpose="batch")
        assert (file.bytes, file.filename, file.purpose, file.status) == (
            len(content),
            "große datei.jsonl",
            "batch",
            "processed",
        )
        assert (await client.files.content(file.id)).content == content
        others = [(await client.files.create(file=b"{}", purpose="batch")).id for _ in range(4)]
        listed = [item.id async for item in client.files.list(limit=2)]
        assert listed == [*reversed(others), file.id]
        listed = [item.id async for item in client.files.list(limit=2, order="asc")]
        assert listed == [file.id, *others]
        assert [item.id async for item in client.files.list(purpose="batch_output")] == []
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError, match=file.id):
            await client.files.retrieve(file.id)
        with pytest.raises(openai.NotFoundError):
            await client.files.content(file.id)
        assert len(list((tmp_path / "files").iterdir())) == 4
        assert not list((tmp_path / "incoming").iterdir())


async def test_uploads_that_are_none_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    async with job_tier(tmp_path) as (_, client):
        with pytest.raises(openai.BadRequestError, match=r"`purpose`.*fine-tune") as refused:
            await client.files.create(file=b"{}", purpose="fine-tune")
        assert refused.value.param == "purpose"
        http = client._client
        headers = {"authorization": "Bearer none"}
        reply = await http.post("files", content=b"{}", headers={**headers, "content-type": "application/json"})
        assert reply.status_code == 415
        kind = {**headers, "content-type": "multipart/form-data; boundary=x"}
        reply = await http.post("files", content=b"--x\r\nContent-Disposition: form-data; na", headers=kind)
        assert reply.status_code == 400
        assert "ends before" in reply.json()["error"]["message"]
        reply = await http.post("files", content=b"no form at all", headers=kind)
        assert reply.status_code == 400
        reply = await http.post("files", data={"purpose": "batch"}, files={"other": b"x"}, headers=headers)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "file")
        assert not list((tmp_path / "files").iterdir())
        await until(lambda: not list((tmp_path / "incoming").iterdir()))


async def test_requests_for_a_batch_that_are_wrong_name_the_field(tmp_path: Path) -> None:
    async with job_tier(tmp_path) as (_, client):
        file = await client.files.create(file=as_file([line("a", "x")]), purpose="batch")
        good: dict[str, Any] = {
            "input_file_id": file.id,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        for change, param in (
            ({"endpoint": "/v1/audio"}, "endpoint"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"completion_window": "0s"}, "completion_window"),
            ({"completion_window": "31d"}, "completion_window"),
            ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
            ({"metadata": {"x": "y" * 513}}, "metadata.x"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.batches.create(**{**good, **change})
            assert refused.value.param == param
        with pytest.raises(openai.NotFoundError):
            await client.batches.create(**{**good, "input_file_id": "file-none"})
        with pytest.raises(openai.BadRequestError, match="x-overspill-ttft-slo-ms"):
            await client.batches.create(**good, extra_headers={"x-overspill-ttft-slo-ms": "10"})
        with pytest.raises(openai.BadRequestError, match="did you mean `x-overspill-locality`"):
            await client.batches.create(**good, extra_headers={"x-overspill-localty": "local-only"})


async def test_a_file_with_wrong_lines_fails_and_each_is_named(tmp_path: Path) -> None:
    replica = Echo()
    async with job_tier(tmp_path, replica) as (_, client):
        batch = await submit(
            client,
            [
                line("good", "x"),
                b'{"custom_id": "cut',
                line("good", "again"),
                line("method", "x", method="GET"),
                line("url", "x", url="/v1/embeddings"),
                b"",
                {"method": "POST", "url": "/v1/chat/completions", "body": {}},
                line("body", "x", body=7),
                line("model", "x", body={"messages": []}),
                line("stream", "x", body={"model": "tiny", "messages": [], "stream": True}),
                b"[1, 2]",
            ],
        )
        done = await ended(client, batch.id)
        assert done.status == "failed"
        assert done.failed_at is not None
        told = [(fault.line, fault.code, fault.param) for fault in done.errors.data]
        assert told == [
            (2, "invalid_json_line", None),
            (3, "duplicate_custom_id", "custom_id"),
            (4, "invalid_method", "method"),
            (5, "url_mismatch", "url"),
            (7, "missing_required_parameter", "custom_id"),
            (8, "invalid_body", "body"),
            (9, "missing_required_parameter", "body.model"),
            (10, "invalid_body", "body.stream"),
            (11, "invalid_json_line", None),
        ]
        errors = await lines_of(client, done.error_file_id)
        assert [(error["error"]["line"], error["error"]["code"]) for error in errors] == [each[:2] for each in told]
        assert [error["custom_id"] for error in errors][1] == "good"
        assert replica.asked == []  # none of it was run


async def test_requests_that_fail_go_into_the_error_file_as_replies(tmp_path: Path) -> None:
    async with job_tier(tmp_path) as (_, client):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        batch = await submit(
            client,
            [
                line("fine", "x"),
                line("unknown", "x", body={**body, "model": "gpt-9"}),
                line("wrong", "x", body={**body, "temperature": 7}),
                line("promise", "x", body={**body, "locality": "local-only"}),
            ],
        )
        done = await ended(client, batch.id)
        assert done.status == "completed"
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 3)
        told = await lines_of(client, done.error_file_id)
        errors = {error["custom_id"]: error for error in told}
        assert {name: error["response"]["status_code"] for name, error in errors.items()} == {
            "unknown": 404,
            "wrong": 400,
            "promise": 400,
        }
        assert errors["unknown"]["response"]["body"]["error"]["code"] == "model_not_found"
        assert errors["wrong"]["response"]["body"]["error"]["param"] == "temperature"
        assert all(error["error"] is None for error in errors.values())


async def test_an_empty_file_is_no_batch(tmp_path: Path) -> None:
    async with job_tier(tmp_path) as (_, client):
        done = await ended(client, (await submit(client, [b"", b"  "])).id)
        assert done.status == "failed"
        assert [fault.code for fault in done.errors.data] == ["empty_file"]


async def test_a_cancelled_batch_stops_its_lines_and_says_which_were_not_run(tmp_path: Path) -> None:
    replica = Echo(slots=2)
    async with job_tier(tmp_path, replica) as (_, client):
        replica.gate.clear()
        batch = await submit(client, [line(f"id-{n}", f"word {n}") for n in range(20)])
        await until(lambda: replica.running == 2)
        cancelling = await client.batches.cancel(batch.id)
        assert cancelling.status == "cancelling"
        done = await ended(client, batch.id)
        assert done.status == "cancelled"
        assert done.cancelling_at <= done.cancelled_at
        assert done.output_file_id is None
        errors = await lines_of(client, done.error_file_id)
        assert len(errors) == 20
        assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
        assert all(error["response"] is None for error in errors)
        await until(lambda: replica.running == 0)
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await client.batches.cancel(batch.id)
        assert len(replica.asked) == 2


async def test_a_batch_whose_window_ends_expires_with_what_is_there(tmp_path: Path) -> None:
    now_s = [1_000_000.0]
    replica = Echo(slots=1, holds_at="hold")
    async with job_tier(tmp_path, replica, calendar=Calendar(lambda: now_s[0], lambda: now_s[0])) as (_, client):
        batch = await submit(client, [line(f"id-{n}", "hold" if n == 3 else f"word {n}") for n in range(6)], "90s")
        await until(lambda: replica.asked[-1:] == ["hold"])
        now_s[0] += 91
        done = await ended(client, batch.id)
        assert done.status == "expired"
        assert done.expired_at == int(now_s[0])
        assert (done.request_counts.completed, done.request_counts.failed) == (3, 0)
        errors = await lines_of(client, done.error_file_id)
        assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
            (f"id-{number}", "batch_expired") for number in (3, 4, 5)
        ]
        answers = await lines_of(client, done.output_file_id)
        assert [answer["custom_id"] for answer in answers] == ["id-0", "id-1", "id-2"]


async def test_batches_are_listed_page_by_page(tmp_path: Path) -> None:
    async with job_tier(tmp_path) as (_, client):
        made = [(await submit(client, [line("a", "x")])).id for _ in range(5)]
        assert [batch.id async for batch in client.batches.list(limit=2)] == made[::-1]
        page = await client.batches.list(limit=2)
        assert (page.has_more, len(page.data)) == (True, 2)
        with pytest.raises(openai.BadRequestError, match="limit"):
            await client.batches.list(limit=101)


async def test_callers_see_their_own_alone(tmp_path: Path) -> None:
    keys = {"a" * 20: 0, "b" * 20: 0}
    replica = Echo()
    async with (
        job_tier(tmp_path, replica, api_keys=keys) as (tier, nobody),
        tier.client("a" * 20) as mine,
        tier.client("b" * 20) as theirs,
    ):
        batch = await submit(mine, [line("a", "x")])
        done = await ended(mine, batch.id)
        for call in (
            lambda: theirs.files.retrieve(done.input_file_id),
            lambda: lines_of(theirs, done.output_file_id),
            lambda: theirs.files.delete(done.input_file_id),
            lambda: theirs.batches.retrieve(batch.id),
            lambda: theirs.batches.cancel(batch.id),
            lambda: theirs.batches.create(
                input_file_id=done.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await call()
        assert [item async for item in theirs.files.list()] == []
        assert [item async for item in theirs.batches.list()] == []
        with pytest.raises(openai.AuthenticationError):
            await nobody.batches.list()
        assert replica.requests[0].caller != ""


async def test_a_file_that_a_batch_reads_stays(tmp_path: Path) -> None:
    replica = Echo()
    async with job_tier(tmp_path, replica) as (_, client):
        replica.gate.clear()
        batch = await submit(client, [line("a", "x")])
        await until(lambda: replica.running)
        with pytest.raises(openai.BadRequestError, match="cancel that first"):
            await client.files.delete(batch.input_file_id)
        replica.gate.set()
        await ended(client, batch.id)
        assert (await client.files.delete(batch.input_file_id)).deleted


async def test_what_holds_for_a_batch_holds_for_its_lines(tmp_path: Path) -> None:
    replica = Echo()
    async with job_tier(tmp_path, replica) as (_, client):
        held = {"x-overspill-locality": "local-only", "x-overspill-min-quality": "0.5", "x-overspill-cache-salt": "s"}
        await ended(client, (await submit(client, [line("a", "x")], extra_headers=held)).id)
        request = replica.requests[0]
        assert request.objective.locality.value == "local-only"
        assert request.objective.min_quality == 0.5
        assert request.cache_salt == "s"
        assert request.objective.in_slack


async def test_a_tier_without_a_folder_says_what_to_set() -> None:
    async with client_of(gateway_deps()) as client:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/files/x/content")):
            reply = await client.request(method, path)
            assert reply.status_code == 404
            assert "jobs.dir" in reply.json()["error"]["message"]
