"""GET /v1/requests/{id}: what happened to a request, and when; for the key that made it."""

from __future__ import annotations

from typing import Any

from quart import Blueprint, Response, g

from cllm.api.context import Context
from cllm.api.openai.shapes import json_response
from cllm.api.operations import Operation
from cllm.engine.timeline import Timeline
from cllm.errors import NotFound
from cllm.serve.records import Record

PATH = "/v1/requests/<path:request_id>"
OPERATIONS = (
    Operation(method="GET", path=PATH, about="what happened to a request, and when, by the id in its x-request-id header", also=(404,)),
)


def blueprint(context: Context) -> Blueprint:
    """The route."""
    routes = Blueprint("requests", __name__)

    @routes.get(PATH)
    async def request_timeline(request_id: str) -> Response:
        record = context.house.record(request_id, g.key)
        if record is None:
            raise NotFound("no request of this id is known to this key; the latest ones are kept", code="request_not_found")
        return json_response(_shape(record))

    return routes


def _shape(record: Record) -> dict[str, Any]:
    ended = all(timeline.ended for timeline in record.timelines)
    return {
        "id": record.request_id,
        "object": "request",
        "created": record.created,
        "state": "ended" if ended else "under_way",
        "events": [{"event": "received", "at_ms": 0.0}],
        "sequences": [
            {"index": i, "state": "ended" if timeline.ended else "under_way", "events": _events(timeline, record.received_at)}
            for i, timeline in enumerate(record.timelines)
        ],
    }


def _events(timeline: Timeline, received_at: float) -> list[dict[str, Any]]:
    """Times are since the request was received."""
    return [{"event": moment.what, "at_ms": round((moment.at - received_at) * 1000, 3), **moment.facts} for moment in timeline.moments]
