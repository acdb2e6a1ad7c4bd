"""What the store of jobs refuses, as a caller is told."""

from __future__ import annotations

from router.base.errors import InvalidRequest, Shed, Unavailable


class NoSuchJob(InvalidRequest):
    """A file, batch or deferred request that is not there, or is somebody else's: nobody can tell which."""

    status = 404
    code = "not_found"


class QuotaReached(Shed):
    """The caller keeps as much here as it may."""

    code = "quota_reached"


class StorageFailed(Unavailable):
    """What jobs need cannot be read or written now: the disk does not let it, or the database."""

    code = "storage_failed"


class StorageFull(StorageFailed):
    """There is no room on the disk, or it cannot be written."""

    code = "storage_full"


class FileTooLarge(InvalidRequest):
    """The file is larger than this tier keeps."""

    status = 413
    code = "file_too_large"
