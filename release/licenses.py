"""Writes docs/licenses.md: the licence of everything that an installation brings, by the distributions' own metadata.

    python release/licenses.py [--write] [--site-packages FOLDER]

Without `--write` it compares the page with what is installed. It fails on a licence that is on none of the lists below.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from textwrap import fill

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licenses.md"
# They ask for a notice at most, and permit use by a work under Apache-2.0.
PERMISSIVE = {
    *(
        "0BSD",
        "AFL-2.1",
        "Apache-2.0",
        "BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "ISC",
    ),
    *("LLVM-exception", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Zlib"),
}
# Copyleft that ends at the library's own files, and why it does not reach whoever depends on it.
WEAK_COPYLEFT = {
    "MPL-2.0": "covers the files of the package itself. Who installs it unchanged owes nothing; who changes these "
    "files and passes them on publishes the changes. It does not reach code that imports it.",
}
# What distributions write that is no SPDX name.
_SPDX = {
    "Academic Free License (AFL)": "AFL-2.1",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache Software License 2.0": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
# Their metadata say nothing that can be used; their licence files do.
_BY_FILE = {"huey": "MIT", "skops": "MIT"}
# They come with torch's own wheels for CUDA only, so whether they are here says nothing: the page names them apart.
_OF_TORCH = re.compile(r"nvidia-(?!ml-py)|cuda-|triton$")
_TEXT = """\
# Licences

For whoever has to know, before a company uses azureml-strategy, under which licences it and all that it installs stand.

azureml-strategy is [Apache-2.0](../LICENSE). Its wheel holds no code of other projects: pip installs what it needs
beside it, each under its own licence. `make licenses` writes this page from the metadata of the installed
distributions, for the extra `all`, on Linux with Python 3.11. `make test` and `make release-check` fail where it is out
of date, or where a licence appears that nobody has looked at. `constraints.txt` has the versions. This is a list, and
no legal advice.

## Copyleft

{copyleft}
None of the others is copyleft.

## NVIDIA's packages

On Linux, where no CPU build is offered, pip takes torch's wheel for CUDA. It depends on NVIDIA's own packages, and on
triton (MIT). NVIDIA's are proprietary for the most part, under the licence agreement of its CUDA Toolkit and
the supplements of cuDNN, NCCL and others; `pip show` names each. We neither contain, change nor pass on any of them. An
installation with the CPU build has none. `nvidia-ml-py`, of the extra `counters`, is not one of them: it is BSD.

{nvidia}

## All of them

"always" comes with every installation; the others come with the extras named. Some packages say BSD without
a number.

| package | licence | comes with |
|---|---|---|
{rows}
"""


def licence(distribution: Distribution) -> str:
    """The licence by the metadata: SPDX names where there are any."""
    data = distribution.metadata
    (expression,) = data.get_all("License-Expression", [""])
    if expression:
        return expression
    classifiers = [each.split(" :: ")[-1] for each in data.get_all("Classifier", []) if each.startswith("License ::")]
    named = [_SPDX[each] for each in classifiers if each in _SPDX]
    said = "".join(data.get_all("License", [])).strip().partition("\n")[0]
    return " OR ".join(named) or _BY_FILE.get(canonicalize_name(data["Name"])) or _SPDX.get(said, said)


def unknown(expression: str) -> set[str]:
    """The names in a licence that are on neither list; the empty one where there is none."""
    names = set(re.split(r"[()\s]+(?:AND|OR|WITH)[()\s]+", expression.strip("() ")))
    return names - PERMISSIVE - WEAK_COPYLEFT.keys()


def brought(installed: dict[str, Distribution], name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """Names of all that a distribution with some extras asks for, on this platform, and what these ask for."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(name, extras)]
    while waiting:
        each = waiting.pop()
        if each not in seen and not _OF_TORCH.match(each[0]):
            seen.add(each)
            waiting += [(canonicalize_name(asked.name), frozenset(asked.extras)) for asked in _asked(installed, *each)]
    return {found for found, _ in seen} - {name}


def _asked(installed: dict[str, Distribution], name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    for each in map(Requirement, installed[name].requires or ()):
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield each


def page(found: Iterable[Distribution], constraints: str) -> str:
    """The page.

    Args:
        found: distributions among which azureml-strategy and all of its extra `all` are.
        constraints: the text of constraints.txt, which names what this platform may not have.
    """
    installed: dict[str, Distribution] = {canonicalize_name(each.metadata["Name"]): each for each in found}
    ours = "azureml-strategy"
    extras = [
        each for each in installed[ours].metadata.get_all("Provides-Extra", []) if each not in ("all", "dev", "docs")
    ]
    always = brought(installed, ours)
    by_extra = {extra: brought(installed, ours, frozenset({extra})) - always for extra in extras}
    names = sorted(always.union(*by_extra.values()))
    licences = {name: licence(installed[name]) for name in names}
    where = {name: ", ".join(each for each in extras if name in by_extra[each]) or "always" for name in names}
    lines = "\n".join(f"| {name} | {licences[name] or 'unknown'} | {where[name]} |" for name in names)
    nvidia = re.findall(r"^(nvidia-(?!ml-py)[\w-]+|cuda-[\w-]+)==", constraints, re.M)
    return _TEXT.format(
        copyleft=_copyleft(licences),
        nvidia=fill(", ".join(f"`{each}`" for each in nvidia), 118, break_on_hyphens=False),
        rows=lines,
    )


def _copyleft(licences: dict[str, str]) -> str:
    lines = []
    for name, reason in WEAK_COPYLEFT.items():
        under = [f"`{package}`" for package, text in licences.items() if name in text]
        lines.append(fill(f"{', '.join(under)}: {name}, which {reason}", 118) + "\n")
    return "\n".join(lines)


def wrong(text: str) -> list[str]:
    """The rows of the page with a licence that is on no list."""
    return [f"{package}: {found}" for package, found in rows(text) if unknown(found)]


def rows(text: str) -> list[tuple[str, str]]:
    """Package and licence of each row of the page."""
    return re.findall(r"^\| ([\w.-]+) \| (.+?) \|", text.partition("|---|")[2], re.M)


def main() -> int:
    """Compare the page, or write it.

    Returns:
        1 if it is out of date or names a licence that is on no list, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page")
    parser.add_argument("--site-packages", default=None, help="where to look, in place of this Python's own")
    options = parser.parse_args()
    found = distributions() if options.site_packages is None else distributions(path=[options.site_packages])
    text = page(found, (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
    errors = [*wrong(text), *(["docs/licenses.md is out of date. Type: make licenses"] if stale else [])]
    print("\n".join(errors) or f"docs/licenses.md: {len(rows(text))} packages, every licence is on the lists")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
