"""Writes the build contexts of images: this package as a wheel, with a Dockerfile, in the user's cache."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import azureml_strategy

PACKAGE = "azureml-strategy"
EXTRA = "tracking"  # it brings azureml-mlflow, without which a job's metrics do not reach its run
PLACE = "/opt/azureml-strategy"  # WORKDIR of our Dockerfile

# The earliest date of the zip format. With a constant date, the same files give the same archive and the same image.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_SHIPPED = ("Dockerfile", "conda.yaml", "constraints.txt")
_TORCH_FOR_CPUS = "https://download.pytorch.org/whl/cpu"
_FROM = re.compile(r"(?m)^FROM (.*)$")


def shipped_constraints() -> str:
    """The text of constraints.txt, the tested set."""
    return _shipped("constraints.txt").decode()


def shipped_dockerfile(base_image: str | None = None) -> str:
    """The text of this package's Dockerfile, on its own base image or on another."""
    text = _shipped("Dockerfile").decode()
    return _FROM.sub(f"FROM {base_image}", text) if base_image else text


def base_of(dockerfile: str) -> str:
    """The base image that a Dockerfile of ours names."""
    found = _FROM.search(dockerfile)
    return found[1] if found else ""


def adding_lines(wheel: str) -> list[str]:
    """The lines of a Dockerfile that add the wheel, which lies in `PLACE`. The installed versions stay."""
    return [
        # pip would keep another build of the same version.
        f"RUN python -m pip uninstall --yes {PACKAGE} \\",
        f"    && python -m pip list --format=freeze > {PLACE}/installed.txt \\",
        f'    && python -m pip install --no-cache-dir --constraint {PLACE}/installed.txt "{PLACE}/{wheel}[{EXTRA}]" \\',
        "    && azureml-strategy --version",
    ]


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, and make the folders above it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def build_folder(base_image: str | None = None) -> Path:
    """Write the build context of the image to a folder in the user's cache. The same content gives the same folder."""
    return _build_folder(_cache(), base_image)


@functools.cache  # a sweep renders many jobs, and the package does not change meanwhile
def _build_folder(cache: Path, base_image: str | None) -> Path:
    """Write the build context below a folder of the cache. It is an argument to be part of the cache's key."""

    def fill(folder: Path) -> None:
        for name in _SHIPPED:
            (folder / name).write_bytes(_shipped(name))
        (folder / "Dockerfile").write_text(shipped_dockerfile(base_image), encoding="utf-8")
        write_wheel(folder)

    return keep_context(fill)


def serving_folder(kind: str, requirements: Path | None, *, cuda: bool = True) -> Path:
    """Write the build context of an endpoint's image to a folder in the user's cache.

    Args:
        kind: `online` or `batch`.
        requirements: further packages of the user's. The versions in constraints.txt stay.
        cuda: whether the machines have GPUs. Without them the image has neither CUDA nor torch's libraries for it,
            which are gigabytes.
    """
    dockerfile = _shipped("Dockerfile.serving").decode()
    if not cuda:
        dockerfile = _FROM.sub(lambda line: line[0].replace("-cuda12.6", ""), dockerfile)
        dockerfile = dockerfile.replace("--no-cache-dir", f"--no-cache-dir --extra-index-url {_TORCH_FOR_CPUS}")

    def fill(folder: Path) -> None:
        server = _shipped(f"{kind}.txt").decode()
        (folder / "serving.txt").write_text(f"{server}pillow\n", encoding="utf-8")
        pinned = {line.partition("==")[0] for line in server.splitlines()}  # whose versions take precedence
        tested = shipped_constraints().splitlines(keepends=True)
        constraints = [line for line in tested if line.partition("==")[0] not in pinned]
        (folder / "constraints.txt").write_text("".join(constraints), encoding="utf-8")
        (folder / "own.txt").write_bytes(requirements.read_bytes() if requirements else b"")
        (folder / "conda.yaml").write_bytes(_shipped("conda.yaml"))
        (folder / "Dockerfile").write_text(dockerfile, encoding="utf-8")
        write_wheel(folder)

    return keep_context(fill)


def keep_context(fill: Callable[[Path], None]) -> Path:
    """Keep a build context, which `fill` writes to a folder, in the user's cache, in a folder named after its content.

    The same content gives the same folder, so that Azure ML uses the image again.
    """
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as new:
        written = Path(new) / "context"
        written.mkdir()
        fill(written)
        folder = cache / _content_hash(written)
        # The rename is atomic: a folder of this name is always complete. It fails if another process was first.
        try:
            written.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def _cache() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "azureml_strategy" / "environments"


def _shipped(name: str) -> bytes:
    return files("azureml_strategy.environments").joinpath(name).read_bytes()


def _content_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def write_wheel(folder: Path) -> Path:
    """Write the package, as it is installed here, as a wheel into a folder, and return its path."""
    name, content = _wheel()
    path = folder / name
    path.write_bytes(content)
    return path


@functools.cache
def _wheel() -> tuple[str, bytes]:
    """The name and the content of the wheel."""
    installed = distribution(PACKAGE)
    stem = f"{PACKAGE.replace('-', '_')}-{installed.version}"
    contents = dict(_sources())
    # Leave out the long description, the README: a changed word in it must not cause a new image.
    headers = (installed.read_text("METADATA") or "").partition("\n\n")[0] + "\n"
    described = [line for line in headers.splitlines(True) if not line.startswith("Description-Content")]
    contents[f"{stem}.dist-info/METADATA"] = "".join(described).encode()
    contents[f"{stem}.dist-info/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    kind = f"Wheel-Version: 1.0\nGenerator: {PACKAGE}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents[f"{stem}.dist-info/WHEEL"] = kind.encode()
    record = [f"{name},sha256={_record_hash(contents[name])},{len(contents[name])}" for name in sorted(contents)]
    contents[f"{stem}.dist-info/RECORD"] = "\n".join([*record, f"{stem}.dist-info/RECORD,,", ""]).encode()
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, contents[name], zipfile.ZIP_DEFLATED)
    return f"{stem}-py3-none-any.whl", wheel.getvalue()


def _sources() -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of each file of the package and its Hydra plugins, installed side by side."""
    root = Path(azureml_strategy.__file__).parents[1]
    for folder in (root / "azureml_strategy", *root.glob("hydra_plugins/azureml_*")):
        for parent, folders, names in os.walk(folder, followlinks=True):  # an editable install has symbolic links
            folders[:] = [name for name in folders if name != "__pycache__"]
            for path in (Path(parent, name) for name in names):
                yield path.relative_to(root).as_posix(), path.read_bytes()


def _record_hash(content: bytes) -> str:
    """The hash of a file as the RECORD of a wheel has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
