"""What GET / shows: the endpoints, to a program as JSON, to a browser as a page that loads nothing else."""

from __future__ import annotations

import html
from typing import Any

from quart import Response

import cllm

ENDPOINTS = (
    ("POST", "/v1/chat/completions", "answer a conversation"),
    ("POST", "/v1/completions", "continue a text"),
    ("GET", "/v1/models", "what is served"),
    ("POST", "/generate", "continue a text, in the first cLLM's way"),
    ("POST", "/generate_stream", "the same as a stream"),
    ("POST", "/encode", "text to token ids"),
    ("POST", "/decode", "token ids to text"),
    ("GET", "/model/info", "facts about the model"),
    ("POST", "/benchmark", "measure the server, where the operator allows it"),
    ("POST", "/tokenize", "text or messages to token ids"),
    ("POST", "/detokenize", "token ids to text"),
    ("POST", "/apply-template", "messages to the prompt that the model sees"),
    ("GET", "/health", "whether the engine makes progress"),
    ("GET", "/ready", "whether a request would be accepted"),
    ("GET", "/metrics", "counters for Prometheus"),
    ("GET", "/slots", "the sequences under way"),
    ("GET", "/props", "settings and the chat template"),
    ("GET", "/version", "the server's version"),
)

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


def index() -> dict[str, Any]:
    """For programs."""
    endpoints = [{"method": method, "path": path, "description": about} for method, path, about in ENDPOINTS]
    return {"success": True, "data": {"name": "cLLM", "version": cllm.__version__, "endpoints": endpoints}}


def index_page() -> Response:
    """For browsers."""
    rows = "".join([f"<tr><td>{m}</td><td><code>{html.escape(p)}</code></td><td>{html.escape(a)}</td></tr>" for m, p, a in ENDPOINTS])
    page = _PAGE.format(version=cllm.__version__, rows=rows)
    return Response(page, 200, _HEADERS, content_type="text/html; charset=utf-8")
