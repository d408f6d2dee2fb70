"""`cllm pull`, `cllm models` and `cllm models remove`: the hub, and what is kept of it here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs

from cllm import hub
from cllm.download import OnBytes
from cllm.errors import SettingsError

OK: Final = 0
FAILED: Final = 1
GIB: Final = 1024**3


def _reference(text: str) -> hub.Reference:
    reference = hub.parsed(text)
    if reference is None:
        raise SettingsError(f"REFERENCE: expected USER/REPO or USER/REPO:QUANTISATION, not {text!r}")
    return reference


def pull(text: str) -> int:
    """Fetch, with a bar where somebody looks; print the path, and say if it is what was there before, since nothing could be fetched.

    That is a failure where a download had begun. Raises: SettingsError · HubFailed.
    """
    reference, has_begun = _reference(text), False
    with _bar(str(reference)) as on_bytes:

        def note(n: int, n_total: int) -> bool:
            nonlocal has_begun
            has_begun = True
            return on_bytes(n, n_total)

        path, why = hub.fetch(reference, note)
    if why:
        print(f"cllm: this is what the cache had: {why}", file=sys.stderr)
    print(path)
    return FAILED if why and has_begun else OK


@contextmanager
def _bar(name: str) -> Iterator[OnBytes]:
    if not sys.stderr.isatty():
        yield lambda _n, _total: True
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("pull", total=None)

        def on_bytes(n: int, n_total: int) -> bool:
            bar.update(task, completed=n, total=n_total)
            return True

        yield on_bytes


def list_models(*, as_json: bool) -> int:
    """Print what the cache holds."""
    models = hub.cached_models()
    if as_json:
        print(json.dumps([_facts(model) for model in models], indent=2))
    elif not models:
        print("no models in the cache; `cllm pull USER/REPO:Q4_K_M` fetches one", file=sys.stderr)
    else:
        width = max(len(str(model.reference)) for model in models)
        for model in models:
            print(f"{model.reference!s:{width}}  {model.size_bytes / GIB:7.2f} GiB  used {_ago(time.time() - model.used_at)} ago")
    return OK


def _facts(model: hub.CachedModel) -> dict[str, object]:
    return {**attrs.asdict(model, recurse=False), "reference": str(model.reference), "path": str(model.path)}


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} seconds"


def remove(text: str) -> int:
    """Remove from the cache; say how much that freed. Raises: SettingsError · HubFailed."""
    reference = _reference(text)
    print(f"removed {reference}: {hub.remove(reference) / GIB:.2f} GiB")
    return OK
