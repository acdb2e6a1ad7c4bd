"""When certificates and lists of revoked ones end, read as another library reads them."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import subprocess
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from hypothesis import given
from hypothesis import strategies as st

from router.base.pem import first_end_s

CA = trustme.CA()
END = dt.datetime(2031, 5, 6, 7, 8, 9, tzinfo=dt.timezone.utc)


def leaf(end: dt.datetime) -> bytes:
    return CA.issue_cert("cam-1", not_after=end).cert_chain_pems[0].bytes()


@pytest.mark.parametrize("end", [END, END.replace(year=2049), END.replace(year=2050), END.replace(year=2999)])
def test_a_certificate_ends_when_it_says(end: dt.datetime) -> None:
    assert first_end_s(leaf(end)) == end.timestamp()


def test_the_first_that_ends_counts() -> None:
    soon = END - dt.timedelta(days=400)
    key = CA.issue_cert("cam-2").private_key_pem.bytes()
    assert first_end_s(b"a word before\n" + leaf(END) + key + leaf(soon)) == soon.timestamp()


@pytest.mark.parametrize("end", [END, END.replace(year=2050)])
def test_a_list_of_revoked_ones_ends_too(end: dt.datetime) -> None:
    issuer = x509.load_pem_x509_certificate(CA.cert_pem.bytes()).subject
    secret = serialization.load_pem_private_key(CA.private_key_pem.bytes(), None)
    made = x509.CertificateRevocationListBuilder(issuer).last_update(END - dt.timedelta(days=9)).next_update(end)
    signed = made.sign(secret, hashes.SHA256())  # type: ignore[arg-type]  # of the kinds of keys, trustme makes one
    assert first_end_s(signed.public_bytes(serialization.Encoding.PEM)) == end.timestamp()


@pytest.mark.process
def test_what_openssl_makes_is_read(tmp_path: Path) -> None:
    words = "req -x509 -newkey rsa:2048 -nodes -subj /CN=old -days 3 -keyout k.pem -out c.pem"
    subprocess.run(["openssl", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    found = x509.load_pem_x509_certificate((tmp_path / "c.pem").read_bytes())
    assert first_end_s((tmp_path / "c.pem").read_bytes()) == found.not_valid_after_utc.timestamp()


def test_a_file_of_something_else_never_ends() -> None:
    assert first_end_s(b"") == first_end_s(CA.issue_cert("x").private_key_pem.bytes()) == math.inf


@given(st.integers(28, 600), st.binary(min_size=1, max_size=8))
def test_a_damaged_file_is_told_or_read_but_never_worse(at: int, noise: bytes) -> None:
    pem = leaf(END)
    with contextlib.suppress(ValueError):
        first_end_s(pem[:at] + noise + pem[at + len(noise) :])
