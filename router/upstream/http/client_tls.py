"""TLS to one server that follows its files: what was renewed is shown by new connections, without a restart."""

from __future__ import annotations

from pathlib import Path

import httpx
import structlog

from router.base.errors import ConfigError, in_words
from router.base.tls import client_context, with_clock

log = structlog.get_logger("router.gateway")

Stamp = tuple[tuple[int, int], ...]


class ClientTls:
    """The context of all connections to a server.

    A renewed certificate takes the place of the one before; a renewed authority is believed beside it until a restart.

    Args:
        ca_file: None believes the system's authorities.
        client_cert, client_key: both or neither.

    Raises:
        ConfigError: a file is missing or holds something else.
    """

    def __init__(self, ca_file: Path | None, client_cert: Path | None, client_key: Path | None) -> None:
        self._files = (ca_file, client_cert, client_key)
        self._seen = self._look()
        self.context = client_context(*self._files)

    def renewed(self) -> bool:
        """Read the files again if they have changed; returns whether new connections differ from those before."""
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen
        ca_file, client_cert, client_key = self._files
        try:
            client_context(*self._files)  # renewed files come one after the other: half of them must not be taken
        except ConfigError as error:
            log.warning("certificate not reloaded; the one before is shown on", why=error.message)
            return False
        if ca_file is not None:
            self.context.load_verify_locations(ca_file)
        if client_cert is not None:
            self.context.load_cert_chain(client_cert, client_key)
        log.info("certificate reloaded", client_cert=str(client_cert or ""), ca_file=str(ca_file or ""))
        return True

    def in_words(self, error: Exception) -> str:
        """Say what an error of a probe means: a server tells nobody but its own log that it refused a certificate."""
        words = with_clock(in_words(error))
        if not isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError)):
            return words
        shown = self._files[1]
        if shown is None:
            return f"{words}; perhaps it asks for a certificate (client_cert): its log says"
        return f"{words}; perhaps it does not take the certificate that it is shown ({shown}): its log says"

    def _look(self) -> Stamp:
        found = []
        for file in self._files:
            try:
                stat = file.stat() if file is not None else None
            except OSError:
                stat = None
            found.append((stat.st_ctime_ns, stat.st_ino) if stat is not None else (0, 0))
        return tuple(found)
