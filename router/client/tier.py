"""One question to a running tier, for commands: its URL and key, and what went wrong in words that say what to do."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from router.base.credentials import url_fault
from router.base.errors import ConfigError, ReplicaUnreachable, Unauthenticated
from router.base.loopback import is_loopback
from router.base.tls import client_context

if TYPE_CHECKING:
    import httpx

EDGE_URL = "http://127.0.0.1:8600"
CLOUD_URL = "http://127.0.0.1:8700"
KEY_VARIABLE = "OVERSPILL_API_KEY"
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class TierAddress:
    """Where a tier answers, and with which key.

    Attributes:
        key: empty where the tier has none.
        ca_file: PEM bundle of a private authority, for https.
        hint: what else the caller may do when nobody answers; ends a message.

    Raises:
        ConfigError: the URL is none.
    """

    url: str
    key: str = ""
    ca_file: Path | None = None
    hint: str = ""

    def __post_init__(self) -> None:
        if url_fault(self.url):
            shown = "" if "@" in self.url else f" {self.url[:200]}"
            raise ConfigError(
                f"--url{shown}: expected the base URL of a tier, such as {EDGE_URL}; a key goes into ${KEY_VARIABLE}"
            )

    @property
    def base(self) -> str:
        """The URL without a slash at its end."""
        return self.url.rstrip("/")

    def get(self, path: str) -> httpx.Response:
        """Ask, and return the reply, whatever its status but 401.

        Raises:
            ConfigError: `ca_file` cannot be used.
            ReplicaUnreachable: nothing answers there.
            Unauthenticated: the tier does not know the key.
        """
        return self._ask("GET", path)

    def post(self, path: str) -> httpx.Response:
        """Ask for something to be done; the same in all else."""
        return self._ask("POST", path)

    def _ask(self, method: str, path: str) -> httpx.Response:
        import httpx  # noqa: PLC0415 - a command that only shows its help asks nobody

        here = is_loopback(urlsplit(self.base).hostname or "")  # no proxy leads there
        secure = self.base.startswith("https:")
        verify: ssl.SSLContext | bool = client_context(self.ca_file, None, None) if secure else True
        try:
            reply = httpx.request(
                method,
                f"{self.base}{path}",
                headers={"authorization": f"Bearer {self.key}"} if self.key else {},
                timeout=_TIMEOUT_S,
                verify=verify,
                trust_env=not here,
            )
        except httpx.HTTPError as error:
            hint = f" {self.hint}" if self.hint else ""
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise ReplicaUnreachable(
                    f"{self.base} shows a certificate that is not trusted here ({error}): name its authority with "
                    f"--ca-file{hint}"
                ) from error
            raise ReplicaUnreachable(
                f"no tier answers at {self.base} ({error or type(error).__name__}): is it running, and is this its "
                f"address?{hint}"
            ) from error
        if reply.status_code == 401:
            known = f"the key in ${KEY_VARIABLE} is none of its own"
            remedy = known if self.key else f"put the key of the caller into ${KEY_VARIABLE}"
            raise Unauthenticated(f"{self.base} does not let this caller in: {remedy}")
        return reply

    def stranger(self) -> ReplicaUnreachable:
        """Return the error for a reply that no tier of this release gives."""
        return ReplicaUnreachable(f"what answers at {self.base} is no tier of Overspill, or one of another release")

    def odd(self, reply: httpx.Response) -> ReplicaUnreachable:
        """Return the error for a status that nobody expected."""
        return ReplicaUnreachable(f"{self.base} answered {reply.status_code} {reply.reason_phrase}")
