"""What pydantic knows of a model's fields, and what it says of wrong ones. Law: no value is named; it may be secret.

Design: section 17.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ValidationError

from distributed_state.errors import InvalidValue
from distributed_state.values import codec


def stored_name(model: type[BaseModel], name: str) -> str:
    """The name under which a field is stored: its alias, if it has one."""
    info = model.model_fields[name]
    stored = info.alias or name
    if info.validation_alias not in (None, stored) or info.serialization_alias not in (None, stored):
        raise InvalidValue(f"{model.__name__}.{name}: is read under one alias and written under another; use `alias`")
    codec.encode_key(stored)
    return stored


def fields_of(model: type[BaseModel]) -> tuple[dict[str, Any], list[Any], Any, bool]:
    """The schemas of a model's fields, what they refer to, its config, and whether it validates fields together."""
    core: Any = model.__pydantic_core_schema__
    definitions: list[Any] = []
    config = None
    together = False
    while core["type"] != "model-fields":
        definitions = core.get("definitions", definitions)
        config = core.get("config", config)
        together = together or core["type"].startswith("function")
        if core["type"] == "definition-ref":
            reference = core["schema_ref"]
            core = next(each for each in definitions if each.get("ref") == reference)
        elif "schema" in core:
            core = core["schema"]
        else:
            raise InvalidValue(f"{model.__name__}: has a core schema of its own, without fields")
    return core["fields"], definitions, config, together


def from_json(read: Callable[[bytes], Any], take: Callable[[Any], Any], stored: Any) -> Any:
    """Validate what is stored, as JSON: only there a strict model takes a date from text."""
    if isinstance(stored, dict) and any(isinstance(value, bytes) for value in stored.values()):
        return take(stored)  # a handle without a model wrote those
    try:
        return read(codec.encode(stored))
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] != "json_invalid":
            raise
    return take(stored)  # lone surrogates: JSON to us, not to pydantic's parser


def check_same(key: str, given: Any, back: Any) -> None:
    """What a model hides or loses on the way to JSON must not be lost for good."""
    if given != back:
        kind = type(given).__name__
        raise InvalidValue(f"{key}: this {kind} is not the same any more when the model has written it as JSON")


def complaint_of(error: ValidationError, place: tuple[str, ...] = ()) -> tuple[str, str]:
    """The first field at fault, and what to say."""
    errors = error.errors(include_url=False)
    more = f"; and {len(errors) - 1} more" if len(errors) > 1 else ""
    first: Any = errors[0] | {"loc": (*place, *errors[0]["loc"])}
    return str(first["loc"][0]) if first["loc"] else "", sentence(first) + more


def sentence(error: Any) -> str:
    """One of pydantic's complaints in words."""
    # The type, not the value: what is stored here may be a secret, and errors are logged.
    place = ".".join(map(str, error["loc"]))
    given = "" if error["type"] == "missing" else f" (given a {type(error['input']).__name__})"
    return f"{place}{': ' if place else ''}{error['msg']}{given}"
