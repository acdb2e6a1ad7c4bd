"""The `[fleet]` table of the agent's configuration: which broker, who am I, how often do I speak."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path
from typing import Annotated

import msgspec

from router.base.errors import ConfigError
from router.base.tls import client_context
from router.fleetwire.topics import Address, check_name

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class FleetTls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """TLS to the broker: always verified, host name included; a client certificate is the device's identity.

    Attributes:
        ca_file: PEM of the authority that signed the broker's certificate; the system's store if left out.
        cert_file, key_file: the device's own certificate and key, both or neither.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together: give both or neither")

    def context(self) -> ssl.SSLContext:
        """Build the context.

        Raises:
            ConfigError: a file is missing or holds something else.
        """
        return client_context(self.ca_file, self.cert_file, self.key_file)


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the agent takes part in a fleet.

    Attributes:
        enabled: without it the agent never opens a connection to a broker.
        fleet, device: the device's address; `device` defaults to the host name.
        username, password_file: password login; the file's first line is the password. Needs TLS beyond loopback.
        state_dir: last good configuration, birth counter and outbox; default `$XDG_STATE_HOME/overspill/fleet`.
        telemetry_interval_s: mean distance of snapshots; each is jittered by ± 20 %.
        telemetry_qos: 0 sends when connected and forgets; 1 goes through the outbox and arrives at least once.
        keepalive_s: a dead connection is noticed after 1.5 times this, and at once where the device left its network.
        session_expiry_s: how long the broker keeps commands for an absent device.
        will_delay_s: the broker announces a lost device after this, unless it is back before.
        reconnect_min_s, reconnect_max_s: back-off between connections, doubled each time and jittered.
        takeover_min_s: back-off when another client took this device's session.
        apply_timeout_s: a configuration that is not in force after this is refused.
        outbox_max_rows, outbox_max_bytes: bounds of the store-and-forward outbox; oldest telemetry leaves first.
    """

    enabled: bool = False
    host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 1883
    tls: FleetTls | None = None
    username: str | None = None
    password_file: str | None = None
    fleet: str = "default"
    device: str = ""
    state_dir: str | None = None
    telemetry_interval_s: Seconds = 30.0
    telemetry_qos: Annotated[int, msgspec.Meta(ge=0, le=1)] = 1
    keepalive_s: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 30
    session_expiry_s: Annotated[int, msgspec.Meta(ge=0, le=30 * 86400)] = 86400
    will_delay_s: Annotated[int, msgspec.Meta(ge=0, le=3600)] = 5
    connect_timeout_s: Seconds = 10.0
    reconnect_min_s: Seconds = 1.0
    reconnect_max_s: Seconds = 120.0
    takeover_min_s: Seconds = 30.0
    apply_timeout_s: Seconds = 600.0
    outbox_max_rows: Annotated[int, msgspec.Meta(ge=16, le=100_000_000)] = 20_000
    outbox_max_bytes: Annotated[int, msgspec.Meta(ge=256 * 1024, le=1 << 40)] = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        try:
            check_name(self.fleet, "fleet")
            if self.device:
                check_name(self.device, "device")
        except ConfigError as error:
            raise ValueError(error.message) from error
        if self.reconnect_max_s < self.reconnect_min_s:
            raise ValueError("reconnect_max_s is below reconnect_min_s")
        if self.password_file is not None and self.username is None:
            raise ValueError("password_file needs a username")

    def address(self) -> Address:
        """Return who this device is.

        Raises:
            ConfigError: no `device` is set and the host name cannot stand in.
        """
        if self.device:
            return Address(self.fleet, self.device)
        try:
            return Address(self.fleet, socket.gethostname().split(".")[0])
        except ConfigError as error:
            raise ConfigError(
                f"fleet.device is not set and the host name cannot stand in: {error}", param="fleet.device"
            ) from error

    def state_path(self) -> Path:
        """Return the folder of this device's state; it may not exist yet."""
        address = self.address()
        if self.state_dir is not None:
            root = Path(self.state_dir).expanduser()
        else:
            home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
            root = Path(home).expanduser() / "overspill" / "fleet"
        return root / address.fleet / address.device

    def password(self) -> str | None:
        """Read the password.

        Raises:
            ConfigError: the file cannot be read or is empty.
        """
        if self.password_file is None:
            return None
        path = Path(self.password_file).expanduser()
        try:
            first = path.read_text(encoding="utf-8").splitlines()[:1]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"fleet.password_file: cannot read {path}: {error}", param="fleet.password_file"
            ) from error
        if not first or not first[0]:
            raise ConfigError(f"fleet.password_file: {path} is empty", param="fleet.password_file")
        return first[0]
