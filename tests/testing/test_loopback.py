"""What tests serve on this machine is asked for here, whatever proxies there are."""

from __future__ import annotations

from urllib.request import proxy_bypass

import pytest

from cllm.testing.loopback import pass_by_proxies


@pytest.mark.parametrize(
    ("given", "passed_by"),
    [
        ({}, ["127.0.0.1:8080", "localhost"]),
        ({"no_proxy": "one.example"}, ["127.0.0.1:8080", "localhost", "one.example"]),
        ({"NO_PROXY": "one.example"}, ["127.0.0.1:8080", "localhost", "one.example"]),
        ({"NO_PROXY": "*"}, ["127.0.0.1:8080", "localhost", "one.example", "another.example"]),
    ],
    ids=str,
)
def test_no_proxy_is_asked_for_what_is_here_and_for_what_was_left_out_before(
    given: dict[str, str], passed_by: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # it is put back at the end, whatever is done with it
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    pass_by_proxies()
    hosts = ["127.0.0.1:8080", "localhost", "one.example", "another.example"]
    assert [host for host in hosts if proxy_bypass(host)] == passed_by
