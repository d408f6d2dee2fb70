"""Writes docs/settings.md from the class that gives the settings; a test says when it is out of date."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs
from cyclopts import Group, Parameter

from cllm.config import Settings, variable

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"

INTRODUCTION = """\
# Settings

<!-- Written by tools/settings_table.py from cllm/config.py. -->

Each setting is a flag of `cllm serve`, `generate`, `calibrate` and `verify`, an environment variable, and a key of a TOML file that
`--config` or `CLLM_CONFIG` names. A flag wins over the variable, the variable over the file, the file over the default. The arguments of
`cllm serve` are the model and further ones, too.

- Flags that are repeatable collect their values; a variable holds several with commas between, a TOML file as a list.
- A switch is `--mmap` or `--no-mmap`, `CLLM_MMAP=off` (or `false`, `no`, `0`), `mmap = false`.
- An empty variable counts as not set, but an empty `CLLM_API_KEY` or `CLLM_API_KEY_FILE` is an error where no other keys are given: unset
  it to serve without keys. A variable that begins with `CLLM_` and is no setting is warned of by servers; an unknown key in the file is an
  error, as an unknown flag is.
- A leading `~` of a path is the home directory.
- A key in a flag can be seen in the list of processes; `--api-key-file` and `CLLM_API_KEY` keep it out of there. The file is read when the
  server starts.
- Relative paths start from the working directory, those in the file, too.

```toml
# cllm.toml
model = "models/answers.gguf"
ctx_size = 32768
api_key_file = "keys.txt"
cors_origin = ["https://chat.example.org"]

# Further models. What their tables do not say is shared with the first, but for alias, lora, embedding_model, embedding_alias and
# chat_template_file (which a table that names the first's own file shares, too). Only settings of the first three sections below may stand
# here, and neither models, models_memory_mb nor lora_dir.
[[models]]
model = "models/code.gguf"
alias = ["code"]
ctx_size = 8192
```
"""


def describe(hint: Any) -> tuple[str, Parameter]:
    """Return the type of a field in words, and its merged option."""
    hint, *parameters = get_args(hint)
    merged = Parameter.combine(*parameters)
    if type(None) in get_args(hint):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        return " ".join(f"`{word}`" for word in get_args(hint)), merged
    names = {int: "whole number", float: "number", str: "text", bool: "switch", tuple[str, ...]: "texts"}
    return names[hint], merged


def shown_default(value: object) -> str:
    if value is None or value == ():
        return ""
    return ("yes" if value else "no") if isinstance(value, bool) else f"`{value}`"


def row(field: attrs.Attribute[Any], hint: Any) -> tuple[str, str]:
    """Return the section and the table row of a field."""
    kind, parameter = describe(hint)
    key = "" if field.name == "config" else f"`{field.name}`"
    flags = " ".join(f"`{name}`" for name in (*(parameter.alias or ()), "--" + field.name.replace("_", "-")))
    (group,) = parameter.group if isinstance(parameter.group, tuple) else (parameter.group,)
    assert isinstance(group, Group)
    cells = (flags, f"`{variable(field.name)}`", key, kind, shown_default(field.default), field.metadata["help"])
    return group.name, "| " + " | ".join(cells) + " |"


def page() -> str:
    """Return the text of the page."""
    hints = get_type_hints(Settings, include_extras=True)
    sections: dict[str, list[str]] = {}
    for field in attrs.fields(Settings):
        section, line = row(field, hints[field.name])
        sections.setdefault(section, []).append(line)
    text = INTRODUCTION
    for section, lines in sections.items():
        head = "| flag | variable | key | value | default | meaning |\n|---|---|---|---|---|---|"
        text += f"\n## {section}\n\n{head}\n" + "\n".join(lines) + "\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
