"""`overspill cloud keys add|list|set|revoke|seal`: the file of tenants and keys, which running tiers read again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from cloud_tier.config import load
from router.base.errors import ConfigError
from router.base.json_output import print_json
from router.tenants.certificate import certificate_digest
from router.tenants.keys_edit import NewKey, add_key, read_keys, revoke, seal, set_limits
from router.tenants.keys_file import KeyLine, KeysFile
from router.tenants.tenant import Limits, Role

app = typer.Typer(help="Who may use a tier: tenants, their limits and their keys.", no_args_is_help=True)

_File = Annotated[Path | None, typer.Option("--file", "-f", help="The keys file; without, auth.keys_file of --config.")]
_Config = Annotated[Path | None, typer.Option("--config", "-c", help="The tier's configuration.")]
_Priority = Annotated[int | None, typer.Option("--priority", help="The highest priority that it may claim.")]
_Requests = Annotated[int | None, typer.Option("--requests-per-minute", help="0 takes the bound away.")]
_Tokens = Annotated[int | None, typer.Option("--tokens-per-minute", help="Prompts and answers; 0: no bound.")]
_Concurrency = Annotated[int | None, typer.Option("--concurrency", help="Requests at once; 0: no bound.")]
_Budget = Annotated[int | None, typer.Option("--monthly-tokens", help="Of a calendar month of UTC; 0: no bound.")]
_Models = Annotated[list[str] | None, typer.Option("--model", help="A model, or a pattern; again for more. `*`: all.")]


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="The tenant; it need not be there yet.")],
    *,
    file: _File = None,
    config: _Config = None,
    device: Annotated[str, typer.Option("--device", help="The device whose key it is.")] = "",
    role: Annotated[Role, typer.Option("--role", help="What it opens beside inference.")] = Role.CALLER,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="A client certificate (PEM) that opens the tier instead.")
    ] = None,
    priority: _Priority = None,
    requests_per_minute: _Requests = None,
    tokens_per_minute: _Tokens = None,
    concurrency: _Concurrency = None,
    monthly_tokens: _Budget = None,
    models: _Models = None,
) -> None:
    """Make a key, and show it this once: only its digest is kept."""
    limits = _limits(priority, requests_per_minute, tokens_per_minute, concurrency, monthly_tokens, models)
    digest = None if certificate is None else _digest(certificate)
    key = add_key(_path(file, config), NewKey(name, device, role, digest), limits)
    typer.echo(key or f"the certificate opens the tier for {name}")
    if key:
        typer.echo("Keep it: it is not shown again. A running tier lets it in within a second.", err=True)


@app.command("set")
def change(
    name: Annotated[str, typer.Argument(help="The tenant.")],
    *,
    file: _File = None,
    config: _Config = None,
    priority: _Priority = None,
    requests_per_minute: _Requests = None,
    tokens_per_minute: _Tokens = None,
    concurrency: _Concurrency = None,
    monthly_tokens: _Budget = None,
    models: _Models = None,
) -> None:
    """Change the limits of a tenant."""
    limits = _limits(priority, requests_per_minute, tokens_per_minute, concurrency, monthly_tokens, models)
    if not limits:
        raise ConfigError("name a limit to change, such as --tokens-per-minute 100000")
    typer.echo(f"{name}: {_told(set_limits(_path(file, config), name, limits))}")


@app.command("list")
def show(
    *,
    file: _File = None,
    config: _Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show tenants, their limits and the ids of their keys."""
    found = read_keys(_path(file, config))
    if as_json:
        print_json(_as_json(found))
        return
    for name in _names(found):
        typer.echo(f"{name}: {_told(found.limits_of(name))}")
        for key in found.keys.values():
            if key.tenant == name:
                typer.echo(f"  {_line(key)}")


@app.command("revoke")
def take_away(
    what: Annotated[str, typer.Argument(help="The id of a key, as `list` shows it, or a tenant: all of its keys.")],
    *,
    file: _File = None,
    config: _Config = None,
) -> None:
    """Take keys away: a running tier refuses them within a second, and lets what runs end."""
    for key in revoke(_path(file, config), what):
        typer.echo(f"revoked {key.tenant} {_line(key)}")


@app.command("seal")
def hash_all(*, file: _File = None, config: _Config = None) -> None:
    """Replace keys that stand in the file in clear by their digests; who sends them notices nothing."""
    sealed = seal(_path(file, config))
    for key in sealed:
        typer.echo(f"sealed {key.tenant}")
    if not sealed:
        typer.echo("no key stands there in clear")


def _path(file: Path | None, config: Path | None) -> Path:
    if file is not None:
        return file
    named = load(config).auth.keys_file
    if named is None:
        raise ConfigError("no keys file: name one with --file, or, with --config, a file that has auth.keys_file")
    return Path(named).expanduser()


def _digest(certificate: Path) -> str:
    try:
        found = certificate_digest(certificate.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--certificate {certificate}: cannot be read: {error}") from None
    if found is None:
        raise ConfigError(f"--certificate {certificate}: is no certificate in PEM")
    return found


def _limits(  # noqa: PLR0917 - one for each option
    priority: int | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    concurrency: int | None,
    monthly_tokens: int | None,
    models: list[str] | None,
) -> dict[str, object]:
    """Fields of `Limits` to change: those that were given."""
    given: dict[str, object] = {} if priority is None else {"priority": priority}
    for field, value in (
        ("requests_per_minute", requests_per_minute),
        ("tokens_per_minute", tokens_per_minute),
        ("concurrency", concurrency),
        ("monthly_tokens", monthly_tokens),
    ):
        if value is not None:
            given[field] = value or None
    if models:
        given["models"] = () if models == ["*"] else tuple(models)
    return given


def _names(found: KeysFile) -> list[str]:
    return list(dict.fromkeys([*found.tenants, *(key.tenant for key in found.keys.values())]))


def _told(limits: Limits) -> str:
    given = [
        f"{name}={','.join(value) if isinstance(value, tuple) else value}"
        for name in Limits.__struct_fields__
        if (value := getattr(limits, name)) not in {None, ()}
    ]
    return " ".join(given) or "no limits"


def _line(key: KeyLine) -> str:
    words = [key.kind, key.short, key.role.value]
    words += [f"device={key.device}"] if key.device else []
    words += [f"since {key.created}"] if key.created else []
    words += ["in clear: run `overspill cloud keys seal`"] if key.clear else []
    return " ".join(words)


def _as_json(found: KeysFile) -> dict[str, Any]:
    return {
        "tenants": [
            {
                "name": name,
                "limits": msgspec.to_builtins(found.limits_of(name)),
                "keys": [
                    {
                        "id": key.short,
                        "kind": key.kind,
                        "device": key.device,
                        "role": key.role.value,
                        "created": key.created,
                        "in_clear": key.clear,
                    }
                    for key in found.keys.values()
                    if key.tenant == name
                ],
            }
            for name in _names(found)
        ]
    }
