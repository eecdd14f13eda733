"""A record's schema: a pydantic model or a dataclass with a version.

Law: a value is read back and checked before it is written.

Older records are upcast, one version at a time; a newer one is refused. While workers of an older version run, a schema
may continue to write that version (`write_version`): downcasters convert values back to it before they are written.

Design: section 17.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import BaseModel, Field, PydanticUserError, RootModel, ValidationError, create_model, model_validator
from pydantic_core import PydanticSerializationError, SchemaValidator, core_schema

from distributed_state.errors import CorruptState, InvalidValue, NotFound, SchemaMismatch
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.values import codec
from distributed_state.values.model import SCHEMA


class View(CachedRecord):
    """A record converted to another version of its schema than the stored one."""

    __slots__ = ("stored",)

    def __init__(self, stored: CachedRecord, fields: dict[bytes, bytes]) -> None:
        super().__init__(stored.codec, stored.epoch, stored.version, fields, stored.messages)
        self.stored = stored


def holds_fields(entry: CachedRecord) -> bool:
    """Whether there is anything to upcast."""
    return not entry.deleted and any(name[:1] != b"#" for name in entry.fields)


def stored_name(model: type[BaseModel], name: str) -> str:
    """The name under which a field is stored: its alias, if it has one."""
    info = model.model_fields[name]
    stored = info.alias or name
    if info.validation_alias not in (None, stored) or info.serialization_alias not in (None, stored):
        raise InvalidValue(f"{model.__name__}.{name}: is read under one alias and written under another; use `alias`")
    codec.encode_key(stored)
    return stored


def fields_of(model: type[BaseModel]) -> tuple[dict[str, Any], list[Any], Any, bool]:
    """The schemas of a model's fields, their definitions, its config, and whether it validates fields together."""
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
            raise InvalidValue(f"{model.__name__}: has its own core schema, which has no fields")
    return core["fields"], definitions, config, together


def from_json(read: Callable[[bytes], Any], take: Callable[[Any], Any], stored: Any) -> Any:
    """Validate the stored JSON, in JSON mode: only there a strict model accepts text for a date."""
    if isinstance(stored, dict) and any(isinstance(value, bytes) for value in stored.values()):
        return take(stored)  # a handle without a model wrote bytes
    try:
        return read(codec.encode(stored))
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] != "json_invalid":
            raise
    return take(stored)  # lone surrogates: valid JSON here, but not for pydantic's parser


def check_same(key: str, given: Any, back: Any) -> None:
    """Refuse a value that the model leaves out or changes when it is dumped to JSON: it would be lost permanently."""
    if given != back:
        kind = type(given).__name__
        raise InvalidValue(f"{key}: this {kind} changes when the model writes it as JSON")


def complaint_of(error: ValidationError, place: tuple[str, ...] = ()) -> tuple[str, str]:
    """The first invalid field, and the complaint about it."""
    errors = error.errors(include_url=False)
    more = f"; and {len(errors) - 1} more" if len(errors) > 1 else ""
    first: Any = errors[0] | {"loc": (*place, *errors[0]["loc"])}
    return str(first["loc"][0]) if first["loc"] else "", sentence(first) + more


def sentence(error: Any) -> str:
    """One of pydantic's complaints as a sentence."""
    # The type, not the value: the stored value may be a secret, and errors are logged.
    place = ".".join(map(str, error["loc"]))
    given = "" if error["type"] == "missing" else f" (given a {type(error['input']).__name__})"
    return f"{place}{': ' if place else ''}{error['msg']}{given}"


def model_of(kind: Any) -> type[BaseModel]:
    """The pydantic model with the fields of a model or a dataclass. Raises InvalidValue for other types."""
    if isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, RootModel):
        return kind
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        raise InvalidValue(f"a schema is a pydantic model with fields or a dataclass, not {kind!r:.80}")
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise InvalidValue(f"{kind.__name__}: {error}; a dataclass of a schema is defined in a module") from error
    columns: dict[str, Any] = {}
    for each in dataclasses.fields(kind):
        if not each.init:
            raise InvalidValue(f"{kind.__name__}.{each.name}: has init=False, so it cannot be read back")
        if each.default_factory is not dataclasses.MISSING:
            columns[each.name] = (hints[each.name], Field(default_factory=each.default_factory))
        else:
            columns[each.name] = (hints[each.name], ... if each.default is dataclasses.MISSING else each.default)

    def check(model: BaseModel) -> BaseModel:
        kind(**model.__dict__)
        return model

    checks: dict[str, Any] = {"check": model_validator(mode="after")(check)} if hasattr(kind, "__post_init__") else {}
    try:
        return create_model(kind.__name__, __module__=kind.__module__, __validators__=checks, **columns)
    except PydanticUserError as error:
        raise InvalidValue(f"{kind.__name__}: pydantic cannot write it as JSON: {error.message}") from error


M = TypeVar("M")
Upcaster = Callable[[dict[str, Any]], dict[str, Any]]


class Schema(Generic[M]):
    """A pydantic model of a record's fields, or a dataclass, with a version and upcasters for older records.

    `Schema(TripState, version=3, upcasters={1: v1_to_v2, 2: v2_to_v3})`. An upcaster takes the fields of its version as
    a dict of JSON values and returns those of the next; it may be called again for the same record, so it must not have
    side effects. A plain model is version 1. A record that was never written with a schema counts as version 1.

    To run a release next to workers that know only version 2, pass `write_version=2` and `downcasters={2: v3_to_v2}`,
    the inverse of each upcaster: this worker reads both versions and writes the older one, which the others can read.
    Each of its writes then applies only at the version of the record that it saw, and is retried on a conflict. A value
    that does not survive the conversion to version 2 and back is refused with InvalidValue; if a downcaster raises, the
    write raises SchemaMismatch. When the last old worker has ended, a second release without `write_version` begins to
    write version 3.
    """

    def __init__(
        self,
        model: type[M],
        *,
        version: int = 1,
        upcasters: Mapping[int, Upcaster] | None = None,
        write_version: int | None = None,
        downcasters: Mapping[int, Upcaster] | None = None,
    ) -> None:
        written = model_of(model)
        if type(version) is not int or version < 1:
            raise InvalidValue(f"{model.__name__}: a version is an int from 1 on, not {version!r}")
        write_version = version if write_version is None else write_version
        if type(write_version) is not int or not 1 <= write_version <= version:
            text = f"{model.__name__}: write_version is an int from 1 to {version}, not {write_version!r}"
            raise InvalidValue(text)
        self.model = model
        self._written = written  # `model` itself, or a pydantic model with the fields of the dataclass
        self.version = version
        self.write_version = write_version
        self.stamp = b"%d" % write_version
        self._newest = b"%d" % version
        self._upcasters = dict(upcasters or {})
        self._downcasters = dict(downcasters or {})
        if self._upcasters.keys() != set(range(1, version)):
            found = ", ".join(map(repr, self._upcasters)) or "none"
            raise InvalidValue(f"{self}: needs upcasters from each of 1 to {version - 1}, has them from {found}")
        if not set(range(write_version, version)) <= self._downcasters.keys() <= set(range(1, version)):
            found = ", ".join(map(repr, self._downcasters)) or "none"
            text = (
                f"{self}: writing version {write_version} needs downcasters to each of {write_version} to {version - 1}"
            )
            raise InvalidValue(f"{text}, has them to {found}")
        for way, casters in ("upcaster from", self._upcasters), ("downcaster to", self._downcasters):
            for step, caster in casters.items():
                if not callable(caster) or inspect.iscoroutinefunction(caster):
                    raise InvalidValue(f"{self}: the {way} version {step} is not a plain function: {caster!r:.80}")
        written.model_rebuild()  # forward references, or an error that names the missing one
        self._names = {stored_name(written, name): name for name in written.model_fields}  # stored -> attribute
        self._open = written.model_config.get("extra") == "allow"
        self._core, self._definitions, self._config, self._together = fields_of(written)
        self._validators: dict[str, SchemaValidator] = {}

    @staticmethod
    def of(given: type[M] | Schema[M]) -> Schema[M]:
        """The schema itself, or version 1 of a plain model."""
        return given if isinstance(given, Schema) else _plain(given)  # type: ignore[arg-type]  # a class is hashable

    def __repr__(self) -> str:
        return f"{self.model.__name__} version {self.version}"

    # One field

    def prepare(self, key: str, value: Any) -> Any:
        """The stored form of the value, if the field may hold it; else InvalidValue."""
        name = self._alone(key)
        if name is None:
            if isinstance(value, bytes):  # pydantic would convert it to text, and the next edit() would write that
                raise InvalidValue(
                    f"{key!r:.80}: a model is written as JSON, so it cannot hold bytes; use a record without a model"
                )
            return value
        if key not in self._validators:
            core: Any = self._core[name]["schema"]
            whole = core_schema.definitions_schema(core, self._definitions) if self._definitions else core
            self._validators[key] = SchemaValidator(whole, self._config)
        validator = self._validators[key]
        try:
            checked = validator.validate_python(value)
            stored = self._dump(self._written.model_construct(**{key: checked}), {name}).get(key)
            check_same(key, checked, from_json(validator.validate_json, validator.validate_python, stored))
        except ValidationError as error:
            raise InvalidValue(complaint_of(error, (key,))[1]) from None
        return stored

    def countable(self, key: str) -> bool:
        """Whether the field accepts any whole number and starts at 0, so that the server may add without a read."""
        name = self._alone(key)
        if name is None:
            return True
        core = self._core[name]["schema"]
        zero = core["type"] == "default" and type(core.get("default")) is int and core["default"] == 0
        return bool(zero) and core["schema"].keys() <= {"type", "metadata"} and core["schema"]["type"] == "int"

    def default(self, key: str, otherwise: Any) -> Any:
        """The value of an absent field, in its stored form."""
        name = self._alone(key)
        if name is None or self._written.model_fields[name].is_required():
            return otherwise
        return self.prepare(key, self._written.model_fields[name].get_default(call_default_factory=True))

    def deletable(self, key: str) -> None:
        """Raise InvalidValue if the model requires the field, so that it cannot be deleted."""
        name = self._alone(key) if key in self._names else None
        if name is not None and self._written.model_fields[name].is_required():
            raise InvalidValue(f"{key!r}: {self.model.__name__} requires it, it cannot be deleted")

    def _alone(self, key: str) -> str | None:
        """The attribute of a field that may be changed alone; None for an extra field that the model allows."""
        codec.encode_key(key)
        name = self._names.get(key)
        if name is None and not self._open:
            known = ", ".join(self._names)
            raise InvalidValue(f"{key!r:.80}: {self.model.__name__} has no such field; it has {known:.200}")
        if self._together:
            raise InvalidValue(f"{key!r}: {self.model.__name__} validates its fields together; change them by edit()")
        return name

    # All fields

    def read(self, text: str, entry: CachedRecord) -> M:
        """The validated model. Raises CorruptState, or NotFound if nothing is stored and a field has no default."""
        fields = {} if entry.deleted else entry.all()
        try:
            return self.parse(fields)
        except ValidationError as error:
            field, complaint = complaint_of(error)
            if not fields:
                text = f"{text[:200]}: holds no fields yet, and {self.model.__name__} does not come from defaults alone"
                raise NotFound(f"{text}: {complaint}") from None
            raise _corrupt(text, self, field, complaint, entry) from None

    def check(self, text: str, entry: CachedRecord, fields: Mapping[str, Any], keys: Collection[str]) -> None:
        """Raise CorruptState if the stored value of one of these fields is invalid."""
        try:
            self.parse(fields)
        except ValidationError as error:
            for each in error.errors(include_url=False):
                if each["loc"] and each["loc"][0] in keys:
                    raise _corrupt(text, self, str(each["loc"][0]), sentence(each), entry) from None

    def settle(self, values: M | Mapping[str, Any]) -> dict[str, Any]:
        """All fields in their stored form, from a model or from values for one. Raises InvalidValue."""
        if isinstance(values, self.model):
            values = self._given(values)
        elif not isinstance(values, Mapping):
            raise InvalidValue(f"a {self.model.__name__} or a mapping is needed, not a {type(values).__name__}")
        unknown = [] if self._open else [key for key in values if key not in self._names]
        if unknown:
            self.prepare(unknown[0], None)
        try:
            model = self._written.model_validate(dict(values))
            fields = self._dump_all(model)
            back = self._parse(fields)  # changes in place of nested models are checked only here
        except ValidationError as error:
            raise InvalidValue(complaint_of(error)[1]) from None
        for key in fields:
            name = self._names.get(key, key)
            check_same(key, getattr(model, name), getattr(back, name))
        return fields

    def dump(self, model: M) -> dict[str, Any]:
        """The fields of a model that was read."""
        if not isinstance(model, BaseModel):
            model = self._written.model_construct(**self._given(model))  # type: ignore[assignment]  # of a dataclass
        return self._dump_all(model)  # type: ignore[arg-type]

    def parse(self, fields: Mapping[str, Any]) -> M:
        """The model with these stored fields. Raises pydantic's ValidationError."""
        found: Any = self._parse(fields)
        return found if self._written is self.model else self.model(**found.__dict__)

    def _given(self, model: Any) -> dict[str, Any]:
        """The values of a model or a dataclass by their stored names."""
        extra = getattr(model, "__pydantic_extra__", None) or {}
        found = (
            vars(model)
            if isinstance(model, BaseModel)
            else {name: getattr(model, name) for name in self._names.values()}
        )
        return {**extra, **{key: found[name] for key, name in self._names.items() if name in found}}

    def _parse(self, fields: Mapping[str, Any]) -> BaseModel:
        found: BaseModel = from_json(self._written.model_validate_json, self._written.model_validate, fields)
        return found

    def _dump_all(self, model: BaseModel) -> dict[str, Any]:
        return self._dump(model, {*self._written.model_fields, *(model.__pydantic_extra__ or ())})

    def _dump(self, model: BaseModel, names: set[str]) -> dict[str, Any]:
        try:
            return model.model_dump(mode="json", by_alias=True, include=names, warnings=False)
        except (PydanticSerializationError, ValueError) as error:
            raise InvalidValue(f"{self.model.__name__}: cannot be written as JSON: {error}") from error

    # Versions

    def version_of(self, text: str, stamp: bytes | None) -> int:
        """The version that a record was written in. Raises SchemaMismatch if it is newer than this one."""
        if stamp is not None and not (stamp.isdigit() and stamp != b"0"):
            raise CorruptState(f"{text[:200]}: #schema holds no version", field="#schema", data=stamp)
        version = 1 if stamp is None else int(stamp)
        if version > self.version:
            what = f"{text[:200]}: is of schema version {version}, this worker knows {self}"
            raise SchemaMismatch(what, stored=version, known=self.version)
        return version

    def view(self, text: str, entry: CachedRecord) -> CachedRecord:
        """The record converted to this version; the same entry if it is stored in this version."""
        stamp = entry.fields.get(SCHEMA)
        if entry.deleted or stamp == self._newest:
            return entry
        version = self.version_of(text, stamp)
        if version == self.version or not holds_fields(entry):
            return entry
        before = entry.all()
        fields = {name: data for name, data in entry.fields.items() if name[:1] == b"#"} | {SCHEMA: self._newest}
        for key, value in self._upcast(text, entry.all(), version):
            name = codec.encode_key(key)
            same = key in before and codec.encode_value(before[key]) == codec.encode_value(value)
            fields[name] = entry.fields[name] if same else entry.codec.encode(value, key)
        return View(entry, fields)

    def behind(self, text: str, entry: CachedRecord) -> bool:
        """Whether the record is stored in another version than the schema writes. SchemaMismatch if it is newer."""
        return self.version_of(text, entry.fields.get(SCHEMA)) != self.write_version and holds_fields(entry)

    def lowered(self, text: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """These fields in the written version. Raises InvalidValue if that cannot hold them."""
        if self.write_version == self.version:
            return dict(fields)
        lower = copy.deepcopy(dict(fields))
        for step in reversed(range(self.write_version, self.version)):
            what = f"the downcaster from version {step + 1} to {step}"
            lower = self._cast(text, what, self._downcasters[step], lower, self.version)
        back = dict(self._upcast(text, copy.deepcopy(lower), self.write_version))
        wanted = dict(fields)
        found = back
        with suppress(ValidationError):  # incomplete so far: keep the stored form
            wanted = self.dump(self.parse(fields))
            found = self.dump(self.parse(back))
        for key in [*wanted, *found]:
            if wanted.get(key) != found.get(key):
                what = (
                    f"version {self.write_version} of {self.model.__name__}, which is still written, cannot hold this"
                )
                raise InvalidValue(f"{key!r:.80}: {what}; the other workers read no newer one yet")
        return lower

    def _upcast(self, text: str, fields: dict[str, Any], stored: int) -> Iterator[tuple[str, Any]]:
        for step in range(stored, self.version):
            what = f"the upcaster from version {step} to {step + 1}"
            fields = self._cast(text, what, self._upcasters[step], fields, stored)
        yield from fields.items()

    def _cast(self, text: str, what: str, caster: Upcaster, fields: dict[str, Any], stored: int) -> dict[str, Any]:
        what = f"{text[:200]}: {what} of {self.model.__name__}"
        try:
            fields = caster(fields)
        except Exception as error:  # the user's own code may raise anything
            raise SchemaMismatch(f"{what} raised {error!r:.200}", stored=stored, known=self.version) from error
        complaint = "" if type(fields) is dict else f"returned a {type(fields).__name__}, not a dict"
        try:
            for key, value in fields.items() if not complaint else ():
                codec.encode_key(key)
                codec.encode_value(value, key)
        except InvalidValue as error:
            complaint = f"returned what cannot be stored: {error}"
        if complaint:
            raise SchemaMismatch(f"{what} {complaint}", stored=stored, known=self.version)
        return fields


@lru_cache(maxsize=256)
def _plain(model: type[M]) -> Schema[M]:
    return Schema(model)


def _corrupt(text: str, schema: Schema[Any], field: str, complaint: str, entry: CachedRecord) -> CorruptState:
    data = entry.fields.get(field.encode("utf-8", "surrogatepass"), b"")
    return CorruptState(f"{text[:200]}: does not match {schema}: {complaint}", field=field, data=data)
