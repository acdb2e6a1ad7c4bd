"""What is behind a device: its upstream tier, and the servers of `[[backends]]`."""

from __future__ import annotations

from edge_agent.config import EdgeConfig, UpstreamSettings
from router.base.config import file_of
from router.base.credentials import secret
from router.signals.link import Link, LinkPrior
from router.upstream.servers.foreign import Surroundings
from router.upstream.servers.polled import ServerOptions
from router.upstream.servers.tier import IDLE_CONNECTION_S, TOKEN_BYTES, UpstreamTier
from router.upstream.source import ReplicaSource
from router.upstream.sources import backend_sources


def sources_behind(config: EdgeConfig, surroundings: Surroundings) -> list[ReplicaSource]:
    """Make the source of the upstream, where there is one, and of every `[[backends]]` entry.

    Raises:
        ConfigError: a URL, a key or a TLS file is wrong.
    """
    sources = backend_sources(config.backends, surroundings)
    return [_tier(config.upstream, surroundings), *sources] if config.upstream.url else sources


def _tier(settings: UpstreamSettings, surroundings: Surroundings) -> UpstreamTier:
    return UpstreamTier(
        settings.url,
        link=Link(settings.url.rstrip("/"), _link_prior(settings), surroundings.clock),
        clock=surroundings.clock,
        options=ServerOptions(
            api_key=secret(settings.api_key, "upstream.api_key") or None,
            poll_interval_s=settings.poll_interval_s,
            idle_poll_interval_s=settings.unused_poll_s,
            ca_file=file_of(settings.ca_file),
            client_cert=file_of(settings.client_cert),
            client_key=file_of(settings.client_key),
            connect_timeout_s=settings.connect_timeout_s,
            keepalive_expiry_s=IDLE_CONNECTION_S,
        ),
        hooks=surroundings.hooks,
    )


def _link_prior(settings: UpstreamSettings) -> LinkPrior:
    return LinkPrior(
        uplink_bytes_per_s=settings.uplink_mbps * 125_000,
        downlink_bytes_per_s=settings.downlink_mbps * 125_000,
        token_bytes=TOKEN_BYTES,
        connect_round_trips=2 if settings.url.startswith("https:") else 1,
        price_per_byte=settings.price_per_mbyte / 1e6,
    )
