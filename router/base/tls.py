"""TLS as a client: always verified, host name included; with a certificate of its own where it is asked for one."""

from __future__ import annotations

import ssl
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
