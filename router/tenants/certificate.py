"""Client certificates, as a proxy that terminates TLS tells them: four spellings, one digest."""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import re
import ssl
from collections.abc import Sequence
from urllib.parse import unquote

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_HEX = re.compile(r"[0-9a-f]{64}")
_XFCC_HASH = re.compile(r"(?:^|[;,])\s*Hash=\"?([0-9a-fA-F]{64})\"?", re.IGNORECASE)
_PEM_BEGIN = "-----BEGIN CERTIFICATE-----"
_MAX_CHARS = 32_768


def certificate_digest(told: str) -> str | None:
    """Return the SHA-256 of a certificate's DER in hexadecimal, None where nothing of the kind is told.

    Args:
        told: what a header says: `:BASE64:` of the DER (`client-cert`, RFC 9440), `Hash=…` (`x-forwarded-client-cert`,
            Envoy: the last one, which the nearest proxy has added), a PEM with escapes (nginx's
            `$ssl_client_escaped_cert`), or the digest itself.
    """
    told = told.strip()[:_MAX_CHARS]
    plain = told.replace(":", "").lower()
    if _HEX.fullmatch(plain):
        return plain
    if hashes := _XFCC_HASH.findall(told):
        return str(hashes[-1]).lower()
    try:
        der = _der(told)
    except (ValueError, binascii.Error):
        der = b""
    return hashlib.sha256(der).hexdigest() if der else None


def _der(told: str) -> bytes:
    if told.startswith(":") and told.endswith(":"):
        return base64.b64decode(told[1:-1], validate=True)
    pem = unquote(told)
    return ssl.PEM_cert_to_DER_cert(pem) if pem.startswith(_PEM_BEGIN) else b""


def is_network(text: str) -> bool:
    """Whether it is an address or a network."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def networks_of(texts: Sequence[str]) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(text, strict=False) for text in texts)


def is_within(address: str, networks: Sequence[Network]) -> bool:
    """Whether a peer's address lies in one of the networks; what is no address does not."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return any((mapped or found) in network for network in networks if network.version == (mapped or found).version)
