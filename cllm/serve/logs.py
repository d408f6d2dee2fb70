"""Where log lines go and how they look: standard error, for eyes or as JSON; foreign loggers' lines too."""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import warnings

import structlog

from cllm.config import Settings
from cllm.serve.stdio import lossy_stderr


def configure_logging(settings: Settings) -> None:
    """Set up logging for the whole process."""
    stderr = lossy_stderr(_lost) if settings.log_format == "json" else lossy_stderr()  # no line is worth a server
    level = getattr(logging, settings.log_level.upper())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderers = _renderers(settings)
    structlog.configure(
        processors=[*shared, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(stderr),  # which writes a line at once, not its end after it
        cache_logger_on_first_use=False,  # loggers are module globals, made before this runs
    )
    logging.captureWarnings(True)
    # Python's parser warns of what models write (`"\d"`), once for each, in lines of its own that would wait for a reader.
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    handler = logging.StreamHandler(stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=[_drop_record, *renderers], foreign_pre_chain=shared))
    logging.basicConfig(level=max(level, logging.WARNING) if level > logging.DEBUG else level, handlers=[handler], force=True)


def _lost(n_writes: int) -> str:
    at = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"n_writes": n_writes, "event": "log.lost", "level": "warning", "timestamp": at})


def _renderers(settings: Settings) -> list[structlog.typing.Processor]:
    """What makes text of an event. Tracebacks come without local variables, among which are prompts, answers and keys."""
    if settings.log_format == "json":
        traceback = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [structlog.processors.ExceptionRenderer(traceback), structlog.processors.JSONRenderer()]
    colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    drawn = structlog.dev.RichTracebackFormatter(show_locals=False, color_system="truecolor" if colors else None)
    return [_escape, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=drawn)]


def _escape(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Write out control characters and ends of lines in what a client may have a say in, as a path: a terminal would do what they say."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = "".join([c if c.isprintable() else ascii(c)[1:-1] for c in value])
    return event


def _drop_record(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    del event["_record"], event["_from_structlog"]
    return event
