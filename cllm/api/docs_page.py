"""The page that shows an OpenAPI document to people: plain HTML, made once, that loads nothing and runs nothing."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment

_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
_PAGE = _ENVIRONMENT.from_string("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>cLLM {{ version }}: the API</title><meta name="viewport" content="width=device-width">
<style>
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent);
  --soft: color-mix(in srgb, currentColor 6%, transparent) }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 3rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin: 2.5rem 0 .5rem; font-size: 1.15rem }
code { font-family: ui-monospace, monospace; font-size: .92em }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .4rem 0; overflow: hidden }
summary { cursor: pointer; padding: .5rem .8rem; display: flex; gap: .8rem; align-items: baseline; flex-wrap: wrap }
summary:hover, details[open] > summary { background: var(--soft) }
.method { font: 600 .75rem/1.6 ui-monospace, monospace; width: 4.2em; text-align: center; border-radius: .25rem; color: #fff }
.get { background: #2f6fb3 } .post { background: #2e7d4f } .delete { background: #b23b3b }
.about { opacity: .75 }
.body { padding: .2rem .8rem .8rem; overflow-x: auto }
table { border-collapse: collapse; width: 100% }
td { padding: .2rem 1rem .2rem 0; vertical-align: top; border-top: 1px solid var(--line) }
td:first-child { white-space: nowrap }
.needed::after { content: " *"; color: #b23b3b } h3 { font-size: .85rem; margin: .9rem 0 .2rem; opacity: .75 }
</style></head><body>
<h1>cLLM {{ version }}</h1>
<p>JSON in and out. Members that are not named here are ignored; <code>null</code> means the default; those with a star are needed.
For programs: <code>/openapi.json</code>.</p>
{% for title, operations in groups %}
<h2>{{ title }}</h2>
{% for one in operations %}
<details><summary><span class="method {{ one.method }}">{{ one.method | upper }}</span> <code>{{ one.path }}</code>
<span class="about">{{ one.about }}</span></summary>
<div class="body">
{% if one.fields %}
<h3>Body</h3>
<table>{% for field in one.fields %}<tr><td><code{% if field.needed %} class="needed"{% endif %}>{{ field.name }}</code></td>
<td><code>{{ field.kind }}</code></td></tr>{% endfor %}</table>
{% endif %}
<h3>Answers</h3>
<table>{% for status, about, kinds in one.answers %}<tr><td><code>{{ status }}</code></td><td>{{ about }}</td>
<td><code>{{ kinds }}</code></td></tr>{% endfor %}</table>
</div></details>
{% endfor %}
{% endfor %}
</body></html>
""")
_LIMITS = {"minimum": "≥ ", "exclusiveMinimum": "> ", "maximum": "≤ ", "maxLength": "length ≤ ", "maxItems": "items ≤ "}


def page(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document. Operations stand in its order, grouped by the first part of their paths."""
    schemas = document["components"]["schemas"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(_group(path), []).append(_shown(path, method, operation, schemas))
    return _PAGE.render(version=document["info"]["version"], groups=list(groups.items()))


def _group(path: str) -> str:
    first = path.split("/")[1]
    return f"/{first}" if path.count("/") > 1 else "/"


def _shown(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    answers = [(status, one["description"], ", ".join(one["content"])) for status, one in operation["responses"].items()]
    body = operation.get("requestBody")
    fields = [] if body is None else _fields(body["content"]["application/json"]["schema"], schemas)
    return {"path": path, "method": method, "about": operation["summary"], "fields": fields, "answers": answers}


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> list[dict[str, Any]]:
    whole = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    needed = whole.get("required", [])
    fields = [{"name": name, "kind": kind(one), "needed": name in needed} for name, one in whole.get("properties", {}).items()]
    return sorted(fields, key=lambda field: not field["needed"])


def kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " | ".join([kind(one) for one in schema["anyOf"] if one.get("type") != "null"])
    if "enum" in schema:
        return " | ".join([repr(value) for value in schema["enum"]])
    name = str(schema.get("type", "any"))
    if name == "array" and isinstance(schema.get("items"), dict):
        name = f"array of {kind(schema['items'])}"
    limits = ", ".join([f"{sign}{schema[key]}" for key, sign in _LIMITS.items() if key in schema])
    return f"{name} ({limits})" if limits else name
