"""What goes over a server's connections, counted."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


@attrs.define(eq=False)
class Traffic(Collector):
    """Bytes of all connections, past ones included: heads and bodies, without what TLS adds to them."""

    n_bytes_in: int = 0
    n_bytes_out: int = 0

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        family = CounterMetricFamily("cllm_http_bytes", "Bytes over the HTTP server's connections, heads included", labels=["direction"])
        family.add_metric(["in"], self.n_bytes_in)
        family.add_metric(["out"], self.n_bytes_out)
        yield family
