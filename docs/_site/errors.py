"""Every error of ours with its messages, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "azureml_strategy"
_SHORTEST = 25  # characters: a shorter text is a part that another message goes on from


@dataclass
class ErrorClass:
    """One exception class of the package, and what it says where it is raised."""

    name: str
    described: str
    room: str
    messages: set[str] = field(default_factory=set)


def markdown() -> str:
    """A section for each class that has messages, in the order of its rooms."""
    found = sorted(errors().values(), key=lambda each: (each.room, each.name))
    return "\n".join(_section(each) for each in found if each.messages)


def errors() -> dict[str, ErrorClass]:
    """The package's own exceptions by name."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    found = {each.name: each for path, tree in trees.items() for each in _classes(path, tree)}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                _add(found, node.exc)
    return found


def _classes(path: Path, tree: ast.Module) -> Iterator[ErrorClass]:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for node in ast.walk(tree):
        bases = " ".join(map(ast.unparse, node.bases)) if isinstance(node, ast.ClassDef) else ""
        if isinstance(node, ast.ClassDef) and ("Error" in bases or "Exception" in bases) and node.name[0] != "_":
            yield ErrorClass(node.name, ast.get_docstring(node) or "", room)


def _add(found: dict[str, ErrorClass], call: ast.Call) -> None:
    name = ast.unparse(call.func).rpartition(".")[2]
    text = _text(call.args[0])
    if name in found and len(text) >= _SHORTEST:
        found[name].messages.add(text)


def _text(node: ast.expr) -> str:
    """A message with the names of what is filled in, in angle brackets."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(each) for each in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"<{_name(node.value)}>"
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "..." if isinstance(node, ast.IfExp) else ""


def _name(node: ast.expr) -> str:
    """What an expression is about: `text` of `text.strip()`, `names` of `", ".join(names)`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").lower()
        case (
            ast.Call(func=ast.Attribute(value=ast.Constant()), args=[first, *_])
            | ast.Call(func=ast.Name(), args=[first, *_])
        ):
            return _name(first)
        case ast.Call(func=ast.Attribute(value=value)) | ast.Subscript(value=value) | ast.BinOp(left=value):
            return _name(value)
        case ast.GeneratorExp(generators=[ast.comprehension(iter=value), *_]):
            return _name(value)
    return "..."


def _section(error: ErrorClass) -> str:
    described = " ".join(error.described.split("\n\n")[0].split())
    messages = "\n".join(f"- `{_in_one_line(text)}`" for text in sorted(error.messages))
    return f"## {error.name}\n\nOf `{error.room}`. {described}\n\n{messages}\n"


def _in_one_line(text: str) -> str:
    return " ".join(text.replace("`", "'").split())
