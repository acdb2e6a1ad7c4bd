from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from tests.support.secured import Files


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path, trustme.CA())
