"""Checks a release before it is made: `make release-check`. docs/releases.md says when.

It builds the last commit, not what else lies in the working tree, and leaves the files of the release in `dist`. Each
step says what it proves; the first one that fails ends the check with exit code 1.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = [extra for extra in PROJECT["optional-dependencies"] if extra not in ("dev", "docs")]  # these are for a clone
CONSTRAINTS = str(ROOT / "constraints.txt")
# README's and docs/first_steps.md's commands, each in an environment with the one extra that these pages ask for.
TOUR = (
    ("recipes", "azureml-strategy recipes"),
    ("recipes", "azureml-strategy doctor"),
    ("recipes", "azureml-strategy emulate --nodes 2 -- azureml-strategy train resnet50_ddp trainer.max_epochs=1"),
    ("recipes", "azureml-strategy init my_project"),
    ("recipes", "azureml-strategy emulate --nodes 2 -- python my_project/train.py"),
    ("recipes", "azureml-strategy train my_project/recipe.yaml trainer.max_epochs=3 output_dir=own"),
    ("azure", "azureml-strategy submit my_project/train.py cluster=nc24ads_a100_v4 --dry-run"),
    ("azure", "azureml-strategy submit resnet50_imagenet cluster=nd96amsr_a100_v4 cluster.num_nodes=4 --dry-run"),
    (
        "recipes",
        "azureml-strategy emulate --nodes 2 -- azureml-strategy train gpt_tensor_parallel "
        "model=gpt_tiny trainer.max_steps=8 checkpoint.every_n_train_steps=8 output_dir=sharded",
    ),
    ("recipes", "azureml-strategy consolidate sharded/checkpoints/*.ckpt weights.ckpt"),
)


class CheckError(Exception):
    """A step has shown that the release is not one."""


@dataclass(frozen=True)
class Release:
    """What is checked.

    Attributes:
        dist: where the files of the release are, or will be.
        work: a folder outside of the checkout, for copies and environments.
        tag: the tag of a release that is being made; None for one that may be.
    """

    dist: Path
    work: Path
    tag: str | None

    @property
    def wheel(self) -> Path:
        """The wheel of this version."""
        return self.dist / f"azureml_strategy-{PROJECT['version']}-py3-none-any.whl"

    @property
    def sdist(self) -> Path:
        """The source archive of this version."""
        return self.dist / f"azureml_strategy-{PROJECT['version']}.tar.gz"

    def python(self, environment: str) -> str:
        """The Python of an environment in the folder of work."""
        return str(self.work / environment / "bin" / "python")


def run(*command: str, cwd: Path | None = None, umask: int = -1, environ: Mapping[str, str] | None = None) -> str:
    """Run a command and return what it wrote; its end is shown if it fails.

    Raises:
        CheckError: its exit code is not 0.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=cwd, umask=umask, env={**kept, **(environ or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CheckError(f"{shlex.join(command)}\nended with {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}")
    return done.stdout


def check_version(release: Release) -> str:
    """The tag names the version of pyproject.toml, and the changelog has it with a date."""
    if release.tag is None:
        return f"{PROJECT['version']}; no tag was given, so neither is compared with it"
    heading = rf"^## {re.escape(PROJECT['version'])} \(\d{{4}}-\d\d-\d\d\)$"
    if release.tag != f"v{PROJECT['version']}":
        raise CheckError(f"The tag is {release.tag}, the version in pyproject.toml {PROJECT['version']}.")
    if not re.search(heading, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M):
        raise CheckError(f"CHANGELOG.md has no heading `## {PROJECT['version']} (YYYY-MM-DD)`.")
    return release.tag


def build(release: Release) -> str:
    """Two builds in different folders, at different times, with other access rights, give the same bytes."""
    shutil.rmtree(release.dist, ignore_errors=True)
    one, other = _export(release.work / "one"), _export(release.work / "other")
    for path in (path for path in other.rglob("*") if path.is_file()):
        os.utime(path)
    _build(one, release.dist)
    _build(other, release.work / "again", umask=0o002)
    _build(one, release.work / "checkout", "--wheel")
    for file in (release.sdist, release.wheel):
        if _sha256(file) != _sha256(release.work / "again" / file.name):
            raise CheckError(f"The second build gave another {file.name}.")
    if _sha256(release.wheel) != _sha256(release.work / "checkout" / release.wheel.name):
        raise CheckError("The wheel made of the source archive is not the one made of the checkout.")
    changed = run("git", "status", "--porcelain", "--untracked-files=no", cwd=ROOT)
    note = "\nThe working tree has changes that are not committed; they are not in it." if changed else ""
    return "\n".join(f"{_sha256(file)}  {file.name}" for file in (release.sdist, release.wheel)) + note


def _export(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    packed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _build(tree: Path, out: Path, *options: str, umask: int = 0o022) -> None:
    moment = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    command = (str(BIN / "python"), "-m", "build", "--dependency-constraints-txt", CONSTRAINTS, "--outdir", str(out))
    run(*command, *options, str(tree), umask=umask, environ={"SOURCE_DATE_EPOCH": moment})


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def check_metadata(release: Release) -> str:
    """PyPI takes both files and shows the README, and the wheel holds nothing by mistake."""
    run(str(BIN / "twine"), "check", "--strict", str(release.sdist), str(release.wheel))
    run(str(BIN / "check-wheel-contents"), str(release.wheel), cwd=ROOT)
    return "twine check --strict and check-wheel-contents have nothing to say"


def install_by_pip(release: Release) -> str:
    """What a user types works, with the wheel and the source archive: all extras, and every version is a tested one."""
    for name, packed in (("pip-sdist", release.sdist), ("pip", release.wheel)):
        run(sys.executable, "-m", "venv", "--clear", str(release.work / name))
        pip = (release.python(name), "-m", "pip", "--disable-pip-version-check")
        run(*pip, "install", "--quiet", "--no-compile", "-c", CONSTRAINTS, f"{packed}[all]")
        run(*pip, "check")
        _check_version_of(release, name)
    pinned = set(re.findall(r"^[\w.-]+==[^\s;]+", Path(CONSTRAINTS).read_text(encoding="utf-8"), re.M))
    found = run(release.python("pip"), "-m", "pip", "list", "--format", "freeze", "--exclude", "pip").splitlines()
    own = f"azureml-strategy=={PROJECT['version']}"
    loose = {_plain(each) for each in found} - {_plain(each) for each in pinned} - {own}
    if loose:
        raise CheckError(f"constraints.txt does not pin {', '.join(sorted(loose))}.")
    return f"{len(found)} packages, all of them in constraints.txt"


def _plain(pin: str) -> str:
    """A pin without the label of a build such as `+cpu`, its name as indexes write it."""
    name, _, version = pin.partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version.partition('+')[0]}"


def _check_version_of(release: Release, environment: str) -> None:
    said = run(str(release.work / environment / "bin" / "azureml-strategy"), "--version", cwd=release.work).strip()
    if said != PROJECT["version"]:
        raise CheckError(f"azureml-strategy --version says {said}.")


def install_each_extra(release: Release) -> str:
    """Each extra alone, in an empty environment: it resolves, what it names can be imported, and so can we.

    By uv, whose environments share their files. The source archive brings the same packages as the wheel.
    """
    said = []
    for extra in ("", *EXTRAS):
        name, wanted = extra or "base", f"[{extra}]" if extra else ""
        both = [
            _uv_install(release, label, f"{packed}{wanted}")
            for label, packed in ((name, release.wheel), (f"{name}-sdist", release.sdist))
        ]
        if both[0] != both[1]:
            raise CheckError(f"The source archive with {wanted or 'no extra'} brings other packages than the wheel.")
        imported = run(release.python(name), str(ROOT / "release" / "imports.py"), extra, cwd=release.work).splitlines()
        said.append(f"{name:12} {len(both[0]):4} packages: {imported[-1]}")
        print(f"   {said[-1]}", flush=True)
    return f"{len(said)} environments from the wheel, {len(said)} from the source archive"


def _uv_install(release: Release, name: str, wanted: str) -> list[str]:
    """Make an environment by uv, which is told of the same places as pip; return the pins that are in it."""
    places = {
        "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""),
        "UV_INDEX": os.environ.get("PIP_EXTRA_INDEX_URL", ""),
    }
    uv = (str(BIN / "uv"), "--quiet", "--no-config")
    python = ("--python", release.python(name))
    run(*uv, "venv", "--clear", "--python", sys.executable, str(release.work / name))
    best = ("--index-strategy", "unsafe-best-match", "-c", CONSTRAINTS, "--build-constraints", CONSTRAINTS)
    run(*uv, "pip", "install", *python, *best, wanted, environ={key: text for key, text in places.items() if text})
    run(*uv, "pip", "check", *python)
    _check_version_of(release, name)
    return sorted(each for each in run(*uv, "pip", "freeze", *python).splitlines() if "azureml-strategy" not in each)


def take_the_tour(release: Release) -> str:
    """README's first commands work from the wheel alone, in an empty folder, with the extra that README names."""
    with tempfile.TemporaryDirectory(prefix="tour-") as folder:
        for extra, command in TOUR:
            environ = {"PATH": f"{release.work / extra / 'bin'}:{os.environ['PATH']}", "HOME": folder}
            began = time.monotonic()
            said = run("bash", "-c", command, cwd=Path(folder), environ=environ)
            print(
                f"   {time.monotonic() - began:4.0f} s  [{extra}] {command}: {len(said.splitlines())} lines", flush=True
            )
    return f"{len(TOUR)} commands"


def check_licences(release: Release) -> str:
    """docs/licenses.md names what is installed, and each licence is one that somebody has looked at."""
    (packages,) = (release.work / "all" / "lib").glob("python*/site-packages")
    script = str(ROOT / "release" / "licenses.py")
    return run(sys.executable, script, "--site-packages", str(packages)).strip()


def write_sbom(release: Release) -> str:
    """The bill of materials, which goes beside the wheel: all that the tested set installs, as CycloneDX."""
    file = release.dist / f"azureml_strategy-{PROJECT['version']}.cdx.json"
    options = (
        "--pyproject",
        str(ROOT / "pyproject.toml"),
        "--mc-type",
        "library",
        "--output-reproducible",
        "--validate",
    )
    run(str(BIN / "cyclonedx-py"), "environment", *options, "--output-file", str(file), release.python("all"))
    return f"{file.name}, {file.stat().st_size // 1024} KiB"


STEPS = {
    each.__name__: each
    for each in (
        *(check_version, build, check_metadata, install_by_pip, install_each_extra),
        *(take_the_tour, check_licences, write_sbom),
    )
}


def main() -> int:
    """Run the steps.

    Returns:
        The exit code: 1 if a step failed, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"all by default: {', '.join(STEPS)}")
    parser.add_argument("--tag", help="the tag of the release that is being made, such as v1.2.0")
    parser.add_argument("--work", type=Path, help="a folder for copies and environments, which is kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="release-check-") as temporary:
        release = Release(ROOT / "dist", (options.work or Path(temporary)).absolute(), options.tag or None)
        try:
            _run_steps(release, options.steps or list(STEPS))
        except CheckError as error:
            print(f"FAILED: {error}")
            return 1
    return 0


def _run_steps(release: Release, names: list[str]) -> None:
    for number, name in enumerate(names, 1):
        proof = " ".join((STEPS[name].__doc__ or "").partition("\n\n")[0].split())
        print(f"{number}/{len(names)} {name}: {proof}", flush=True)
        began = time.monotonic()
        said = STEPS[name](release).replace("\n", "\n   ")
        print(f"   {said}\n   ok, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
