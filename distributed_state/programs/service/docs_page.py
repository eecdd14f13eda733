"""The description as a page to read. Law: it loads nothing from anywhere and runs no script."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from typing import Any

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
details { border: 1px solid #ddd; border-radius: 4px; margin: .4rem 0; padding: .3rem .6rem }
summary { cursor: pointer } code, pre { font: 13px/1.4 ui-monospace, monospace }
pre { background: #f6f6f6; padding: .6rem; overflow: auto } b { display: inline-block; width: 4.5rem }
table { border-collapse: collapse } td, th { border-bottom: 1px solid #eee; padding: .2rem .6rem; text-align: left }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd } pre { background: #262626 } }
"""


def page(described: dict[str, Any]) -> str:
    """The page, HTML."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{_text(described['info']['title'])}</title>",
        f"<style>{_STYLE}</style><h1>{_text(described['info']['title'])} {_text(described['info']['version'])}</h1>",
        f"<p>{_text(described['info']['summary'])} As OpenAPI: <a href=openapi.json>openapi.json</a>.",
        *(f"<p>Below <code>{_text(each['url'])}</code>: {_text(each['description'])}" for each in described["servers"]),
        "<p>Errors are problem details: <code>application/problem+json</code>; "
        "each answer has the id of its request in <code>X-Request-Id</code>.",
    ]
    groups: dict[str, list[str]] = {}
    for path, methods in described["paths"].items():
        for method, each in methods.items():
            groups.setdefault(each["tags"][0], []).append("".join(_operation(method, path, each)))
    for name, found in groups.items():
        parts += [f"<h2>{_text(name)}</h2>", *found]
    parts += ["<h2>Bodies and answers</h2>", *_schemas(described["components"]["schemas"])]
    return "\n".join(parts)


def _operation(method: str, path: str, each: dict[str, Any]) -> Iterator[str]:
    yield f"<details id={_text(each['operationId'])}><summary><b>{method.upper()}</b><code>{_text(path)}</code> "
    yield f"{_text(each['summary'])}</summary><p>{_text(each['description'])}"
    if each["parameters"]:
        yield "<table><tr><th>parameter<th>in<th>type<th>"
        for one in each["parameters"]:
            kind = _text(json.dumps(one["schema"]))
            more = _text(one.get("description", "required" if one.get("required") else ""))
            yield f"<tr><td><code>{_text(one['name'])}</code><td>{one['in']}<td><code>{kind}</code><td>{more}"
        yield "</table>"
    if "requestBody" in each:
        yield f"<p>Body: {_content(each['requestBody']['content'])}"
    yield "<table><tr><th>status<th>answer<th>"
    for status, one in each["responses"].items():
        yield f"<tr><td>{status}<td>{_text(one['description'])}<td>{_content(one.get('content', {}))}"
    yield "</table></details>"


def _content(content: dict[str, Any]) -> str:
    found = []
    for media, each in content.items():
        name = each["schema"].get("$ref", "").rpartition("/")[2]
        found.append(f"<a href=#{_text(name)}>{_text(name)}</a>" if name else f"<code>{_text(media)}</code>")
    return ", ".join(found)


def _schemas(schemas: dict[str, Any]) -> Iterator[str]:
    for name, schema in sorted(schemas.items()):
        yield f"<h3 id={_text(name)}>{_text(name)}</h3><p>{_text(schema.get('description', ''))}"
        yield f"<pre>{_text(json.dumps(schema, indent=2))}</pre>"


def _text(value: Any) -> str:
    return html.escape(str(value))
