"""The docs site: `make docs`. Its sources are the Markdown files of the repository, which read as well on their own."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))  # for the extension below

project = "azureml-strategy"
author = "the authors of azureml-strategy"
copyright = "the authors of azureml-strategy, Apache-2.0"  # noqa: A001 - Sphinx's name

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_argparse_cli",
    "sphinx_copybutton",
    "_site",
]
# The root of the sources is the repository, so that links between README, docs/ and benchmarks/ hold here as on GitHub.
root_doc = "docs/index"
include_patterns = [
    *("docs/**.md", "benchmarks/README.md", "examples/README.md"),
    *(
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "README.md",
        "tests/checkpoint/released/README.md",
        "SECURITY.md",
    ),
]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_member_order = "bysource"
default_role = "code"  # docstrings are Markdown in this
autodoc_inherit_docstrings = False
nitpicky = True
nitpick_ignore = [  # bases that nobody names
    ("py:class", f"azureml_strategy.{name}")
    for name in (
        *("strategies.launched.LaunchedStrategy", "strategies.zero.checkpoint.AnyWorldDeepSpeedStrategy"),
        *("strategies.zero.checkpoint.StagedDeepSpeedStrategy", "cluster.isolation.IsolatedCallback"),
        *("data.folders.ClassFolders", "strategies.equal_buffers.EqualBuffersStrategy"),
    )
]
nitpick_ignore_regex = [(r"py:.*", r"(?!azureml_strategy).*")]  # others' sites cannot be asked offline

html_theme = "furo"
html_title = "azureml-strategy"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_extra_path = ["_root"]  # the pages are below docs/
