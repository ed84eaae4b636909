"""Which libraries each module loads when it is imported: no join or move makes a light command heavy in silence.

`import_weight.json` beside this file records what was so. A module that it does not name loads none of these libraries.
If a change is meant, `python -m tests.test_import_weight` writes the file anew, and its diff is reviewed.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

from tests.test_architecture import modules

RECORD = Path(__file__).with_name("import_weight.json")
# These take from 0.1 s (numpy) to 5 s (transformers' models) to import, or need what not every machine has (DeepSpeed).
LIBRARIES = {"deepspeed", "hydra", "lightning", "mlflow", "numpy", "omegaconf", "rich", "torch", "transformers"}
LIBRARIES |= {"PIL", "azure", "jinja2", "obstore", "pandas", "pyarrow", "requests", "safetensors", "scipy"}


def run_at_import(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that an import runs: not those in functions, nor what is for type checkers."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if is_for_types(node):
            yield from run_at_import(node.orelse)
            continue
        yield node
        for branch in ("body", "handlers", "orelse", "finalbody"):
            yield from run_at_import(getattr(node, branch, []))


def is_for_types(node: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def handed_on(tree: ast.Module) -> dict[str, str]:
    """The names that a module hands on lazily, each with its own module: it names them for type checkers."""
    blocks = [node for node in tree.body if is_for_types(node)] if "lazy_attributes" in ast.dump(tree) else []
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def imported(tree: ast.Module, lazy: dict[str, dict[str, str]]) -> set[str]:
    """The modules that an import of this one imports by itself."""
    names = set()
    for node in run_at_import(tree.body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            for alias in node.names:
                of_module = f"{node.module}.{alias.name}"
                names.add(lazy.get(node.module, {}).get(alias.name, of_module if of_module in lazy else node.module))
    return names


def weights() -> dict[str, str]:
    """The libraries that each module loads, by itself and by what it imports of the package."""
    trees = {module: ast.parse(file.read_text()) for module, file in modules().items()}
    lazy = {module: handed_on(tree) for module, tree in trees.items()}
    direct = {module: imported(tree, lazy) for module, tree in trees.items()}
    found = {}
    for module in sorted(direct):
        loaded: set[str] = set()
        waiting = [module]
        while waiting:
            name = waiting.pop()
            if name not in loaded:
                loaded.add(name)
                packages = (name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1))
                waiting += [*direct.get(name, ()), *packages]
        if libraries := LIBRARIES & {name.partition(".")[0] for name in loaded}:
            found[module] = " ".join(sorted(libraries))
    return found


def test_no_module_loads_more_than_recorded() -> None:
    recorded, found = json.loads(RECORD.read_text()), weights()
    assert sorted(recorded.keys() - modules().keys()) == [], "names of modules that are gone: write the record anew"
    changed = {
        module: f"{recorded.get(module, 'none')} -> {found.get(module, 'none')}"
        for module in sorted(recorded.keys() | found.keys())
        if recorded.get(module) != found.get(module)
    }
    assert changed == {}, "if it is meant, run python -m tests.test_import_weight"


def test_what_is_light_loads_none() -> None:
    # The record is made by reading; this imports. A `__main__` would run its command.
    recorded = json.loads(RECORD.read_text())
    light = [module for module in sorted(modules()) if module not in recorded and not module.endswith("__main__")]
    code = "import importlib, json, sys\n"
    code += f"for name in {light}: importlib.import_module(name)\n"
    code += f"print(json.dumps(sorted({LIBRARIES} & sys.modules.keys())))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == []


if __name__ == "__main__":
    RECORD.write_text(json.dumps(weights(), indent=1) + "\n")
