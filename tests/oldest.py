"""Whether the oldest versions that pyproject.toml allows have been tested as things are: tests/oldest.tested says so.

`python -m tests.oldest` leaves with 0 if so, and prints the state of things; `--passed STATE` writes that they passed
in that one. What counts is what names versions, and the files that know libraries from inside. A change elsewhere that
an old version does not bear is found at the next change of these, or by `make test-oldest`.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTED = Path(__file__).with_name("oldest.tested")


def state(root: Path = ROOT) -> str:
    """A hash of all that decides whether an old version works."""
    names = ["pyproject.toml", "constraints.txt", "tests/oldest.txt"]
    internals = sorted((root / "src").rglob("*internals.py"))
    digest = hashlib.sha256()
    for path in [*(root / name for name in names), *internals]:
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def have_passed(root: Path = ROOT) -> bool:
    """Whether they have passed since."""
    file = root / TESTED.relative_to(ROOT)
    return file.exists() and file.read_text().strip() == state(root)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--passed"]:
        TESTED.write_text(sys.argv[2] + "\n")
    else:
        print(state())
        sys.exit(0 if have_passed() else 1)
