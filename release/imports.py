"""Run by the Python of an environment that was installed with one extra: imports what the extra brings, and then us.

    PYTHON release/imports.py EXTRA

It fails where a distribution that the extra names cannot be imported, and where one of our modules cannot for another
reason than a library that only other extras bring.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import Distribution, distribution

from packaging.requirements import Requirement

OURS = "azureml-strategy"


def named(extra: str) -> set[str]:
    """The distributions that pyproject.toml names for the extra, and those of the extras in it; "" is for no extra."""
    found = set()
    for each in map(Requirement, distribution(OURS).requires or ()):
        if each.marker.evaluate({"extra": extra}) if each.marker else not extra:
            found |= set().union(*map(named, each.extras)) if each.name == OURS else {each.name}
    return found


def packages(found: Distribution) -> Iterator[str]:
    """The importable packages and modules at the top of a distribution: `azure.ai.ml`, `pynvml`, `torch`."""
    folders = {file.parent.as_posix() for file in found.files or () if file.name == "__init__.py"}
    for each in sorted(folders):
        if each.rpartition("/")[0] not in folders and not each.startswith((".", "_", "tests")) and "-" not in each:
            yield each.replace("/", ".")
    alone = [file for file in found.files or () if str(file) == file.name and file.suffix == ".py"]
    yield from (file.stem for file in alone if file.stem != "example")


def our_modules() -> list[str]:
    """All of ours. What `init` copies is no module of ours, `__main__` would run, and `online` needs a server."""
    files = [file for file in distribution(OURS).files or () if file.suffix == ".py" and "project" not in file.parts]
    names = {".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files}
    return sorted(name for name in names if not name.endswith((".__main__", ".serving.online")))


def missing(module: str) -> str | None:
    """The library that is missing for a module; None if it can be imported."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        return error.name or str(error)
    return None


def unexplained(without: dict[str, str], brought: set[str]) -> list[str]:
    """What cannot be imported although the extra is installed.

    Args:
        without: modules that cannot be imported, each with the library that is missing.
        brought: the modules that the extra brings, none of which may be missing or lack anything.
    """
    whole = [f"{each}." for each in (*brought, "azureml_strategy")]
    return [
        f"{module} needs {library}"
        for module, library in without.items()
        if module in brought or any(each.startswith(f"{library}.") or f"{library}.".startswith(each) for each in whole)
    ]


def main(extra: str) -> int:
    """Import, and say what was imported.

    Returns:
        1 if something that the extra must bring is missing, else 0.
    """
    theirs = {name: list(packages(distribution(name))) for name in named(extra)}
    brought, ours = {module for modules in theirs.values() for module in modules}, our_modules()
    without = {name: library for name in (*sorted(brought), *ours) if (library := missing(name)) is not None}
    wrong = unexplained(without, brought)
    wrong += [f"{name} brings nothing to import" for name, modules in theirs.items() if not modules]
    if extra == "all":
        wrong += [f"{name} needs {library}" for name, library in without.items()]
    print("\n".join(wrong), end="", file=sys.stderr)
    waits = ", ".join(sorted({library.partition(".")[0] for library in without.values()})) or "nothing"
    can = f"{len(ours) - len(without)} of our {len(ours)} modules"
    print(f"{len(theirs)} distributions and {can} can be imported; the others wait for {waits}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
