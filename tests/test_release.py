"""What a release needs and can be checked in seconds; `make release-check` does the rest."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from importlib.metadata import distributions, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from azureml_strategy.cli import _parser

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def script(name: str) -> ModuleType:
    """One of the scripts in release/, as a module."""
    spec = spec_from_file_location(f"release_{name}", ROOT / "release" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load(path)["jobs"]
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job.get("steps", [])]


def test_there_are_both_workflows() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_of_the_makefile(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = {words[1] for step in steps(path) if (words := shlex.split(step.get("run", "")))[:1] == ["make"]}
    assert called
    assert called <= targets


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_do_no_more_than_they_must(path: Path) -> None:
    assert load(path)["permissions"] == {}
    allowed = {"publish": {"id-token": "write"}, "announce": {"contents": "write"}}
    for name, job in jobs(path).items():
        assert job["permissions"] == allowed.get(name, {"contents": "read"}), name
        assert "timeout-minutes" in job or job["uses"] == "./.github/workflows/ci.yml"
        assert "secrets" not in str(job)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_and_leave_no_credentials(path: Path) -> None:
    for line in path.read_text().splitlines():
        if "uses:" in line and "./" not in line:
            assert re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_nothing_is_published_that_was_not_tested_and_checked() -> None:
    release = ROOT / ".github" / "workflows" / "release.yml"
    assert load(release)[True] == {"push": {"tags": ["v*"]}}, "YAML reads `on` as true"
    assert jobs(release)["publish"]["needs"] == ["test", "build"]
    assert jobs(release)["publish"]["environment"]["name"] == "pypi"
    (check,) = [step["run"] for step in jobs(release)["build"]["steps"] if "run" in step]
    assert check == 'make release-check TAG="$GITHUB_REF_NAME"'


@pytest.mark.parametrize(
    ("tag", "heading", "wrong"),
    [
        (None, "## VERSION (unreleased)", None),
        ("vVERSION", "## VERSION (2026-12-01)", None),
        ("vVERSION", "## VERSION (unreleased)", "CHANGELOG.md has no heading `## VERSION"),
        ("v9.9.9", "## VERSION (2026-12-01)", "The tag is v9.9.9, the version in pyproject.toml VERSION."),
        ("VERSION", "## VERSION (2026-12-01)", "The tag is VERSION, "),
    ],
)
def test_a_tag_that_is_not_the_version_is_no_release(
    tag: str | None, heading: str, wrong: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, this = script("check"), PROJECT["version"]
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading.replace('VERSION', this)}\n")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    release = check.Release(tmp_path, tmp_path, tag and tag.replace("VERSION", this))
    if wrong is None:
        assert this in check.check_version(release)
    else:
        with pytest.raises(check.CheckError, match=re.escape(wrong.replace("VERSION", this))):
            check.check_version(release)


def test_the_changelog_has_this_version_on_top() -> None:
    first = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first is not None
    assert re.fullmatch(rf"{re.escape(PROJECT['version'])} \((unreleased|\d{{4}}-\d\d-\d\d)\)", first[1])
    assert version("azureml-strategy") == PROJECT["version"]


def test_every_extra_is_checked_and_the_tour_is_of_commands_that_there_are() -> None:
    check = script("check")
    assert {*check.EXTRAS, "dev", "docs"} == set(PROJECT["optional-dependencies"])
    for extra, command in check.TOUR:
        assert extra in check.EXTRAS
        _parser().parse_args(shlex.split(command)[1:])


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the page is of Python 3.11")
def test_the_licences_of_what_is_installed_are_on_their_page() -> None:
    licenses = script("licenses")
    text = licenses.page(distributions(), (ROOT / "constraints.txt").read_text())
    assert not licenses.wrong(text)
    assert len(licenses.rows(text)) > 150
    assert licenses.PAGE.read_text() == text, "out of date; type: make licenses"


@pytest.mark.parametrize(
    ("expression", "unknown"),
    [
        ("MIT", set()),
        ("Apache-2.0 AND (MIT OR MPL-2.0)", set()),
        ("Apache-2.0 WITH LLVM-exception", set()),
        ("GPL-3.0-only OR MIT", {"GPL-3.0-only"}),
        ("LGPL-2.1-or-later", {"LGPL-2.1-or-later"}),
        ("", {""}),
    ],
)
def test_a_licence_that_nobody_has_looked_at_is_told(expression: str, unknown: set[str]) -> None:
    assert script("licenses").unknown(expression) == unknown


def test_the_tools_are_pinned_by_their_checksums() -> None:
    asked = re.findall(r"^[a-z][\w-]*", (ROOT / "release" / "requirements.in").read_text(), re.M)
    text = (ROOT / "release" / "requirements.txt").read_text()
    pins = [Requirement(each.partition(" \\")[0]) for each in re.findall(r"^[a-z].*", text, re.M)]
    assert set(asked) <= {each.name for each in pins}
    assert all(str(each.specifier).startswith("==") for each in pins)
    assert all("--hash=sha256:" in block for block in re.split(r"^(?=[a-z])", text, flags=re.M)[1:])


def test_the_project_has_one_address() -> None:
    home = PROJECT["urls"]["Homepage"]
    pages = [*FORMS, ROOT / "SECURITY.md", ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md", ROOT / "docs" / "releases.md"]
    found = [*PROJECT["urls"].values(), *(link for page in pages for link in addresses(page))]
    assert len(found) > 8
    assert all(each == home or each.startswith(f"{home}/") for each in found)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "SECURITY.md").read_text()):
        assert (ROOT / link).exists(), link


def addresses(page: Path) -> list[str]:
    return re.findall(r"https://github\.com/[\w./-]*\w", page.read_text())


def test_a_fault_is_reported_with_what_doctor_says() -> None:
    bug = load(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")
    (doctor,) = [each for each in bug["body"] if each.get("id") == "doctor"]
    assert "`azureml-strategy doctor`" in doctor["attributes"]["description"]
    assert doctor["validations"]["required"]
    assert load(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")["blank_issues_enabled"] is False
