"""Every block of README and the pages that can run here is run. `make test-docs` runs all pages, `make test` some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")) if "```" in path.read_text())
# One with Python and with jobs as far as --dry-run.
SAMPLED = {"cluster"}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(path, id=str(path.relative_to(ROOT)), marks=() if path.stem in SAMPLED else pytest.mark.exhaustive)
        for path in PAGES
    ],
)
def test_what_a_page_shows_runs(page: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OUTSIDE_PATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.documentation.page", str(page)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-8000:]
    told = json.loads(done.stdout.splitlines()[-1])
    print("\n".join(f"{each['line']}: {each['reason'] or 'ran'}" for each in told))
