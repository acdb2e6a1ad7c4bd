"""The options that every command of `overspill fleet` takes: which broker, which fleet, as whom."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cloud_tier.fleet.broker import BrokerAddress, parse_broker
from router.base.errors import ConfigError

Broker = Annotated[str, typer.Option(envvar="OVERSPILL_FLEET_BROKER", help="host:port or mqtts://host:port.")]
Fleet = Annotated[str, typer.Option(envvar="OVERSPILL_FLEET_NAME", help="Name of the fleet.")]
Tls = Annotated[bool, typer.Option("--tls", envvar="OVERSPILL_FLEET_TLS", help="Use TLS (port 8883 by default).")]
CaFile = Annotated[
    Path | None, typer.Option("--ca", envvar="OVERSPILL_FLEET_CA", help="PEM of the broker's authority.")
]
CertFile = Annotated[Path | None, typer.Option("--cert", envvar="OVERSPILL_FLEET_CERT", help="PEM, own certificate.")]
KeyFile = Annotated[Path | None, typer.Option("--key", envvar="OVERSPILL_FLEET_KEY", help="PEM, own private key.")]
Username = Annotated[str | None, typer.Option(envvar="OVERSPILL_FLEET_USERNAME", help="Login at the broker.")]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        envvar="OVERSPILL_FLEET_PASSWORD_FILE", help="First line is the password (or OVERSPILL_FLEET_PASSWORD)."
    ),
]


@dataclass(frozen=True, slots=True)
class Reach:
    """Whom a command speaks to."""

    broker: BrokerAddress
    fleet: str


def _reach(
    *,
    broker: Broker = "127.0.0.1:1883",
    fleet: Fleet = "default",
    tls: Tls = False,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    username: Username = None,
    password_file: PasswordFile = None,
) -> Reach:
    """The options that every command takes."""
    host, port, secure = parse_broker(broker, tls=tls or any((ca_file, cert_file, key_file)))
    password = os.environ.get("OVERSPILL_FLEET_PASSWORD") or None
    if password_file is not None:
        try:
            password = password_file.read_text(encoding="utf-8").splitlines()[0]
        except (OSError, UnicodeDecodeError, IndexError) as error:
            raise ConfigError(f"cannot read a password from {password_file}: {error}", param="password_file") from error
    if password is not None and username is None:
        raise ConfigError("a password needs a --username", param="username")
    return Reach(BrokerAddress(host, port, secure, ca_file, cert_file, key_file, username, password), fleet)


def commands_of(app: typer.Typer) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a function a command with the options of `_reach` after its own.

    What they amount to is the function's `reach`.
    """
    common = inspect.signature(_reach, eval_str=True).parameters

    def command(act: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(act, eval_str=True)

        def run(**given: Any) -> None:
            reach = _reach(**{name: given.pop(name) for name in common})
            act(**given, reach=reach)

        listed = [parameter for name, parameter in own.parameters.items() if name != "reach"] + list(common.values())
        run.__signature__ = own.replace(parameters=listed)  # type: ignore[attr-defined]  # what typer reads
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in listed}
        app.command(name=act.__name__.rstrip("_"), help=act.__doc__)(run)
        return act

    return command
