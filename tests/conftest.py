"""For all tests: a machine that is busy with something else is no failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import cache
from typing import NoReturn

import pytest
import structlog
import trio.testing
from hypothesis import HealthCheck, settings
from werkzeug.routing import Rule

from cllm.engine.cost import model as cost
from cllm.serve import loading
from cllm.testing.loopback import pass_by_proxies

pass_by_proxies()
for name in list(os.environ):  # a user's settings are none of a test's, nor of a server's that it starts
    if name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE") or (name.startswith("CLLM_") and name != "CLLM_REWRITE"):
        del os.environ[name]

# Whether a change may land does not depend on chance; `pytest --hypothesis-profile explore` tries something else every time.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=False)
settings.register_profile("cllm", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("cllm")


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """A shell's background job ignores Ctrl-C, and so would the processes that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured of models in tests is none of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def _no_url(*_: object, **__: object) -> NoReturn:
    raise AssertionError("nobody builds URLs")


@pytest.fixture(autouse=True, scope="session")
def _made_once() -> Iterator[None]:
    """What is the same for every server, and most of what it takes to make one, is made once for all that tests make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rule, "_compile_builder", lambda self, append_unknown=True: _no_url)
        patch.setattr(cost, "_table", cache(cost._table))
        patch.setattr(loading, "ChatTemplate", cache(loading.ChatTemplate))
        yield


@pytest.fixture
def slow_clock(mock_clock: trio.testing.MockClock) -> trio.testing.MockClock:
    """Trio's time passes when the test makes it jump, and else so slowly that a busy machine uses no time limit up."""
    mock_clock.rate = 0.1  # not 0: a test that hangs still ends
    return mock_clock


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Who configures logging gives it a stream that is closed when the test ends."""
    yield
    structlog.reset_defaults()
