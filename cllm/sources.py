"""Where settings come from: the command line, the environment, a TOML file, all read by one rule and in this order of precedence."""

from __future__ import annotations

import itertools
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import cyclopts
from cyclopts import (
    App,
    Argument,
    ArgumentCollection,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
)

from cllm.checks import at_home
from cllm.config import DEFAULT_SETTINGS, GGUF, Settings, did_you_mean, is_path, reason, variable
from cllm.errors import SettingsError
from cllm.hub import reference_of


def _texts(value: Any) -> list[str]:
    """Return a TOML value as the words that would follow its flag. Raises: TypeError for dates, and for tables outside of a list."""
    if isinstance(value, list):
        return [text for item in value for text in ([_table(item)] if isinstance(item, dict) else _texts(item))]
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if isinstance(value, str | int | float):
        return [str(value)]
    raise TypeError(type(value).__name__)


def _table(table: dict[str, Any]) -> str:
    """A table as the one word by which a flag would take it: JSON. Raises: TypeError for what JSON has not."""
    return json.dumps(table)


def read_toml(path: str) -> dict[str, list[str]]:
    """Return the settings in a TOML file as words. Raises: SettingsError."""
    try:
        table = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not TOML
        raise SettingsError(f"cannot read {path}: {reason(error)}", "config") from error
    names = [field.name for field in attrs.fields(Settings) if field.name != "config"]  # a file names no other one
    words = {}
    for key, value in table.items():
        if key not in names:
            raise SettingsError(f"{key} in {path} is not a setting{did_you_mean(key, names)}")
        try:
            words[key] = _texts(value)
        except TypeError as error:
            raise SettingsError(f"{key} in {path} must be a string, a number, a boolean or a list of them") from error
    return words


class Sources:
    """Gives cyclopts the words that the environment and the TOML file have for options without a flag.

    cyclopts' own sources match variables by prefix (CLLM_PORT_X sets the port), and do not see a misspelt table.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, *, is_ended: bool = False) -> None:
        """`is_ended` says that a `--` ends the options: what looks like one may be a text."""
        self.environ = environ
        self._is_ended = is_ended
        self._origins: dict[str, str] = {}
        self._takes_model = False

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        fields = {field.name for field in attrs.fields(Settings)}
        options = {argument.field_info.name: argument for argument in arguments if argument.field_info.name in fields}
        if not options:  # a command without settings
            return
        self._takes_model = "model" in options
        if not self._is_ended:
            _check_texts(arguments)
        _check_switches(options)
        for field, argument in options.items():
            self._fill(argument, self._from_environment(argument, field), variable(field))
        self._remember(options)
        _at_home(options)
        if options["config"].tokens:
            path = options["config"].tokens[0].value
            words = read_toml(path)
            for field, argument in options.items():
                self._fill(argument, words.get(field, []), f"{field} in {path}")
            self._remember(options)
            _at_home(options)
        self._check_keys(options)

    def _check_keys(self, options: Mapping[str, Argument]) -> None:
        """Refuse a variable that is to hold the keys and holds nothing, as where what it is made of is missing: all would be let in."""
        fields = ("api_key", "api_key_file")
        if not any(options[field].tokens for field in fields):
            for name in (variable(field) for field in fields):
                if name in self.environ:
                    raise SettingsError(f"{name}: is empty: unset it to serve without keys")

    def _from_environment(self, argument: Argument, field: str) -> list[str]:
        text = self.environ.get(variable(field), "").strip()  # an empty variable counts as not set
        if not text:
            return []
        return [item.strip() for item in text.split(",")] if _is_list(argument) else [text]

    def _fill(self, argument: Argument, words: Sequence[str], keyword: str) -> None:
        if argument.tokens:  # an earlier source has it
            return
        if len(words) > 1 and not _is_list(argument):
            raise SettingsError(f"{keyword}: takes one value, not {len(words)}")
        for index, word in enumerate(words):
            argument.append(Token(keyword=keyword, value=word, index=index))

    def _remember(self, options: Mapping[str, Argument]) -> None:
        self._origins = {field: argument.tokens[0].keyword or "MODEL" for field, argument in options.items() if argument.tokens}

    def explain(self, error: SettingsError | CycloptsError) -> str:
        """Return one line that names the flag, variable or key that the value at fault came from."""
        if isinstance(error, CycloptsError) and (option := _option_of_others(error)) is not None:
            return f"Unknown option: {option}. {ELSEWHERE[option]}"
        if isinstance(error, UnusedCliTokensError):
            unused = error.unused_tokens or []
            hint = "; a model is named by --model" if self._takes_model and _is_model(unused[:1]) else ""
            return f"one argument too many: {' '.join(unused)}{hint}"
        if isinstance(error, CycloptsError) or error.field is None:
            return " ".join(str(error).split()) + _way_off(error)
        return f"{self._origins.get(error.field, error.field)}: {error.message}"


ELSEWHERE: Final = {  # options of llama-server and vLLM that people bring along, where none of ours is like them
    "--max-model-len": "Here it is --ctx-max; -c is the cells of all requests together",
    "--max-num-seqs": "Here it is --parallel",
    "--max-num-batched-tokens": "Here it is --batch-size",
    "--gpu-memory-utilization": "Here -ngl says how many layers, else all that fit; -c how many cells, else a quarter of what is then free",
    "--tensor-parallel-size": "Here several GPUs share the layers, -ts divides them otherwise; there is no tensor parallelism",
    "-tp": "Here several GPUs share the layers, -ts divides them otherwise; there is no tensor parallelism",
    "--served-model-name": "Here it is --alias",
    "-a": "Here it is --alias",
    "-hf": "Here the model stands in its place: cllm serve USER/REPO:Q4_K_M",
    "--hf-repo": "Here the model stands in its place: cllm serve USER/REPO:Q4_K_M",
    "--enable-auto-tool-choice": "Here tools are read as the model's template writes them; --tool-format names another form",
    "--tool-call-parser": "Here tools are read as the model's template writes them; --tool-format names another form",
    "--reasoning-parser": "Here reasoning is read as the model's template writes it",
    "--reasoning-format": "Here reasoning is read as the model's template writes it",
    "--jinja": "Here the model's template is always used; --chat-template-file names another",
    "--chat-template": "Here it is --chat-template-file",
    "--cache-ram": "Here it is --host-cache-mb",
    "-cram": "Here it is --host-cache-mb",
    "-kvu": "Here it is --kv unified",
    "--kv-unified": "Here it is --kv unified",
    "-no-kvu": "Here it is --kv streams",
    "--no-kv-unified": "Here it is --kv streams",
    "--lora-scaled": "Here it is --lora FILE:SCALE",
    "--metrics": "Here /metrics is always there",
    "--slots": "Here /slots is always there",
    "-cb": "Here batches are always re-formed at every step",
    "--cont-batching": "Here batches are always re-formed at every step",
    "--enable-prefix-caching": "Here it is always on; --no-prefix-cache is without",
    "--temp": "Here requests say it, as temperature, and generate by --temperature; --sampling-defaults says what holds where none is said",
    "--top-k": "Here requests say it, as top_k; --sampling-defaults says whose values hold for what they leave out",
    "--top-p": "Here requests say it, as top_p; --sampling-defaults says whose values hold for what they leave out",
    "-n": "Here requests say it, as max_tokens, and generate by --max-tokens",
    "--predict": "Here requests say it, as max_tokens, and generate by --max-tokens",
    "--n-predict": "Here requests say it, as max_tokens, and generate by --max-tokens",
    "--slot-save-path": "Here it is --cache-dir: what is cached outlives the server by itself",
    "--no-webui": "Here there is no page to leave out",
    "-ot": "Here -ngl says how many whole layers are on the GPU; experts cannot be elsewhere than their layer",
    "--override-tensor": "Here -ngl says how many whole layers are on the GPU; experts cannot be elsewhere than their layer",
    "-cmoe": "Here -ngl says how many whole layers are on the GPU; experts cannot be elsewhere than their layer",
    "--cpu-moe": "Here -ngl says how many whole layers are on the GPU; experts cannot be elsewhere than their layer",
    "-ncmoe": "Here -ngl says how many whole layers are on the GPU; experts cannot be elsewhere than their layer",
    "--n-cpu-moe": "Here -ngl says how many whole layers are on the GPU; experts cannot be elsewhere than their layer",
    "--no-mmproj": "Images are not read here",
    "--mmproj": "Images are not read here",
    "-mm": "Images are not read here",
    "-md": "There are no drafts by a smaller model here",
    "--model-draft": "There are no drafts by a smaller model here",
    "--draft-model": "There are no drafts by a smaller model here",
    "--rope-scaling": "Here positions are as the file says; gguf-set-metadata, of the package gguf, changes that",
    "--override-kv": "Here values are as the file says; gguf-set-metadata, of the package gguf, changes them",
}


def _option_of_others(error: CycloptsError) -> str | None:
    """The option of another server's that led to `error`, if one did."""
    if isinstance(error, UnknownOptionError):
        words = [error.token.keyword or error.token.value]
    else:  # with one hyphen it was read as a short option of ours and its value: -md as -m d
        given = itertools.takewhile(lambda word: word != "--", error.root_input_tokens or ())
        words = [word for word in given if not word.startswith("--") and len(word.partition("=")[0]) > 2]  # -n is one of ours elsewhere
    return next((option for option in (word.partition("=")[0] for word in words) if option in ELSEWHERE), None)


_OPTION: Final = re.compile(r"--?[A-Za-z][\w-]*(?:=.*)?", re.DOTALL)  # and no text that begins with a hyphen, as an item of a list does


def _check_texts(arguments: ArgumentCollection) -> None:
    """Refuse an option that was taken for a text, where that may begin with a hyphen. Raises: CycloptsError."""
    for argument in arguments:
        words = [token for token in argument.tokens if argument.parameter.allow_leading_hyphen and _OPTION.fullmatch(token.value)]
        for token in words:
            if token.keyword is not None:
                raise MissingArgumentError(argument=argument)
            unknown = Token(keyword=token.value.partition("=")[0], source="cli")
            raise UnknownOptionError(token=unknown, argument_collection=arguments)


def _check_switches(options: Mapping[str, Argument]) -> None:
    """Refuse the word behind a switch that was taken for a model. Raises: SettingsError."""
    words = [token.value for field in ("model", "models") for token in options[field].tokens if token.keyword is None]
    for word in words:
        if word.lower() in ("on", "off", "true", "false") and not os.path.exists(word):
            raise SettingsError(f"MODEL: there is no {word}, and a switch takes no value; --no-... switches it off, as --no-mmap")


def _way_off(error: Exception) -> str:
    """How a switch is switched off, where `error` is of one with a value that the command line's parser does not know."""
    if not isinstance(error, CoercionError) or error.target_type is not bool or error.argument is None or error.token is None:
        return ""
    names = error.argument.negatives if (error.token.keyword or "").startswith("--") else ()
    return f" {names[0]} switches it off." if names else ""


def _is_model(words: Sequence[str]) -> bool:
    """Whether a word looks like a model where a command takes none by its place, as `cllm generate`, whose argument is what is asked."""
    return any(word.lower().endswith(GGUF) or reference_of(word) for word in words)


def _at_home(options: Mapping[str, Argument]) -> None:
    for field, argument in options.items():
        if is_path(field):
            argument.tokens[:] = [token.evolve(value=at_home(token.value)) for token in argument.tokens]


def _is_list(argument: Argument) -> bool:
    return bool(argument.hint == tuple[str, ...])


def convert(hint: Any, tokens: Sequence[Token]) -> Any:
    """Convert as cyclopts does, except that a fraction is not rounded to a whole number, and that `on` and `off` are booleans too."""
    word = tokens[0].value
    if hint in (int, int | None):
        try:
            return int(word)
        except ValueError as error:
            raise ValueError(f'"{word}" is not a whole number.') from error
    if hint is bool and word.lower() in ("on", "off"):
        return word.lower() == "on"
    return cyclopts.convert(hint, tokens)


def _shown_default(value: Any) -> str | None:
    """Return a default as the help page shows it; an empty list and a switch that is off need no words."""
    if value is True:
        return "yes"
    return str(value) if value or (value == 0 and value is not False) else None


DEFAULTS = Parameter(negative_iterable=(), converter=convert, show_default=_shown_default)
"""How every option is read and shown: there is no `--empty-lora`, and a fraction is not a whole number."""


def load_settings(arguments: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of a command line without commands, the environment and the TOML file that these name.

    Raises: SettingsError, whose text names the flag, variable or key at fault.
    """
    sources = Sources(environ)
    app = App(config=sources, default_parameter=DEFAULTS, help_flags=(), version_flags=())

    @app.default
    def settings_only(settings: Settings = DEFAULT_SETTINGS) -> Settings:
        return settings

    try:
        command, bound, _ = app.parse_args(arguments, print_error=False, exit_on_error=False)
    except (CycloptsError, SettingsError) as error:
        raise SettingsError(sources.explain(error)) from error
    settings: Settings = command(*bound.args, **bound.kwargs)
    return settings
