"""The text of the blocking API: a method, a class, a docstring. Law: it differs from the asyncio API by who waits."""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from async_source import Class, Function, Member, Module, Sources, docstring_of, members

# How what Python calls by itself is passed on.
OPERATORS = {
    "__getitem__": "return self._core[key]",
    "__setitem__": "self._core[key] = value",
    "__delitem__": "del self._core[key]",
    "__iter__": "return iter(self._core)",
    "__len__": "return len(self._core)",
}
# What Python calls on each API for the same purpose.
LEAVING = "leaving"  # of port.bodies
PROTOCOLS = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
NEXT = """\
try:
    return finish(self._core.__anext__())
except StopAsyncIteration:
    raise StopIteration from None
"""


class CannotTell(Exception):
    """The generator does not know how to write this; a line in one of its tables says it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the source alone does not say: the tables at the top of generate_blocking.py."""

    counterparts: Mapping[str, str]  # asyncio class: blocking class
    wrappers: Mapping[str, str]  # asyncio class: the function that makes its blocking object, if not the class
    inner: Mapping[str, frozenset[str]]  # public on the asyncio class for other modules' sake, no part of the API
    bodies: Mapping[tuple[str, str], str]  # (class, method): its statements
    definitions: Mapping[tuple[str, str], str]  # (class, method): all of it
    phrases: Mapping[str, tuple[tuple[str, str], ...]]  # class: what its docstring says otherwise
    from_source: frozenset[str] = field(default_factory=frozenset)  # classes of which the bodies are rewritten


def in_blocking_words(text: str, counterparts: Mapping[str, str]) -> str:
    """What the asyncio API says, in the words of the blocking one; examples too."""
    text = re.sub(r"\bAsync\w+", lambda match: counterparts.get(match[0], match[0]), text)
    text = re.sub(r"^ *import asyncio\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\basyncio\.run\((.*)\)", r"\1", text)
    return re.sub(r"\b(?:async (?=with\b|for\b|def\b)|await )", "", text)


class Annotation(ast.NodeTransformer):
    """A type as the blocking API has it; `modules` are the names that stand for modules of the package."""

    def __init__(self, counterparts: Mapping[str, str], module: Module) -> None:
        self._counterparts = counterparts
        self._module = module
        self.imports: set[str] = set()

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A class of the asyncio API becomes its counterpart."""
        return ast.Name(self._counterparts.get(node.id, node.id))

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """`doctor.Finding`: imported by its own name, since a method may hide the module's."""
        if isinstance(node.value, ast.Name) and node.value.id in self._module.modules:
            self.imports.add(f"from {self._module.modules[node.value.id]} import {node.attr}")
            return ast.Name(node.attr)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """`T | Awaitable[T]`: nothing is awaited here."""
        self.generic_visit(node)
        if isinstance(node.right, ast.Subscript) and getattr(node.right.value, "id", "") == "Awaitable":
            return node.left
        return node


class Unawaited(ast.NodeTransformer):
    """Statements of the asyncio API with each await answered at once: by `finish`, or by a blocking method."""

    def __init__(self, counterparts: Mapping[str, str], own: Iterable[str]) -> None:
        self._counterparts = counterparts
        self._own = set(own)

    def visit_Await(self, node: ast.Await) -> ast.expr:
        """`await self.wait()` calls the blocking `wait`; a coroutine of the core is finished."""
        self.generic_visit(node)
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            receiver = call.func.value
            ours = isinstance(receiver, ast.Name) and receiver.id == "self" and call.func.attr in self._own
            made = isinstance(receiver, ast.Call) and getattr(receiver.func, "id", "") in self._counterparts.values()
            if ours or made:
                call.func.attr = PROTOCOLS.get(call.func.attr, call.func.attr)
                return call
        return ast.Call(ast.Name("finish"), [call], [])

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """`AsyncHost(self)` becomes `Host(self)`."""
        return ast.Name(self._counterparts.get(node.id, node.id), node.ctx)


class Writer:
    """Writes the classes of one blocking file."""

    def __init__(self, rules: Rules, sources: Sources) -> None:
        self._rules = rules
        self._sources = sources
        self.imports: set[str] = set()
        self.modules: list[Module] = []  # in which the names that are used are bound

    # Classes

    def written(self, each: Class) -> str:
        """A class of the blocking API."""
        name = each.node.name
        rules = self._rules
        self._see(each.module)
        if name in rules.from_source:
            bases = [ast.unparse(base) for base in each.node.bases]
            found = list(members(each))
        else:
            bases, flattened = self._ancestry(each)
            found = self._merged([each, *flattened])
        docstring = self._docstring(each.docstring, name)
        for old, new in rules.phrases.get(name, ()):
            if docstring is None or old not in docstring:
                raise CannotTell(f"{name}: PHRASES has what its docstring does not say: {old!r}")
            docstring = docstring.replace(old, new)
        lines = [
            f"class {rules.counterparts[name]}({', '.join(bases)}):" if bases else f"class {rules.counterparts[name]}:"
        ]
        lines += [_indented(docstring), ""] if docstring else []
        if name in rules.from_source:
            lines += [_indented(self._assignment(node)) for node in each.node.body if isinstance(node, ast.Assign)]
            lines.append(_indented(rules.definitions.get((name, "__init__"), "")))
        else:
            lines.append(_indented(self._beginning(each, bases)))
        for member in found:
            if self._offered(name, member.name):
                lines.append(_indented("\n".join(self._member(name, member, found))))
        return "\n".join(lines) + "\n"

    def _see(self, module: Module) -> None:
        if module not in self.modules:
            self.modules.append(module)

    def _ancestry(self, each: Class) -> tuple[list[str], list[Class]]:
        """The blocking class's bases, and the asyncio ones without a counterpart, whose methods become its own."""
        bases: list[str] = []
        flattened: list[Class] = []
        for base in each.node.bases:
            found = self._sources.find(each.module, _root(base))
            if found is None:
                bases.append(ast.unparse(base))
            elif found.node.name in self._rules.counterparts:
                bases.append(ast.unparse(Annotation(self._rules.counterparts, each.module).visit(copy.deepcopy(base))))
            elif not any(getattr(its, "id", "") == "Protocol" for its in found.node.bases):
                # A Protocol says what is needed of others; it offers nothing.
                self._see(found.module)
                theirs, further = self._ancestry(found)
                bases += [one for one in theirs if one not in bases]
                flattened += [found, *further]
        return bases, flattened

    def _merged(self, classes: list[Class]) -> list[Member]:
        found: dict[str, Member] = {}
        for each in classes:
            for member in members(each):
                found.setdefault(member.name, member)
        return list(found.values())

    def _assignment(self, node: ast.Assign) -> str:
        return ast.unparse(Unawaited(self._rules.counterparts, ()).visit(copy.deepcopy(node))) + "\n"

    def _offered(self, name: str, member: str) -> bool:
        if member in self._rules.inner.get(name, ()):
            return False
        special = member in OPERATORS or member in PROTOCOLS or (name, member) in self._rules.bodies
        return special or not member.startswith("_")

    def _beginning(self, each: Class, bases: list[str]) -> str:
        """How an object comes to its core."""
        name = each.node.name
        whole = self._rules.definitions.get((name, "__init__"))
        parameters = [base for base in bases if base.startswith("Generic[")]
        inherited = [base for base in each.node.bases if _root(base) in self._rules.counterparts]
        variables = "[" + ast.unparse(inherited[0].slice) + "]" if _is_generic(inherited) else ""  # type: ignore[attr-defined]  # a Subscript
        variables = parameters[0].removeprefix("Generic") if parameters else variables
        declared = f"_core: {name}{variables}\n\n" if inherited else ""
        if whole is not None:
            return declared + whole
        if inherited:
            return declared
        return f"def __init__(self, core: {name}{variables}) -> None:\n    self._core = core\n\n"

    # Members

    def _member(self, name: str, member: Member, found: list[Member]) -> Iterator[str]:
        whole = self._rules.definitions.get((name, member.name))
        if whole is not None:
            yield whole
            return
        if member.annotation is not None:
            returns = self._annotation(member.annotation, member.module)
            body = f"{self._docstring(member.docstring, name)}\nreturn self._core.{member.name}\n"
            yield f"@property\ndef {member.name}(self) -> {returns}:\n{_indented(body)}"
        for node in member.definitions:
            yield self._function(name, node, member.module, found)

    def _function(self, name: str, node: Function, module: Module, found: list[Member]) -> str:
        decorators = [ast.unparse(each) for each in node.decorator_list]
        head = "".join(f"@{self._decorator(each)}\n" for each in decorators)
        returns = "" if node.returns is None else f" -> {self._annotation(node.returns, module)}"
        head += f"def {PROTOCOLS.get(node.name, node.name)}({self._parameters(node, module)}){returns}:\n"
        if "overload" in decorators:
            return head + "    ...\n"
        docstring = self._docstring(docstring_of(node, module), name)
        statements = self._rules.bodies.get((name, node.name), "").strip() or None
        if statements is None:
            statements = self._from_source(node, found) if name in self._rules.from_source else self._passed_on(node)
        return head + _indented(f"{docstring}\n{statements}" if docstring else statements) + "\n"

    def _decorator(self, text: str) -> str:
        """As the blocking API has it: the body of a `with` is noted where its core looks for it."""
        return text.replace(f"{LEAVING}('", f"{LEAVING}('_core.")

    def _parameters(self, node: Function, module: Module) -> str:
        arguments = copy.deepcopy(node.args)
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for each in every:
            if each is not None and each.annotation is not None:
                each.annotation = ast.parse(self._annotation(each.annotation, module), mode="eval").body
        return ast.unparse(arguments)

    def _annotation(self, node: ast.expr, module: Module) -> str:
        change = Annotation(self._rules.counterparts, module)
        text = ast.unparse(change.visit(copy.deepcopy(node)))
        self.imports |= change.imports
        return text

    def _docstring(self, source: str | None, name: str) -> str | None:
        if source is None:
            return None
        first, _, rest = source.partition("\n")
        text = in_blocking_words(f"{first}\n{textwrap.dedent(rest)}" if rest else first, self._rules.counterparts)
        left = re.search(r"\bawait\b|\bAsync[A-Z]|\basync (?:with|for)\b", text)
        if left is not None:
            raise CannotTell(f"{name}: {left[0]!r} is left in a docstring of the blocking API: {text:.80}")
        return text

    # Bodies

    def _from_source(self, node: Function, found: list[Member]) -> str:
        own = [each.name for each in found if not each.name.startswith("_")]
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        change = Unawaited(self._rules.counterparts, own)
        return "\n".join(ast.unparse(ast.fix_missing_locations(change.visit(copy.deepcopy(each)))) for each in body)

    def _passed_on(self, node: Function) -> str:
        if node.name in OPERATORS:
            return OPERATORS[node.name]
        if node.name == "__anext__":
            return NEXT
        if node.name == "__aiter__":
            return "return self"
        decorators = [each for each in map(ast.unparse, node.decorator_list) if not each.startswith(f"{LEAVING}(")]
        if "property" in decorators:
            return f"return self._core.{node.name}"
        if f"{node.name}.setter" in decorators:
            return f"self._core.{node.name} = {node.args.args[1].arg}"
        if decorators:
            raise CannotTell(f"{node.name}: is a {decorators[0]}; give its body")
        return self._call(node)

    def _call(self, node: Function) -> str:
        call = f"self._core.{node.name}({', '.join(self._arguments(node))})"
        if isinstance(node, ast.AsyncFunctionDef):
            call = f"finish({call})"
        kind = "" if node.returns is None else _root(node.returns)
        if kind == "Self":
            return f"{call}\nreturn self"
        if kind in self._rules.counterparts:
            return f"return {self._rules.wrappers.get(kind, self._rules.counterparts[kind])}({call})"
        if node.returns is not None and self._names_core(node.returns):
            raise CannotTell(f"{node.name}: returns {ast.unparse(node.returns)}; give its body")
        returns_nothing = isinstance(node.returns, ast.Constant) and node.returns.value is None
        return call if returns_nothing else f"return {call}"

    def _arguments(self, node: Function) -> Iterator[str]:
        its = node.args
        for each in [*its.posonlyargs, *its.args][1:]:
            yield self._argument(each)
        if its.vararg is not None:
            yield f"*{its.vararg.arg}"
        for each in its.kwonlyargs:
            yield f"{each.arg}={self._argument(each)}"
        if its.kwarg is not None:
            yield f"**{its.kwarg.arg}"

    def _argument(self, each: ast.arg) -> str:
        """What the core is given: the core of a blocking object."""
        cores = sorted(self._names_core(each.annotation)) if each.annotation is not None else []
        if not cores:
            return each.arg
        if _root(each.annotation) == "Iterable":
            return f"[core_of(each) for each in {each.arg}]"
        return f"core_of({each.arg})"

    def _names_core(self, node: ast.expr) -> set[str]:
        return {
            each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in self._rules.counterparts
        }


def _root(node: ast.expr | None) -> str:
    """`AsyncEdit` of `AsyncEdit[M]`."""
    return getattr(node.value if isinstance(node, ast.Subscript) else node, "id", "")


def _is_generic(bases: list[ast.expr]) -> bool:
    return bool(bases) and isinstance(bases[0], ast.Subscript)


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")
