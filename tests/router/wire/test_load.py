"""Load reports and promises survive their journey in headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.base.errors import InvalidRequest
from router.upstream.codec.events import origin_of
from router.values.answer import Route
from router.values.credits import Grant, Want
from router.values.replica import ReplicaSnapshot
from router.values.request import Locality, Objective
from router.wire import headers, names
from router.wire.credits import UnreadableCredits, asking_headers, read_instance, read_want
from router.wire.load import LoadReport, VariantLoad, decode_orca, encode_orca, summarise
from router.wire.promise import objective_headers, parse_objective
from tests.support.gateway_fakes import replica_info

count = st.integers(0, 10**7)
variant_load = st.builds(
    VariantLoad,
    variant=st.from_regex(r"[a-z0-9.-]{1,20}", fullmatch=True),
    available=st.booleans(),
    slots=count,
    running=count,
    queued=count,
    queued_prefill_tokens=count,
    pending_decode_tokens=count,
    engines=st.integers(1, 10**4),
)
seconds = st.integers(0, 10**7).map(lambda n: n / 1000)
grants = st.builds(Grant, credits=st.integers(0, 10**6), for_s=seconds, again_s=seconds, wait_s=seconds)
reports = st.builds(
    LoadReport,
    variants=st.lists(variant_load, max_size=5, unique_by=lambda v: v.variant).map(tuple),
    kv_usage=st.none() | st.integers(0, 10_000).map(lambda n: n / 10_000),
    waiting=count,
    grant=st.none() | grants,
)


@given(reports)
def test_a_report_survives_the_header(report: LoadReport) -> None:
    value = encode_orca(report)
    assert value.isascii()
    assert value.startswith("JSON {")
    assert decode_orca(value) == report


def test_the_engines_of_a_tier_add_up_where_they_are_available() -> None:
    one = ReplicaSnapshot(replica_info("m"), available=True, slots=4)
    snapshots = [one, replace(one, engines=3), replace(one, available=False)]
    (load,) = summarise(snapshots).variants
    assert load.engines == 4
    (none,) = summarise(snapshots[2:]).variants
    told = encode_orca(summarise([one, *snapshots[2:]]))
    assert (none.engines, "engines" in told) == (1, False), "one is what an older tier means by nothing"


@pytest.mark.parametrize(
    "value",
    ["", "JSON", "JSON {", "TEXT running=3", "BIN AAAA", 'JSON {"named_metrics":{"a":"x"}}', "JSON " + "[" * 99_999],
)
def test_what_cannot_be_read_is_no_report(value: str) -> None:
    assert decode_orca(value) is None


def test_foreign_reports_are_read_without_variants() -> None:
    report = decode_orca('JSON {"cpu_utilization":0.3,"named_metrics":{"kv_cache_utilization":0.5,"x":1e400}}')
    assert report is None or report.variants == ()
    report = decode_orca('JSON {"cpu_utilization":0.3,"named_metrics":{"kv_cache_utilization":0.5}}')
    assert report == LoadReport(kv_usage=0.5)


@pytest.mark.parametrize("told", ["1e999", "-1e999", "1e300", "-5", "0.5", "1" + "0" * 29])
def test_a_figure_that_cannot_be_is_bounded(told: str) -> None:
    named = f'"waiting":{told},"kv_cache_utilization":{told},"v|slots":{told},"v|available":1'
    report = decode_orca(f'JSON {{"named_metrics":{{{named}}}}}')
    if report is None:
        return  # JSON knows no such number
    assert 0 <= report.waiting <= 10**9
    assert 0 <= report.variants[0].slots <= 10**9
    assert report.kv_usage is None or 0 <= report.kv_usage <= 1


@pytest.mark.parametrize(
    "told",
    [
        '"credits":-1',
        '"credits":1.5',
        '"credits":1e300',
        '"credits":1e999',
        '"credits_for_s":-1',
        '"credits_again_s":1e999',
        '"credits_wait_s":1e300',
    ],
)
def test_credits_that_cannot_be_are_no_credits_and_harm_nothing_else(told: str) -> None:
    sound = '"credits":1,"credits_for_s":2,"credits_again_s":0,"credits_wait_s":0,"v|slots":3'
    report = decode_orca(f'JSON {{"named_metrics":{{{sound},{told}}}}}')
    if report is None:
        return  # JSON knows no such number
    assert (report.grant, report.grant_unreadable, report.slots) == (None, True, 0)
    assert report.variants[0].slots == 3


def test_a_part_of_a_grant_is_none() -> None:
    report = decode_orca('JSON {"named_metrics":{"credits":1}}')
    assert (report.grant, report.grant_unreadable) == (None, True)
    report = decode_orca('JSON {"named_metrics":{"waiting":1}}')
    assert (report.grant, report.grant_unreadable) == (None, False)


@given(st.integers(0, 999_999), st.integers(0, 999_999))
def test_who_asks_and_for_how_much_survives_the_headers(waiting: int, urgent: int) -> None:
    want = Want(waiting, min(urgent, waiting))
    sent = dict(asking_headers("0123456789abcdef", want))
    assert (read_instance(sent), read_want(sent)) == ("0123456789abcdef", want)
    assert parse_objective(sent, Objective()) == Objective(), "they promise nothing"


@pytest.mark.parametrize("told", ["", "-1", "x", "1;urgent", "1;urgent=x", "9" * 7, "١", "1\n2"])
def test_a_demand_that_cannot_be_read(told: str) -> None:
    with pytest.raises(UnreadableCredits, match="x-overspill-demand"):
        read_want({names.DEMAND: told})


@pytest.mark.parametrize("told", ["", "short", "x" * 65, "with blank", "schlüssel"])
def test_an_instance_that_cannot_be_read(told: str) -> None:
    with pytest.raises(UnreadableCredits, match="x-overspill-instance"):
        read_instance({names.INSTANCE: told})
    assert read_instance({}) is None


def test_replicas_of_one_variant_are_summed() -> None:
    info = replica_info()
    up = ReplicaSnapshot(info, available=True, slots=4, running=2, queued=1)
    down = ReplicaSnapshot(info, available=False, slots=4, running=1, why="restarting")
    report = summarise([up, down], kv_usage=0.25, waiting=2)
    assert report.variants == (VariantLoad(info.variant, available=True, slots=4, running=3, queued=1),)
    assert (report.running, report.queued, report.slots, report.kv_usage) == (3, 3, 4, 0.25)


milliseconds = st.none() | st.integers(1, 10**8).map(lambda n: n / 1000)
objectives = st.builds(
    Objective,
    ttft_s=milliseconds,
    tpot_s=milliseconds,
    deadline_s=milliseconds,
    priority=st.integers(-(2**31) + 1, 2**31 - 1),
    locality=st.sampled_from(Locality),
    min_quality=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    session=st.none() | st.from_regex(r"[\x21-\x7e]{1,20}", fullmatch=True),
)


@given(objectives)
def test_an_objective_survives_the_headers(objective: Objective) -> None:
    assert parse_objective(dict(objective_headers(objective)), Objective()) == objective


def test_headers_are_laid_over_the_default() -> None:
    default = Objective(ttft_s=1.0, priority=2)
    assert parse_objective({}, default) is default
    merged = parse_objective({"x-overspill-priority": "-1", "x-overspill-locality": "Local-Only"}, default)
    assert merged == Objective(ttft_s=1.0, priority=-1, locality=Locality.LOCAL_ONLY)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("x-overspill-location", names.LOCALITY),
        ("x-overspill-ttft-ms", names.TTFT),
        ("x-overspill-deadline", names.DEADLINE),
        ("x_overspill_locality", names.LOCALITY),
        ("x-overspill-zzz", None),
    ],
)
def test_a_name_that_is_none_of_ours_is_refused_and_the_nearest_is_told(name: str, meant: str | None) -> None:
    with pytest.raises(InvalidRequest, match=f"`{name}` is no request header") as raised:
        parse_objective({name: "local-only"}, Objective())
    assert raised.value.param == name
    assert all(known in raised.value.message for known in names.REQUEST_NAMES)
    assert ("did you mean" in raised.value.message) is (meant is not None)
    assert meant is None or raised.value.message.endswith(f"did you mean `{meant}`?")


def test_what_tiers_and_proxies_send_is_no_mistake() -> None:
    echoed = dict.fromkeys(names.REPLY_NAMES, "x")
    others = {"x-request-id": "a", "x-overspilled": "b", "traceparent": "c", names.HOPS: "1"}
    assert parse_objective({**echoed, **others}, Objective()) == Objective()


@pytest.mark.parametrize("alias", ["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"])
def test_aliases_are_read_and_the_own_name_wins(alias: str) -> None:
    assert parse_objective({alias: "250"}, Objective()).ttft_s == 0.25
    assert parse_objective({alias: "250", names.TTFT: "100"}, Objective()).ttft_s == 0.1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (names.TTFT, "soon"),
        (names.TTFT, "0"),
        (names.TTFT, "-1"),
        (names.TTFT, "nan"),
        (names.TPOT, "inf"),
        (names.DEADLINE, ""),
        (names.DEADLINE, "1e12"),
        ("x-llm-d-slo-ttft-ms", "x"),
        ("x-llm-d-slo-tpot-ms", "x"),
        (names.PRIORITY, "1.5"),
        (names.PRIORITY, "high"),
        (names.PRIORITY, "99999999999"),
        (names.PRIORITY, "9" * 5000),
        (names.PRIORITY, "1_0"),
        (names.PRIORITY, "٣"),
        (names.TTFT, "1_0"),
        (names.TTFT, "9" * 50_000),
        (names.LOCALITY, "here"),
        (names.MIN_QUALITY, "2"),
        (names.MIN_QUALITY, "nan"),
        (names.SESSION, ""),
        (names.SESSION, "x" * 257),
    ],
)
def test_a_wrong_header_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_objective({name: value}, Objective())
    assert raised.value.param == name
    assert name in raised.value.message


@pytest.mark.parametrize(
    ("text", "value_s"), [("5", 0.005), ("5.", 0.005), (".5", 0.0005), ("1e3", 1.0), ("05", 0.005)]
)
def test_milliseconds_as_people_write_them(text: str, value_s: float) -> None:
    assert parse_objective({names.TTFT: text}, Objective()).ttft_s == pytest.approx(value_s)


def test_a_very_small_objective_survives_the_wire() -> None:
    sent = dict(objective_headers(Objective(ttft_s=1e-9)))
    assert parse_objective(sent, Objective()).ttft_s == 1e-6


def test_an_upstreams_figures_may_be_anything() -> None:
    for wrong in ("1" * 5000, "-1", "x", "²"):
        assert origin_of({names.MODEL: "v", names.RUNG: wrong}) is None
        found = origin_of({names.MODEL: "v", names.RUNG: "2", names.MAX_TOKENS: wrong})
        assert (found.rung, found.max_tokens) == (2, None)


def test_request_ids_are_echoed_made_or_refused() -> None:
    assert headers.request_id({names.REQUEST_ID: "abc-1:2"}) == "abc-1:2"
    assert len(headers.request_id({})) == 32
    for wrong in ("x" * 129, "a b", "a\x00", "ä"):
        with pytest.raises(InvalidRequest):
            headers.request_id({names.REQUEST_ID: wrong})


def test_only_a_sound_trace_travels_and_hops_are_counted() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    kept = headers.passed_on({"traceparent": trace, "tracestate": "a=b", "cookie": "x"})
    assert kept == (("traceparent", trace), ("tracestate", "a=b"))
    later = trace.replace("00-", "01-", 1) + "-more"
    assert headers.passed_on({"traceparent": later}) == (("traceparent", later),)
    no_trace, no_span = trace.replace(trace[3:35], "0" * 32), trace.replace(trace[36:52], "0" * 16)
    for wrong in ("zz", trace.upper(), trace + "-more", "ff" + trace[2:], no_trace, no_span):
        assert headers.passed_on({"traceparent": wrong, "tracestate": "a=b"}) == (), wrong
    assert dict(headers.next_hop(kept))[names.HOPS] == "1"
    assert headers.next_hop(((names.HOPS, "3"),)) == [(names.HOPS, "4")]
    for wrong in ("9", "-1", "x", "²", "1" * 5000):
        with pytest.raises(InvalidRequest, match="own upstream"):
            headers.passed_on({names.HOPS: wrong})


def test_a_refusal_says_when_to_come_back() -> None:
    assert headers.retry_headers(0.2, should_retry=True) == [("retry-after", "1"), ("retry-after-ms", "200")]
    assert headers.retry_headers(7.2, should_retry=False) == [
        ("retry-after", "8"),
        ("retry-after-ms", "7200"),
        ("x-should-retry", "false"),
    ]
    assert headers.retry_headers(float("inf"), should_retry=True)[0] == ("retry-after", "3600")
    assert headers.retry_headers(-1, should_retry=True)[1] == ("retry-after-ms", "1")


def test_a_reason_cannot_inject_a_header() -> None:
    route = Route("edge", "v", 0, "a\r\nset-cookie: x", degraded=False, predicted_ttft_s=None)
    assert dict(headers.route_headers(route))[names.REASON] == "a??set-cookie: x"
