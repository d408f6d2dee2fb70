"""What commands log is no part of what they show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs


@pytest.fixture(autouse=True)
def _logged_apart() -> Iterator[None]:
    with capture_logs():
        yield
