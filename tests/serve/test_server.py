"""What the serving process does for itself, beside its tasks; the whole of it is started in tests/endtoend."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cllm.serve.garbage import spare_what_stays


@pytest.mark.parametrize(("soft", "hard", "then"), [(64, 1000, 1000), (64, 70_000, 65_536), (300, 300, 300)])
def test_it_may_have_as_many_files_open_as_the_system_lets_it(soft: int, hard: int, then: int) -> None:
    resource = pytest.importorskip("resource", reason="Windows has no such bounds")
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:  # below: any number
        pytest.skip(f"this system lets nobody have {hard} files open")
    code = f"""if True:
        import resource
        from cllm.descriptors import allow_descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
        allow_descriptors()
        print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(then), str(hard)]


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
