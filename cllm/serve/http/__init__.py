"""The HTTP server under the app: sockets, deadlines, disconnects, shutdown."""

from cllm.serve.http.asgi import wrap_asgi
from cllm.serve.http.config import HttpConfig
from cllm.serve.http.server import serve_http
from cllm.serve.http.traffic import Traffic

__all__ = ["HttpConfig", "Traffic", "serve_http", "wrap_asgi"]
