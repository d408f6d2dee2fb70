"""The settings: where they come from, which source wins, and what a mistake is answered with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import attrs
import pytest

from cllm import backend, config
from cllm.config import (
    DEFAULT_SETTINGS,
    Settings,
    api_keys,
    embedding_names_of,
    name_of_model,
    settings_of_models,
    variable,
    warnings,
    with_keys_read,
)
from cllm.engine.sampling.params import SamplingProfile
from cllm.errors import SettingsError
from cllm.serve.spec import model_spec
from cllm.sources import ELSEWHERE, load_settings

Write = Callable[[str], str]


@pytest.fixture
def toml(tmp_path: Path) -> Write:
    """Write a settings file; return its path."""

    def write(text: str) -> str:
        path = tmp_path / "cllm.toml"
        path.write_text(text, "utf-8")
        return str(path)

    return write


def load(*arguments: str, **environ: str) -> Settings:
    return load_settings(arguments, environ)


def complaint(*arguments: str, **environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(*arguments, **environ)
    line = str(caught.value)
    assert "\n" not in line
    return line


# --- sources ----------------------------------------------------------------------------------------------------------


def test_nothing_given_gives_the_defaults() -> None:
    assert load() == DEFAULT_SETTINGS == Settings()


def test_a_flag_wins_over_a_variable_and_that_over_the_file(toml: Write) -> None:
    path = toml("port = 1\nthreads = 1\nparallel = 1\n")
    settings = load("--config", path, "--port", "3", CLLM_PORT="2", CLLM_THREADS="2")
    assert (settings.port, settings.threads, settings.parallel) == (3, 2, 1)


OTHER_WORDS = {
    "model": "other", "alias": "a", "backend": "b", "backend_option": "a=b", "tensor_split": "3,1", "split_mode": "row", "pooling": "cls",
    "kv": "streams", "flash_attn": "on", "cache_type_k": "q8_0", "cache_type_v": "q8_0", "sampling_defaults": "llama",
    "host": "::1", "api_key": "k", "cors_origin": "*", "log_format": "json", "calibrate": "off", "log_level": "debug",
    "tool_format": "mistral",
    "metrics_aliases": "vllm",
}  # fmt: skip
FILES = {"lora", "chat_template_file", "api_key_file", "ssl_certfile", "ssl_keyfile"}


def other_word(field: attrs.Attribute[object], existing_file: str) -> str:
    """Return a word that the field takes and that is not its default."""
    if isinstance(field.default, bool):
        return "false" if field.default else "true"
    return existing_file if field.name in FILES else OTHER_WORDS.get(field.name, "7")


@pytest.mark.slow
@pytest.mark.parametrize("field", [field for field in attrs.fields(Settings) if field.name != "config"], ids=lambda field: field.name)
def test_every_setting_can_come_from_flag_variable_and_file(field: attrs.Attribute[object], toml: Write, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("key\n")
    word = other_word(field, str(tmp_path / "file"))
    # Certificate and key go together; the other one comes from the environment here.
    other = {variable(name): word for name in ("ssl_certfile", "ssl_keyfile") if field.name.startswith("ssl_") and field.name != name}
    by_flag = load(f"--{field.name.replace('_', '-')}={word}", **other)
    assert getattr(by_flag, field.name) != field.default
    assert by_flag == load(**{variable(field.name): word}, **other)
    by_file = load("--config", toml(f"{field.name} = '{word}'\n"), **other)
    assert attrs.evolve(by_file, config=None) == by_flag


@pytest.mark.parametrize(
    ("flag", "field"), [("-c", "ctx_size"), ("-np", "parallel"), ("-t", "threads"), ("-ngl", "gpu_layers"), ("-ub", "ubatch_size")]
)
def test_short_names_are_those_that_llama_server_users_know(flag: str, field: str) -> None:
    assert getattr(load(flag, "5"), field) == 5


def test_the_model_is_an_argument_or_a_flag() -> None:
    assert load("some-model").model == load("--model", "some-model").model == load("-m", "some-model").model == "some-model"


def test_a_repeatable_flag_collects_and_a_variable_holds_several_with_commas() -> None:
    assert load("--alias", "a", "--alias", "b c").alias == ("a", "b c") == load(CLLM_ALIAS="a, b c").alias


def test_a_file_gives_several_values_as_a_list(toml: Write) -> None:
    assert load("--config", toml("alias = ['a', 'b, c']")).alias == ("a", "b, c")


def test_the_file_may_be_named_by_a_variable(toml: Write) -> None:
    assert load(CLLM_CONFIG=toml("port = 4")).port == 4


def test_a_tilde_is_the_home_directory_wherever_no_shell_saw_it(toml: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("m.gguf", "other.gguf", "a.gguf", "keys"):
        (tmp_path / name).write_text("key")
    settings = load("--config", toml("model = '~/m.gguf'\nmodels = ['~/other.gguf']\nlora = ['~/a.gguf:0.5']"), CLLM_CACHE_DIR="~/kept")
    assert settings.model == f"{tmp_path}/m.gguf"
    assert [one.model for one in settings_of_models(settings)] == [f"{tmp_path}/m.gguf", f"{tmp_path}/other.gguf"]
    assert settings.lora == (f"{tmp_path}/a.gguf:0.5",)
    named = load("--config", toml("model = '~/m.gguf'\nmodels = ['~/other.gguf']\nalias = ['~/other.gguf=x']"))
    assert [one.alias for one in settings_of_models(named)] == [(), ("x",)]
    assert settings.cache_dir == f"{tmp_path}/kept"
    assert [key.secret for key in api_keys(load("--api-key-file=~/keys"))] == ["key"]


@pytest.mark.parametrize("flag", ["--cache-dir", "--calibration-dir", "--lora-dir"])
def test_a_folder_below_a_home_directory_that_nobody_knows_is_no_folder_of_that_name(flag: str) -> None:
    assert complaint(flag, "~nobody-of-that-name/kept") == f"{flag}: there is no home directory for ~nobody-of-that-name/kept"


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load(CLLM_PORT="", CLLM_MODEL=" ") == DEFAULT_SETTINGS


def test_a_variable_with_the_name_of_a_setting_and_more_is_none_of_it() -> None:
    assert load(CLLM_PORT_8080_TCP="9") == DEFAULT_SETTINGS


@pytest.mark.parametrize("word", ["off", "false", "no", "0"])
def test_a_switch_reads_the_usual_words_in_a_variable(word: str) -> None:
    assert load(CLLM_MMAP=word).mmap is False


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ELSEWHERE)
@pytest.mark.parametrize("before", [[], ["model.gguf"], ["-m", "model.gguf", "-c", "4096"]], ids=["alone", "by-place", "by-name"])
def test_every_option_of_other_servers_is_told_what_it_is_here(option: str, before: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings([*before, option, "value"], {})
    assert str(caught.value) == f"Unknown option: {option}. {ELSEWHERE[option]}"


def test_an_option_of_others_is_explained_with_its_value_behind_a_sign_and_where_a_word_is_one_too_many() -> None:
    for words in (["-tp=2"], ["-cram=100"], ["a", "b", "-md", "d.gguf"]):
        with pytest.raises(SettingsError, match="Unknown option: -"):
            load_settings(words, {})


def test_behind_two_hyphens_no_word_is_an_option() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(["a", "--port", "x", "--", "-md"], {})
    assert str(caught.value).startswith("Invalid value for --port")


def test_a_template_is_of_the_first_model_unless_another_names_one(tmp_path: Path) -> None:
    (own := tmp_path / "own.jinja").touch()
    (other := tmp_path / "other.jinja").touch()
    for name in "abc":
        (tmp_path / f"{name}.gguf").touch()
    a, b, c = (str(tmp_path / f"{name}.gguf") for name in "abc")
    table = json.dumps({"model": c, "chat_template_file": str(other)})
    each = settings_of_models(Settings(model=a, models=(b, table), chat_template_file=str(own)))
    assert [one.chat_template_file for one in each] == [str(own), None, str(other)]


def test_a_template_is_of_its_file_with_other_adapters_too(tmp_path: Path) -> None:
    for name in ("a.gguf", "style.gguf", "own.jinja"):
        (tmp_path / name).touch()
    model, template = str(tmp_path / "a.gguf"), str(tmp_path / "own.jinja")
    table = json.dumps({"model": model, "lora": [str(tmp_path / "style.gguf")], "alias": ["a:style"]})
    for settings in (
        Settings(model=model, models=(table,), chat_template_file=template),
        Settings(models=(model, table), chat_template_file=template),
    ):
        assert [one.chat_template_file for one in settings_of_models(settings)] == [template, template]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--port", "99999"], "--port: must be 0 to 65535, not 99999"),
        (["--port", "3.5"], 'Invalid value for --port: "3.5" is not a whole number.'),
        (["-t", "many"], 'Invalid value for -t: "many" is not a whole number.'),
        (["--mmap=off"], 'Invalid value for --mmap: unable to convert "off" into bool. --no-mmap switches it off.'),
        (["--mmap", "off"], "MODEL: there is no off, and a switch takes no value; --no-... switches it off, as --no-mmap"),
        (["m", "--mlock", "True"], "MODEL: there is no True, and a switch takes no value; --no-... switches it off, as --no-mmap"),
        (["-cmoe"], f"Unknown option: -cmoe. {ELSEWHERE['-cmoe']}"),
        (["-c", "0"], "-c: must be at least 1, not 0"),
        (["--kv", "both"], 'Invalid value "both" for --kv. Choose from: "auto", "unified", "streams".'),
        (["--prot", "3"], "Unknown option: --prot. Did you mean --port?"),
        (["--max-model-len", "8"], "Unknown option: --max-model-len. Here it is --ctx-max; -c is the cells of all requests together"),
        (["--mmproj", "x.gguf"], "Unknown option: --mmproj. Images are not read here"),
        (["-hf", "a/b"], "Unknown option: -hf. Here the model stands in its place: cllm serve USER/REPO:Q4_K_M"),
        (["--api-key", "a name=x", "--api-key", "b name=x"], "--api-key: two keys are called x"),
        (["--api-key", "a name=x", "--api-key", "a name=x weight=2"], "--api-key: a key is given twice, with other options"),
        (["--ctx-max", "1"], "--ctx-max: must be at least 2, not 1"),
        (["a", "a"], "MODEL: two models are called a: give one another name with --alias MODEL=NAME"),
        (["a", '{"model": "b", "zzz": 1}'], "MODEL: zzz is not a setting of one model"),
        (["a", '{"model": "b", "ctx_size": "1"}'], "MODEL: ctx_size: Expected `int | null`, got `str`"),
        (["a", '{"model": "b", "ctx_size": 0}'], "MODEL: b: ctx_size: must be at least 1, not 0"),
        (["a", '{"ctx_size": 1}'], "MODEL: a table without model"),
        (["a", "--models", "no-such.gguf"], "--models: no such file: no-such.gguf"),
        (["a", "b", "--alias", "c=name"], "--alias: must be NAME, or MODEL=NAME with one of the models, not c=name"),
        (["no-such.gguf"], "MODEL: no such file: no-such.gguf"),
        (["models/Model.GGUF"], "MODEL: no such file: models/Model.GGUF"),
        (["-m", "no-such.gguf"], "-m: no such file: no-such.gguf"),
        (["--lora", "no-such:0.5"], "--lora: no such file: no-such:0.5"),
        (["--lora", f"{__file__}:nan"], f"--lora: the scale must be a finite number: {__file__}:nan"),
        (
            ["--cors-origin", "http://[::1"],
            "--cors-origin: must be * or an origin as browsers send it (https://example.org), not http://[::1",
        ),
        *(
            (["--cors-origin", origin], f"--cors-origin: must be * or an origin as browsers send it (https://example.org), not {origin}")
            for origin in ("https://Chat.Example.org", "https://example.org:443", "http://localhost:80", "HTTPS://example.org")
        ),
        (["--max-body-mb", "1e303"], "--max-body-mb: must be at most 1048576, not 1e+303"),
        (["--timeout-s", "nan"], "--timeout-s: must be more than 0, not nan"),
        (["--grace-s", "-1"], "--grace-s: must be 0 or more, not -1.0"),
        (["--tensor-split", "1,x"], "--tensor-split: must be numbers with commas between, as in 3,1, not 1,x"),
        (
            ["--cors-origin", "example.org"],
            "--cors-origin: must be * or an origin as browsers send it (https://example.org), not example.org",
        ),
        (["--backend-option", "fast"], "--backend-option: must be NAME=VALUE, not fast"),
        (["--metrics-aliases", "vllm,tgi"], "--metrics-aliases: must be some of vllm,llamacpp, not vllm,tgi"),
        (["--host", ""], "--host: must not be empty"),
        (["--config", "no-such.toml"], "--config: cannot read no-such.toml: No such file or directory"),
        (["--cache-type-v", "q4_0", "--flash-attn", "off"], "--cache-type-v: q4_0 needs flash attention, and --flash-attn is off"),
        (["-np", "64", "-b", "32"], "-np: each of 64 sequences needs a row of a step, and --batch-size is 32"),
        (["--ssl-certfile", __file__], "--ssl-certfile: --ssl-certfile and --ssl-keyfile go together"),
    ],
)
def test_a_mistaken_flag_is_named_in_one_line(arguments: list[str], line: str) -> None:
    assert complaint(*arguments) == line


def test_a_mistaken_variable_is_named() -> None:
    assert complaint(CLLM_PORT="99999") == "CLLM_PORT: must be 0 to 65535, not 99999"
    assert complaint(CLLM_MMAP="maybe") == 'Invalid value for CLLM_MMAP: unable to convert "maybe" into bool.'
    assert complaint(CLLM_PORT="tcp://10.0.0.1:80") == 'Invalid value for CLLM_PORT: "tcp://10.0.0.1:80" is not a whole number.'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("port = 99999", "port in {}: must be 0 to 65535, not 99999"),
        ("port = 3.5", 'Invalid value for port in {}: "3.5" is not a whole number.'),
        ("port = [1, 2]", "port in {}: takes one value, not 2"),
        ("portt = 1", "portt in {} is not a setting; did you mean port?"),
        ('config = "other.toml"', "config in {} is not a setting"),
        ("[serve]\nport = 1", "serve in {} is not a setting"),
        ("port = 1979-05-27", "port in {} must be a string, a number, a boolean or a list of them"),
        ("port = -", "--config: cannot read {}: Invalid value (at line 1, column 8)"),
    ],
)
def test_a_mistaken_key_is_named_with_its_file(toml: Write, text: str, line: str) -> None:
    path = toml(text)
    assert complaint("--config", path) == line.format(path)


def test_a_file_that_is_called_as_a_switch_may_be_set_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("on").touch()
    assert load("on").model == "on"


def test_a_model_that_is_no_file_name_is_left_to_its_backend() -> None:
    assert load("--backend", "upstream", "some/model-name").model == "some/model-name"


# --- keys and warnings ------------------------------------------------------------------------------------------------


def test_keys_are_never_shown() -> None:
    assert "s3cret" not in repr(load("--api-key", "s3cret"))
    assert "s3 cret" not in complaint("--api-key", "s3 cret")


def test_keys_come_from_flags_and_from_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# for the team\nfirst\n\n  second  \n")
    keys = api_keys(load("--api-key", "zeroth", "--api-key-file", str(path)))
    assert [key.secret for key in keys] == ["zeroth", "first", "second"]
    assert [key.name for key in keys] == ["key0", "key1", "key2"]


def test_keys_that_were_read_stay_what_they_are_whatever_becomes_of_their_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first cap=2\nsecond weight=3\n")
    read = with_keys_read(load("--api-key", "zeroth", "--api-key-file", str(path)))
    keys = api_keys(read)
    path.unlink()
    assert [(key.secret, key.name, key.cap, key.weight) for key in keys] == [
        ("zeroth", "key0", None, 1.0),
        ("first", "key1", 2, 1.0),
        ("second", "key2", None, 3.0),
    ]
    assert api_keys(attrs.evolve(read, parallel=2)) == keys
    assert "second" not in repr(read)


def test_a_key_file_may_be_a_pipe_which_can_be_read_but_once() -> None:
    read, write = os.pipe()
    os.write(write, b"first\n")
    os.close(write)
    try:
        settings = load("--api-key-file", f"/dev/fd/{read}")
        keys = api_keys(with_keys_read(attrs.evolve(settings, parallel=2)))
    finally:
        os.close(read)
    assert [key.secret for key in keys] == ["first"]


def test_a_key_file_without_a_key_is_a_mistake_and_does_not_open_the_server(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# nobody yet\n")
    assert complaint("--api-key-file", str(path)) == f"--api-key-file: no key in {path}"


@pytest.mark.parametrize("name", ["CLLM_API_KEY", "CLLM_API_KEY_FILE"])
def test_an_empty_variable_for_keys_is_a_mistake_where_there_are_no_others(name: str, tmp_path: Path, toml: Write) -> None:
    for text in ("", " "):
        assert complaint(**{name: text}) == f"{name}: is empty: unset it to serve without keys"
    (path := tmp_path / "keys").write_text("k")
    assert load("--api-key", "k", **{name: ""}).api_key == ("k",)
    assert load("--api-key-file", str(path), **{name: ""}).api_key_file == str(path)
    assert load("--config", toml("api_key = 'k'"), **{name: ""}).api_key == ("k",)


def test_a_key_that_is_given_twice_is_one_and_with_other_options_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("s3cret\ns3cret\n")
    assert len(api_keys(load("--api-key", "s3cret", "--api-key-file", str(path)))) == 1
    (tmp_path / "others").write_text("s3cret cap=1\n")
    told = complaint("--api-key", "s3cret", "--api-key-file", str(tmp_path / "others"))
    assert told.endswith("a key is given twice, with other options")
    assert "s3cret" not in told


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_listening_on_loopback_warns_of_nothing(host: str) -> None:
    assert warnings(Settings(host=host), {}) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_listening_beyond_loopback_without_keys_is_warned_of(host: str) -> None:
    (line,) = warnings(Settings(host=host), {})
    assert host in line
    assert "--api-key" in line
    assert warnings(Settings(host=host, api_key=("k",)), {}) == []


def test_a_variable_that_is_no_setting_is_warned_of_with_the_nearest_name() -> None:
    others = {"CLLM_WHEEL_CACHE": "x", "CLLM_MODEL_CACHE": "x", "OTHER": "1"}  # of the tools and the benchmarks, and of nobody
    assert warnings(DEFAULT_SETTINGS, {"CLLM_PROT": "1", "CLLM_PORT": "1", **others}) == [
        "CLLM_PROT is not a setting; did you mean CLLM_PORT?"
    ]


# --- several models ---------------------------------------------------------------------------------------------------


def test_a_file_whose_name_no_answer_could_have_is_served_under_one_that_can_be_typed(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/m\xff.gguf")
    Path(path).touch()
    assert name_of_model(path) == r"m\udcff"
    assert name_of_model(str(tmp_path / "模型.gguf")) == "模型"


NO_UTF8 = "mod\udce8le"  # as it is read of a terminal that is set to Latin-1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--alias", NO_UTF8], "--alias: "),
        (["--alias", f"a={NO_UTF8}"], "--alias: "),
        (["b", "--alias", f"b={NO_UTF8}"], "--alias: "),
        (["--embedding-alias", NO_UTF8], "--embedding-alias: "),
    ],
)
def test_a_name_that_no_answer_could_have_is_a_mistake(arguments: list[str], named: str) -> None:
    assert complaint("a", *arguments) == rf"{named}is not UTF-8, and no answer could have it: 'mod\udce8le'"


def test_a_table_that_is_no_utf8_is_a_mistake() -> None:
    assert complaint("a", f'{{"model": "{NO_UTF8}"}}').startswith("MODEL: not an object: ")


def test_of_a_model_and_its_name_the_name_alone_has_to_be_utf8(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/m\xff.gguf")
    Path(path).touch()
    for others in ([], ["b"]):
        assert config.names_of(settings_of_models(load(path, *others, "--alias", f"{path}=chat"))[0]) == ("chat",)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("http://m\udcff", r"http://m\udcff"),
        ("./Qwen3-0.6B-int8-ov", "Qwen3-0.6B-int8-ov"),
        ("./Qwen3-0.6B-int8-ov/", "Qwen3-0.6B-int8-ov"),
        ("./folder/Qwen3-0.6B.Q8_0.GGUF", "Qwen3-0.6B.Q8_0"),
        ("http://10.0.0.1:8000", "http://10.0.0.1:8000"),
        ("user/nomic-embed-v1.5-GGUF:Q8_0", "user/nomic-embed-v1.5-GGUF:Q8_0"),
        ("hf.co/user/nomic-embed-v1.5-GGUF:Q8_0", "user/nomic-embed-v1.5-GGUF:Q8_0"),
        ("https://huggingface.co/user/nomic-embed-v1.5-GGUF", "user/nomic-embed-v1.5-GGUF"),
        (None, "cllm-demo"),
    ],
)
def test_a_name_keeps_the_dots_of_its_version(model: str | None, name: str) -> None:
    assert name_of_model(model) == name


def test_a_model_for_vectors_is_called_as_it_would_be_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "nomic-embed-v1.5.gguf"
    path.touch()
    assert embedding_names_of(load("--embedding-model", "user/nomic-embed-v1.5-GGUF:Q8_0")) == ("user/nomic-embed-v1.5-GGUF:Q8_0",)
    assert embedding_names_of(load("--embedding-model", str(path))) == ("nomic-embed-v1.5",)


def test_several_models_share_the_settings_and_each_may_have_names() -> None:
    settings = load("a", "b", "user/repo:Q8_0", "-c", "77", "--alias", "first", "--alias", "b=second", "--alias", "user/repo:Q8_0=third")
    each = settings_of_models(settings)
    assert [(one.model, one.ctx_size, config.names_of(one)) for one in each] == [
        ("a", 77, ("first",)),
        ("b", 77, ("second",)),
        ("user/repo:Q8_0", 77, ("third",)),
    ]


@pytest.mark.parametrize("alias", ["chat", "b=chat", "a/b.gguf=chat"])
def test_a_model_that_is_alone_takes_a_name_in_the_way_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alias: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("a/b.gguf").touch()
    (one,) = settings_of_models(load("a/b.gguf", "--alias", alias))
    assert config.names_of(one) == ("chat",)


def test_what_belongs_to_one_file_is_the_firsts_alone(tmp_path: Path) -> None:
    lora = tmp_path / "lora.gguf"
    lora.touch()
    first, second = settings_of_models(load("a", "b", "--lora", str(lora), "--embedding-model", "vectors", "--embedding-alias", "v"))
    assert (first.lora, first.embedding_model, first.embedding_alias) == ((str(lora),), "vectors", ("v",))
    assert (second.lora, second.embedding_model, second.embedding_alias) == ((), None, ())


def test_where_all_models_are_in_one_list_the_first_of_them_has_what_belongs_to_one_file(tmp_path: Path, toml: Write) -> None:
    lora = tmp_path / "lora.gguf"
    lora.touch()
    text = f"lora = ['{lora}']\nembedding_model = 'vectors'\n[[models]]\nmodel = 'a'\nembedding_model = 'own'\n[[models]]\nmodel = 'b'\n"
    first, second = settings_of_models(load("--config", toml(text)))
    assert (first.lora, first.embedding_model) == ((str(lora),), "own")
    assert (second.lora, second.embedding_model) == ((), None)


def test_a_file_gives_models_as_tables_with_settings_of_their_own(toml: Write) -> None:
    text = "ctx_size = 5\n[[models]]\nmodel = 'a'\nalias = ['x', 'y']\n[[models]]\nmodel = 'b'\nctx_size = 6\nthreads = 1\n"
    each = settings_of_models(load("--config", toml(text)))
    assert [(one.model, one.ctx_size, one.threads, config.names_of(one)) for one in each] == [
        ("a", 5, None, ("x", "y")),
        ("b", 6, 1, ("b",)),
    ]


def test_a_table_cannot_have_what_is_the_servers(toml: Write) -> None:
    path = toml("[[models]]\nmodel = 'a'\nport = 1\n")
    assert complaint("--config", path) == f"models in {path}: port is not a setting of one model"


# --- what becomes of them ---------------------------------------------------------------------------------------------


def test_the_words_of_the_settings_are_those_of_the_seam() -> None:
    assert get_args(config.KvLayout) == tuple(one.value for one in backend.KvLayout)
    assert get_args(config.FlashAttention) == tuple(one.value for one in backend.FlashAttention)
    assert get_args(config.SplitMode) == tuple(one.value for one in backend.SplitMode)
    assert get_args(config.Pooling) == ("auto", *(one.value for one in backend.Pooling))
    assert {one.value for one in SamplingProfile} <= set(get_args(config.Profile))


def test_the_defaults_ask_of_a_backend_what_the_seam_asks_by_default() -> None:
    spec = model_spec(Settings("model"))
    assert spec == backend.ModelSpec(path="model")


def test_settings_become_what_a_backend_is_asked_for(tmp_path: Path) -> None:
    lora = tmp_path / "lora:v2.gguf"
    lora.touch()
    spec = model_spec(
        load("m", "-b", "64", "-t", "3", "--lora", f"{lora}:0.5", "--lora", str(lora), "-ts", "3,1", "--backend-option", "a=b=c")
    )
    assert (spec.path, spec.n_rows_max, spec.n_rows_physical, spec.n_threads_batch) == ("m", 64, 64, 3)
    assert spec.loras == (backend.Lora(str(lora), 0.5), backend.Lora(str(lora)))
    assert (spec.tensor_split, spec.options) == ((3.0, 1.0), {"a": "b=c"})


def test_without_a_model_the_embedded_one_is_loaded() -> None:
    assert model_spec(DEFAULT_SETTINGS).path.endswith(".gguf")
