"""Pages about the HTTP interface, one for each group of paths. Law: made from its OpenAPI description alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from docs_tables import code, table

from distributed_state.programs.service.app import Service
from distributed_state.programs.service.operations import description


def openapi() -> str:
    """The description itself, as the service gives it."""
    return json.dumps(description(Service().operations), indent=1)


def http_pages() -> Iterator[tuple[str, str]]:
    """The page of all operations, one for each group, and one of what bodies and answers hold."""
    described = description(Service().operations)
    groups: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in described["paths"].items():
        for method, each in methods.items():
            groups.setdefault(each["tags"][0], []).append((method.upper(), path, each))
    yield "http/index", _overview(described, groups)
    for name, operations in groups.items():
        parts = [f"# /v1/{name}", *(part for each in operations for part in _operation(*each))]
        yield f"http/{name.replace('.', '-')}", "\n\n".join(parts)
    yield "http/bodies", _bodies(described["components"]["schemas"])


def _overview(described: dict[str, Any], groups: dict[str, list[tuple[str, str, dict[str, Any]]]]) -> str:
    parts = [
        "# HTTP",
        f"{described['info']['summary']} `distributed-state serve` has the same description as OpenAPI "
        f"{described['openapi']} at `/v1/openapi.json`, and here: [openapi.json](../openapi.json). Access control: "
        "[security](../../security.md). Errors are problem details (RFC 9457, `application/problem+json`): "
        "[Problem](bodies.md#Problem), of which `error` is a name of the [errors](../errors.md).",
    ]
    for name, operations in groups.items():
        rows = (
            (f"[`{method} {path}`]({name.replace('.', '-')}.md#{each['operationId']})", each["summary"])
            for method, path, each in operations
        )
        parts += [f"## /v1/{name}", table(("request", "what it does"), rows)]
    return "\n\n".join(parts)


def _operation(method: str, path: str, each: dict[str, Any]) -> Iterator[str]:
    yield f"## `{method} {path}` {{ #{each['operationId']} }}"
    yield f"{each['summary']}\n\n{each['description']}"
    if each["parameters"]:
        rows = (
            (code(one["name"]) + (" (required)" if one.get("required") else ""),
             one.get("description") or one["schema"].get("description", ""), one["in"], kind(one["schema"]))
            for one in each["parameters"]
        )  # fmt: skip
        yield table(("parameter", "what it is", "in", "type"), rows)
    if "requestBody" in each:
        yield f"Body: {_content(each['requestBody']['content'])}"
    answers = (
        (status, one["description"].split("\n\n")[0], _content(one.get("content", {})))
        for status, one in each["responses"].items()
    )
    yield table(("status", "what it means", "answer"), answers)


def _content(content: dict[str, Any]) -> str:
    return ", ".join(_link(each["schema"]) or code(media) for media, each in content.items())


def _link(schema: dict[str, Any]) -> str:
    name = schema.get("$ref", "").rpartition("/")[2]
    return f"[{name}](bodies.md#{name})" if name else ""


def kind(schema: dict[str, Any]) -> str:
    """The type of a value, in words."""
    if "$ref" in schema:
        return _link(schema)
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(map(kind, schema.get("anyOf") or schema["oneOf"]))
    if "enum" in schema or "const" in schema:
        return " or ".join(code(each) for each in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {kind(schema['additionalProperties'])}"
    said = [str(schema.get("type", "any JSON"))]
    for name, sign in ("minimum", "≥"), ("maximum", "≤"), ("exclusiveMinimum", ">"), ("maxLength", "characters ≤"):
        if name in schema:
            said.append(f"{sign} {schema[name]:,}")
    if schema.get("default") is not None:
        said.append(f"default {code(schema['default'])}")
    return ", ".join(said)


def _bodies(schemas: dict[str, Any]) -> str:
    parts = ["# Bodies and answers", "The JSON of requests and answers."]
    for name, schema in sorted(schemas.items()):
        parts += [f"## {name} {{ #{name} }}", schema.get("description", "")]
        if schema.get("properties"):
            required = schema.get("required", ())
            rows = (
                (code(each) + (" (required)" if each in required else ""), kind(of), of.get("description", ""))
                for each, of in schema["properties"].items()
            )
            parts.append(table(("name", "type", "what it is"), rows))
        else:
            parts.append(kind({key: value for key, value in schema.items() if key != "title"}))
    return "\n\n".join(part for part in parts if part)
