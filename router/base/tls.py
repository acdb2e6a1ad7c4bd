"""TLS as a client: always verified, host name included; with a certificate of its own where it is asked for one."""

from __future__ import annotations

import ssl
import time
from datetime import datetime, timezone
from pathlib import Path

from router.base.errors import ConfigError


class _ClosingSocket(ssl.SSLSocket):
    """Closes itself when the handshake fails; the MQTT library would leave that to the garbage collector."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise


def client_context(
    ca_file: str | Path | None, cert_file: str | Path | None, key_file: str | Path | None
) -> ssl.SSLContext:
    """Build a context from PEM files; without `ca_file` the system's authorities count.

    Raises:
        ConfigError: a file is missing or holds something else, or a certificate comes without its key.
    """
    if (cert_file is None) != (key_file is None):
        raise ConfigError("a certificate and its key belong together: give both or neither", param="tls")
    try:
        context = ssl.create_default_context(cafile=ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslsocket_class = _ClosingSocket
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except OSError as error:  # ssl.SSLError is one
        named = ", ".join(str(path) for path in (ca_file, cert_file, key_file) if path)
        raise ConfigError(f"TLS: cannot use {named or 'the system authorities'}: {error}", param="tls") from error
    return context


def with_clock(why: str, wall_s: float | None = None) -> str:
    """Add this machine's time to an error about a certificate's: a device whose clock has no battery begins in 1970.

    Args:
        wall_s: Unix time; None is now.
    """
    if "not yet valid" not in why and "has expired" not in why:
        return why
    here = datetime.fromtimestamp(time.time() if wall_s is None else wall_s, timezone.utc)
    return f"{why}; the clock of this machine says {here:%Y-%m-%d %H:%M} UTC"
