"""The asyncio API as it is written: its classes, their public members, and what each name there refers to.

Law: only the source is read; nothing of the package is imported, so that a broken blocking API can be written anew.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """A source file: its text, its syntax tree and what its imports bind."""

    name: str
    text: str
    tree: ast.Module
    imports: dict[str, str]  # the name bound: the line that binds it
    modules: dict[str, str]  # the name bound to a module of the package: that module's dotted name


@dataclass(frozen=True, slots=True)
class Member:
    """A public name of a class: its definitions in order, as overloads or a property's setter, or one annotation."""

    name: str
    definitions: tuple[Function, ...]
    module: Module
    annotation: ast.expr | None = None
    docstring: str | None = None  # as it stands in the source, quotes included


@dataclass(frozen=True, slots=True)
class Class:
    """A class and the module that it stands in."""

    node: ast.ClassDef
    module: Module

    @property
    def docstring(self) -> str | None:
        """The class's docstring as it stands in the source, None if there is none."""
        return docstring_of(self.node, self.module)


class Sources:
    """The package's modules by their dotted names, each read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.module = cache(self._module)

    def _module(self, name: str) -> Module:
        path = self._root.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        text = path.read_text()
        tree = ast.parse(text)
        imports: dict[str, str] = {}
        modules: dict[str, str] = {}
        for node in tree.body:
            if isinstance(node, ast.Import):
                for each in node.names:
                    imports[each.asname or each.name.split(".")[0]] = f"import {_as(each)}"
            elif isinstance(node, ast.ImportFrom):
                for each in node.names:
                    bound = each.asname or each.name
                    imports[bound] = f"from {node.module} import {_as(each)}"
                    if self._is_module(f"{node.module}.{each.name}"):
                        modules[bound] = f"{node.module}.{each.name}"
        return Module(name, text, tree, imports, modules)

    def _is_module(self, name: str) -> bool:
        path = self._root.joinpath(*name.split("."))
        return path.with_suffix(".py").exists() or (path / "__init__.py").exists()

    def find(self, module: Module, name: str) -> Class | None:
        """The class that a name stands for in a module, None if it is not the package's."""
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return Class(node, module)
        for node in module.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module is not None and self._is_module(node.module):
                for each in node.names:
                    if (each.asname or each.name) == name:
                        return self.find(self.module(node.module), each.name)
        return None


def _as(alias: ast.alias) -> str:
    return alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"


def docstring_of(node: ast.ClassDef | Function, module: Module) -> str | None:
    """A docstring as it stands in the source, quotes and indentation included."""
    return _literal(node.body[0], module) if node.body else None


def _literal(node: ast.stmt, module: Module) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return ast.get_source_segment(module.text, node.value)
    return None


def members(each: Class) -> Iterator[Member]:
    """What a class itself defines: methods, properties, and annotations that are followed by a docstring."""
    functions: dict[str, list[Function]] = {}
    body = each.node.body
    for node, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, Function):
            functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            docstring = _literal(following, each.module)
            if docstring is not None:
                yield Member(node.target.id, (), each.module, node.annotation, docstring)
    for name, definitions in functions.items():
        yield Member(name, tuple(definitions), each.module)


def binding(name: str, module: Module) -> str | None:
    """The line by which another file has the same name: an import, or the definition of a type variable."""
    if name in module.imports:
        return module.imports[name]
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            is_variable = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "TypeVar"
            return ast.unparse(node) if is_variable else f"from {module.name} import {name}"
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return f"from {module.name} import {name}"
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return f"from {module.name} import {name}"
    return None


def free_names(text: str) -> set[str]:
    """The names that a file uses and does not define itself."""
    tree = ast.parse(text)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {
        node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    }
    setters = {ast.unparse(each) for node in ast.walk(tree) for each in getattr(node, "decorator_list", ())}
    bound |= {each.removesuffix(".setter") for each in setters if each.endswith(".setter")}
    return used - bound - set(dir(builtins))
