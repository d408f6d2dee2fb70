"""For all tests of the plugin: what they serve is on this machine."""

from __future__ import annotations

from cllm.testing.loopback import pass_by_proxies

pass_by_proxies()
