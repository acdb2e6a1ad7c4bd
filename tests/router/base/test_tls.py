"""TLS as a client: what an error about a certificate's time is worth depends on this machine's clock."""

from __future__ import annotations

import pytest

from router.base.tls import with_clock


@pytest.mark.parametrize("why", ["certificate is not yet valid", "certificate has expired"])
def test_an_error_about_time_says_what_time_it_is_here(why: str) -> None:
    told = with_clock(f"certificate verify failed: {why} (_ssl.c:1006)", wall_s=90_000.0)
    assert (
        told == f"certificate verify failed: {why} (_ssl.c:1006); the clock of this machine says 1970-01-02 01:00 UTC"
    )


def test_another_error_says_nothing_of_it() -> None:
    assert with_clock("certificate verify failed: Hostname mismatch") == "certificate verify failed: Hostname mismatch"
