"""What GET / shows: the endpoints, to a program as JSON, to a browser as a page that loads nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from quart import Response

import cllm
from cllm.api.operations import Operation

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>cLLM</title><meta name="viewport" content="width=device-width">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem; color-scheme: light dark }}
td {{ padding: .15rem 1rem .15rem 0; vertical-align: top }} code, pre {{ font-family: ui-monospace, monospace }}
pre {{ overflow: auto; padding: 1rem; border: 1px solid }}
</style></head><body>
<h1>cLLM {version}</h1>
<p>This server speaks OpenAI's API. Try:</p>
<pre>curl -N http://THIS-HOST/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'</pre>
<table>{rows}</table>
</body></html>
"""
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "X-Content-Type-Options": "nosniff"}


def index(operations: Sequence[Operation]) -> dict[str, Any]:
    """For programs."""
    endpoints = [{"method": one.method, "path": one.public_path, "description": one.about} for one in _shown(operations)]
    return {"success": True, "data": {"name": "cLLM", "version": cllm.__version__, "endpoints": endpoints}}


def index_page(operations: Sequence[Operation]) -> Response:
    """For browsers."""
    rows = "".join([_row(one) for one in _shown(operations)])
    page = _PAGE.format(version=cllm.__version__, rows=rows)
    return Response(page, 200, _HEADERS, content_type="text/html; charset=utf-8")


def _shown(operations: Sequence[Operation]) -> Iterable[Operation]:
    return [one for one in operations if one.alias_of is None and one.path != "/"]


def _row(one: Operation) -> str:
    return f"<tr><td>{one.method}</td><td><code>{html.escape(one.public_path)}</code></td><td>{html.escape(one.about)}</td></tr>"
