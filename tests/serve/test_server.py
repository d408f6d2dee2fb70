"""What the serving process does for itself, beside its tasks; the whole of it is started in tests/endtoend."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from cllm.serve.garbage import spare_what_stays


class Node:
    """Something that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[None]:
    """The garbage collector, which looks through everything before and after, whatever servers other tests ran here."""
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("collector")
def test_a_full_collection_passes_by_what_was_there_when_the_server_was_ready() -> None:
    before = Node()
    assert any(one is before for one in gc.get_objects())
    spare_what_stays()
    after = Node()
    looked_through = gc.get_objects()
    assert not any(one is before for one in looked_through)
    assert any(one is after for one in looked_through)
