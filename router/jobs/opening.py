"""From configuration to the jobs of a tier. Only a tier that keeps them pays for SQLAlchemy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from router.base.clock import Clock
from router.base.credentials import secret
from router.base.store_place import folder_fault
from router.jobs.settings import JobsSettings

if TYPE_CHECKING:
    from router.jobs.jobs import Jobs
    from router.jobs.slack import Replicas


def open_jobs(settings: JobsSettings, clock: Clock, replicas: Replicas, max_line_bytes: int) -> Jobs | None:
    """Return the jobs of a tier, None where its settings name no folder.

    Raises:
        ConfigError: an environment variable that is to hold the database's URL or the secret is not set.
    """
    if not settings.dir:
        return None
    from router.jobs.jobs import Jobs  # noqa: PLC0415 - it imports SQLAlchemy
    from router.jobs.webhook import key_of  # noqa: PLC0415

    database = secret(settings.database, "jobs.database")
    webhook_secret = secret(settings.webhook_secret, "jobs.webhook_secret")
    key_of(webhook_secret)
    return Jobs(
        settings, clock, replicas, database=database, webhook_secret=webhook_secret, max_line_bytes=max_line_bytes
    )


def check_jobs(settings: JobsSettings) -> None:
    """Look at what the jobs of `open_jobs` could not be kept in; makes and changes nothing.

    Raises:
        ConfigError: the folder or the database cannot be used, or as `open_jobs`.
    """
    if not settings.dir:
        return
    from router.jobs.database import Database  # noqa: PLC0415 - as above
    from router.jobs.folder import unusable  # noqa: PLC0415
    from router.jobs.webhook import key_of  # noqa: PLC0415

    database = secret(settings.database, "jobs.database")
    key_of(secret(settings.webhook_secret, "jobs.webhook_secret"))
    folder = Path(settings.dir).expanduser()
    if why := folder_fault(folder):
        raise unusable(folder, why)
    if database:
        Database.look(database)
