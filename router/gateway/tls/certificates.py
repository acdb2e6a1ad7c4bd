"""The server's certificate, its client authorities and what they revoked, read again when their files change."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path

import structlog

from router.base.errors import ConfigError
from router.gateway.tls.settings import TlsSettings

log = structlog.get_logger("router.gateway")

_VERIFY = {"off": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class PemFiles:
    """What the files held when they were read last.

    Attributes:
        authorities: of client certificates; None where none is asked for.
    """

    certificate: bytes
    key: bytes
    authorities: bytes | None


class ServerCertificates:
    """A TLS context that follows its files; connections that are open keep what they began with.

    Attributes:
        context: for the listener. Each handshake takes the certificate and the authorities of its moment.
        files: for a server that wants them as text.
        readings: how often they were read.
        fault: why what lies there now is not served; empty where it is.
    """

    def __init__(self, settings: TlsSettings) -> None:
        """Read the files.

        Raises:
            ConfigError: one is missing, or they do not fit together; names the files.
        """
        self._settings = settings
        self._stamp = self._look()
        self._current, self.files = self._read()
        self.context = _context(settings)
        self.context.sni_callback = self._take_current
        self.readings = 1
        self.fault = ""

    @property
    def wants_client_certificates(self) -> bool:
        return self._settings.client_certificates == "required"

    async def watch(self) -> None:
        """Read the files again whenever they change; never returns. What is no certificate is not served."""
        while True:
            await asyncio.sleep(self._settings.reload_s)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Read the files again if they have changed. Blocks."""
        stamp = self._look()
        if stamp == self._stamp and not self.fault:
            return
        try:
            self._current, self.files = self._read()
        except ConfigError as error:  # renewed files come one after the other: half of them is no certificate yet
            if stamp != self._stamp or self.fault != error.message:
                log.warning("certificate not reloaded; the one before is served on", why=error.message)
            self._stamp, self.fault = stamp, error.message
            return
        self._stamp, self.fault = stamp, ""
        self.readings += 1
        log.info("certificate reloaded", cert_file=self._settings.cert_file)

    def _read(self) -> tuple[ssl.SSLContext, PemFiles]:
        settings = self._settings
        context = _context(settings)
        try:
            context.load_cert_chain(settings.cert_file, settings.key_file, password=_no_password)
            if settings.client_ca_file:
                context.load_verify_locations(settings.client_ca_file)
            if settings.client_crl_file:
                _load_revoked(context, settings.client_crl_file)
            authorities = Path(settings.client_ca_file).read_bytes() if settings.client_ca_file else None
            files = PemFiles(Path(settings.cert_file).read_bytes(), Path(settings.key_file).read_bytes(), authorities)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            names = ", ".join(filter(None, settings.files))
            raise ConfigError(f"tls: cannot use {names}: {error}", param="tls.cert_file") from error
        return context, files

    def _look(self) -> Stamp:
        """Return what changes with a file and who may read it; a secret volume swaps a link, so links are followed."""
        found = []
        for name in self._settings.files:
            try:
                stat = Path(name).stat() if name else None
            except OSError:
                stat = None
            found.append((stat.st_ctime_ns, stat.st_size, stat.st_ino) if stat is not None else (0, 0, 0))
        return tuple(found)

    def _take_current(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:  # noqa: ARG002
        connection.context = self._current


def _context(settings: TlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.verify_mode = _VERIFY[settings.client_certificates]
    if settings.client_certificates != "off":
        # A resumed session would go by what was verified when it began.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    if settings.client_crl_file:
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return context


def _load_revoked(context: ssl.SSLContext, name: str) -> None:
    """Load lists of revoked certificates.

    Raises:
        OSError: the file cannot be read, or is no PEM.
        ValueError: it holds no list: OpenSSL would let nobody in, and say so to nobody.
    """
    before = context.cert_store_stats()["crl"]
    context.load_verify_locations(name)
    if context.cert_store_stats()["crl"] == before:
        raise ValueError(f"{name} holds no list of revoked certificates (BEGIN X509 CRL)")


def _no_password() -> str:
    raise ValueError("the key is encrypted: give one that is not, readable by this user alone")
