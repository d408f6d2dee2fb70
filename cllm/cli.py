"""The command line: what a person types, and the one line and exit code that a mistake is answered with.

Only parsing happens here; a command imports what it needs when it runs, so that `cllm --help` imports neither NumPy nor a backend.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Annotated, Final, Literal

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.help import DefaultFormatter, HelpPanel

from cllm import __version__
from cllm.bench.workloads import WorkloadName
from cllm.config import DEFAULT_SETTINGS, Settings, settings_of_models
from cllm.errors import CllmError, SettingsError
from cllm.sources import DEFAULTS, Sources

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

    from cllm.registry import Found

OK: Final = 0
FAILED: Final = 1  # could not do it
USAGE: Final = 2  # asked for something that cannot be
INTERRUPTED: Final = 130  # as a shell reports a death by SIGINT

EPILOGUE = """
Every setting can also come from the environment (`--ctx-size` is `CLLM_CTX_SIZE`; several values with commas between) or from a TOML file
(`ctx_size`) named by `--config`. A flag wins over the environment, that over the file.
"""


def _serve(settings: Settings = DEFAULT_SETTINGS) -> int:
    """Serve models over HTTP until SIGTERM or Ctrl-C.

    Exit codes: 0 after draining, 1 when the model cannot be loaded or the port is taken, 2 for a mistake in the settings, 70 when the
    engine died.
    """
    _check_backends(settings)
    from cllm.serve.server import run

    return run(settings)


def _check_backends(settings: Settings) -> None:
    """Refuse the name of a backend that is not installed, before anything is imported for it. Raises: SettingsError."""
    for one in settings_of_models(settings):
        if complaint := _missing_backend(one.backend):
            raise SettingsError(complaint, "backend" if one.backend == settings.backend else "models")


def _missing_backend(name: str) -> str:
    from cllm.registry import why_missing

    return "" if name == "auto" else why_missing(name)


_ANSWER = Parameter(group=Group("Answer", sort_key=0))


def _generate(
    prompt: Annotated[str, Parameter(help="what to ask; - reads it from standard input", allow_leading_hyphen=True)],
    /,
    *,
    system: Annotated[str | None, _ANSWER, Parameter(help="the system message", allow_leading_hyphen=True)] = None,
    max_tokens: Annotated[int | None, _ANSWER, Parameter(help="tokens at most (default: to the end of the context)", alias="-n")] = None,
    temperature: Annotated[float, _ANSWER, Parameter(help="0 always takes the likeliest token")] = 1.0,
    seed: Annotated[int | None, _ANSWER, Parameter(help="the same seed gives the same text")] = None,
    raw: Annotated[bool, _ANSWER, Parameter(help="continue the prompt as it is, without the model's chat template", negative="")] = False,
    settings: Settings = DEFAULT_SETTINGS,
) -> int:
    """Answer one prompt on the terminal, without a server."""
    if max_tokens is not None and max_tokens < 1:
        raise SettingsError(f"--max-tokens: must be at least 1, not {max_tokens}")
    if not 0 <= temperature < float("inf"):
        raise SettingsError(f"--temperature: must be 0 or more, not {temperature}")
    _refuse_several(settings)
    _check_backends(settings)
    from cllm.commands.generate import run

    text = sys.stdin.buffer.read().decode("utf-8", "replace") if prompt == "-" else prompt
    return run(settings, text, system=system, max_tokens=max_tokens, temperature=temperature, seed=seed, raw=raw)


def _calibrate(
    settings: Settings = DEFAULT_SETTINGS,
    *,
    plot: Annotated[str | None, Parameter(group=Group("Answer", sort_key=0), help="also draw the curve into this SVG file")] = None,
) -> int:
    """Measure what a model's steps cost on this machine, show it, and keep it for the server.

    `cllm serve` measures by itself when it finds nothing that was kept. Give it the settings that `cllm serve` will have: with others, the
    server measures anew.
    """
    _refuse_several(settings)
    _check_backends(settings)
    from cllm.commands.calibrate import run

    return run(settings, plot_path=plot)


def _refuse_several(settings: Settings) -> None:
    if settings.models:
        raise SettingsError("this command takes one model", "models")


_COMPARED = Parameter(group=Group("Comparison", sort_key=0))


def _verify(
    settings: Settings = DEFAULT_SETTINGS,
    *,
    reference: Annotated[str, _COMPARED, Parameter(help="the backend that counts as right")] = "llama-cpu",
    reference_model: Annotated[str | None, _COMPARED, Parameter(help="its file, where that is another one")] = None,
    text: Annotated[tuple[str, ...], _COMPARED, Parameter(help="a file with text; repeatable (default: six short ones)", negative="")] = (),
    text_tokens: Annotated[int, _COMPARED, Parameter(help="of each text at most")] = 96,
    json: Annotated[bool, _COMPARED, Parameter(help="print JSON", negative="")] = False,
) -> int:
    """Compare what a backend computes with what another does: how far its distributions of the next token are from the reference's.

    `--backend` says which one, and has to be said.

    The model computes texts with both, each with its own settings; at each token the Kullback-Leibler divergence is taken over the whole
    vocabulary. 0 means the same distribution.
    """
    _refuse_several(settings)
    if text_tokens < 2:
        raise SettingsError(f"--text-tokens: must be at least 2, not {text_tokens}")
    _check_backends(settings)
    if complaint := _missing_backend(reference):
        raise SettingsError(f"--reference: {complaint}")
    from cllm.commands.verify import Order, run

    return run(Order(settings, reference, reference_model, text, text_tokens), as_json=json)


def _backends(*, json: Annotated[bool, Parameter(help="print JSON", negative="")] = False) -> int:
    """List the backends: what computes models here, what could, and what it lacks."""
    from cllm.registry import probe_backends

    found = probe_backends()
    if json:
        _print_json(found)
    elif sys.stdout.isatty():
        _print_table(found)
    else:
        _print_plain(found)
    return OK


def _columns(one: Found) -> tuple[str, str, str, str]:
    return one.listed.name, f"{one.listed.distribution} {one.listed.version}", "yes" if one.available else "no", one.reason


def _print_json(found: Sequence[Found]) -> None:
    import json

    keys = ("name", "distribution", "version", "available", "reason", "preference")
    rows = [(o.listed.name, o.listed.distribution, o.listed.version, o.available, o.reason, o.preference) for o in found]
    print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))


def _print_table(found: Sequence[Found]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("backend", "distribution", "available", "what was found, or what it lacks", box=None, header_style="bold")
    for one in found:
        table.add_row(*(Text(text) for text in _columns(one)), style=None if one.available else "dim")
    Console().print(table)


def _print_plain(found: Sequence[Found]) -> None:
    rows = [_columns(one) for one in found]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    for *cells, reason in rows:
        print(*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), reason, sep="  ")


_LOAD = Parameter(group=Group("Load", sort_key=0))
_SERVER = Parameter(group=Group("Server", sort_key=1))
_OUTPUT = Parameter(group=Group("Output", sort_key=2))


# The names of --api-key and --model are not those of the settings, or the environment would take this for a command that serves.
def _bench(
    url: Annotated[str, Parameter(help="the server's address")] = "http://127.0.0.1:8080",
    /,
    *,
    workload: Annotated[WorkloadName, _LOAD, Parameter(help="what is sent")] = "seed-40x8",
    concurrency: Annotated[int | None, _LOAD, Parameter(help="requests at a time (default: the workload's)", alias="-c")] = None,
    rate: Annotated[float | None, _LOAD, Parameter(help="requests a second that arrive by chance, whatever is answered")] = None,
    requests: Annotated[int | None, _LOAD, Parameter(help="how many, or conversations (default: the workload's)", alias="-n")] = None,
    seed: Annotated[int | None, _LOAD, Parameter(help="the same seed sends the same requests (default: another each time)")] = None,
    sampling: Annotated[
        Literal["greedy", "plain", "usual"], _LOAD, Parameter(help="temperature 0; 1; or 0.8 with top_p 0.95 and top_k 40")
    ] = "greedy",
    stream: Annotated[bool, _LOAD, Parameter(help="ask for streams")] = True,
    endpoint: Annotated[Literal["completions", "chat"], _SERVER, Parameter(help="which of OpenAI's endpoints")] = "completions",
    key: Annotated[
        str | None, _SERVER, Parameter(name="--api-key", help="a key that the server wants (default: on this machine CLLM_API_KEY's first)")
    ] = None,
    served: Annotated[str | None, _SERVER, Parameter(name="--model", help="the model to ask for (default: the server's first)")] = None,
    goodput_ttft_s: Annotated[float, _OUTPUT, Parameter(help="a good answer's first text comes within this time")] = 4.0,
    goodput_itl_s: Annotated[float, _OUTPUT, Parameter(help="and its tokens at least this often on average")] = 0.25,
    json: Annotated[
        str | None, _OUTPUT, Parameter(help="write all figures and every request to this file; - prints them", allow_leading_hyphen=True)
    ] = None,
    plot: Annotated[str | None, _OUTPUT, Parameter(help="draw the latencies into this SVG file")] = None,
) -> int:
    """Put load on a server and measure it: cLLM, or any other with OpenAI's API.

    Prompts are token ids where the server takes them, so that their length is exact. Answers have as many tokens as asked where it knows
    `ignore_eos`.
    """
    import secrets

    from cllm.bench.command import make_order, run
    from cllm.bench.metrics import Goal

    order = make_order(
        url,
        workload=workload,
        concurrency=concurrency,
        n_requests=requests,
        rate=rate,
        endpoint=endpoint,
        api_key=key,
        local_key=_first_key(os.environ.get("CLLM_API_KEY")),
        model=served,
        seed=secrets.randbits(31) if seed is None else seed,
        sampling=sampling,
        is_stream=stream,
        goal=Goal(goodput_ttft_s, goodput_itl_s),
        json_path=json,
        plot_path=plot,
    )
    return run(order)


def _first_key(keys: str | None) -> str | None:
    """A key of those that a server reads from its variable, with what each may take behind it."""
    return keys and keys.partition(",")[0].strip().partition(" ")[0]


_SECTIONS_OF_A_SERVER: Final = frozenset({"Requests", "Network"})
_OF_A_SERVER: Final = frozenset(
    {
        "--models",
        "--models-memory-mb",
        "--lora-dir",
        "--grace-s",
        "--log-prompts",
        "--metrics-aliases",
        "--enable-benchmark",
        "--enable-admin",
    }
)


_OF_VECTORS: Final = frozenset(
    {"--embeddings", "--embedding-model", "--embedding-alias", "--embedding-ctx-size", "--embedding-slice-ms", "--pooling"}
)
_OF_WHAT_IS_KEPT: Final = frozenset({"--calibrate", "--calibration-dir", "--cache-dir", "--cache-dir-mb"})
_OF_WHAT_IS_SCHEDULED: Final = frozenset(
    {
        "--parallel",
        "--ctx-max",
        "--host-cache-mb",
        "--row-budget",
        "--itl-max-ms",
        "--itl-target-ms",
        "--chat-template-file",
        "--tool-format",
    }
)


class _WithoutServer(DefaultFormatter):
    """Leaves out of the help page what means nothing without a server, and `more`; these options are still read."""

    def __init__(self, more: AbstractSet[str]) -> None:
        super().__init__()
        self._left_out = _OF_A_SERVER | _OF_VECTORS | more

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if panel.title not in _SECTIONS_OF_A_SERVER:
            entries = [entry for entry in panel.entries if self._left_out.isdisjoint(entry.positive_names)]
            super().__call__(console, options, panel.copy(entries=entries))


_REFERENCE = Annotated[str, Parameter(help="USER/REPO, USER/REPO:QUANTISATION as in :Q4_K_M, or USER/REPO:FILE.gguf")]


def _pull(reference: _REFERENCE, /) -> int:
    """Fetch a model from the Hugging Face hub into the cache; `cllm serve` with the same reference does it too.

    HF_HOME says where the cache is, HF_TOKEN who asks, HF_HUB_OFFLINE=1 that nobody does.
    """
    from cllm.commands.models import pull

    return pull(reference)


def _models(*, json: Annotated[bool, Parameter(help="print JSON", negative="")] = False) -> int:
    """List the models in the cache, the last used first."""
    from cllm.commands.models import list_models

    return list_models(as_json=json)


def _remove(reference: _REFERENCE, /) -> int:
    """Remove a model from the cache; without a quantisation, all of its repository."""
    from cllm.commands.models import remove

    return remove(reference)


def make_app(sources: Sources) -> App:
    """Return the command line, reading what it is not told from `sources`."""
    app = App(
        name="cllm",
        help="Serve large language models over HTTP.",
        help_epilogue="`cllm serve` alone serves a small demo model on http://127.0.0.1:8080; `cllm serve --help` lists all settings.",
        version=f"cllm {__version__}",
        config=sources,
        default_parameter=DEFAULTS,
        result_action="return_value",
    )
    app.command(_serve, name="serve", help_epilogue=EPILOGUE)
    for command, name, ignored in (
        (_generate, "generate", {"--alias", *_OF_WHAT_IS_KEPT}),
        (_calibrate, "calibrate", {"--calibrate"}),
        (_verify, "verify", {"--alias", "--isolate", "--watchdog-s", *_OF_WHAT_IS_KEPT, *_OF_WHAT_IS_SCHEDULED}),
    ):
        app.command(command, name=name, help_epilogue=EPILOGUE, help_formatter=_WithoutServer(ignored))
    app.command(_bench, name="bench", help_epilogue="")
    app.command(_backends, name="backends", help_epilogue="")
    app.command(_pull, name="pull", help_epilogue="")
    models = App(name="models", help="List the models in the cache, or remove one.", help_epilogue="", default_command=_models)
    models.command(_remove, name="remove", help_epilogue="")
    app.command(models)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    from cllm.serve.stdio import prepare

    prepare()
    try:
        sys.exit(run(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BaseExceptionGroup as group:  # from within nurseries
        if group.subgroup(KeyboardInterrupt) is None:
            raise
        sys.exit(INTERRUPTED)


def run(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code."""
    sources = Sources(is_ended="--" in arguments)
    app = make_app(sources)
    try:
        command, bound, _ = app.parse_args(list(arguments), print_error=False, exit_on_error=False)
    except (CycloptsError, SettingsError) as error:
        return _complain(sources.explain(error), USAGE)
    return _call(lambda: command(*bound.args, **bound.kwargs), sources)


def _call(command: Callable[[], int | None], sources: Sources) -> int:
    try:
        code = command() or OK
        sys.stdout.flush()  # while it can still be said what becomes of it
        return code
    except SettingsError as error:
        return _complain(sources.explain(error), USAGE)
    except CllmError as error:
        return _complain(" ".join(str(error).split()), FAILED)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
            raise
        from cllm.serve.stdio import let_go_of

        let_go_of(sys.stdout)
        return FAILED if error.errno == errno.EPIPE else _complain(f"{error.strerror}", FAILED)  # its reader has seen enough


def _complain(line: str, code: int) -> int:
    print(f"cllm: {line}", file=sys.stderr)
    return code
