"""The `[jobs]` table: what would be no jobs, or no limit, is refused."""

from __future__ import annotations

import pytest

from router.base.config import decode
from router.base.errors import ConfigError
from router.jobs.settings import JobsSettings


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"database": "sqlite:///jobs.db"}, "database needs dir too"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(table: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        decode(table, JobsSettings, source="a test")
