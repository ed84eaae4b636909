"""Writes this package's installed files as a wheel, so that a job's image holds exactly the code that submitted it.

It works for any kind of installation. A wheel is a zip archive of the package and a folder that describes it:
packaging.python.org, "Binary distribution format".
"""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import azureml_strategy

_NAME = "azureml-strategy"
# The earliest date of the zip format. With a constant date, the same files give the same archive and the same image.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_wheel(folder: Path) -> Path:
    """Write the wheel.

    Args:
        folder: folder that receives it.

    Returns:
        Path of the wheel.
    """
    installed = distribution(_NAME)
    stem = f"{_NAME.replace('-', '_')}-{installed.version}"
    contents = dict(_sources())
    for name, text in _description(
        installed.read_text("METADATA") or "", installed.read_text("entry_points.txt") or ""
    ):
        contents[f"{stem}.dist-info/{name}"] = text.encode()
    contents[f"{stem}.dist-info/RECORD"] = _record(contents, f"{stem}.dist-info/RECORD").encode()
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, contents[name], zipfile.ZIP_DEFLATED)
    return path


def _sources() -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of each file of the package and its Hydra plugins, installed side by side."""
    root = Path(azureml_strategy.__file__).parents[1]
    for folder in (root / "azureml_strategy", *root.glob("hydra_plugins/azureml_*")):
        for parent, folders, names in os.walk(folder, followlinks=True):  # an editable install has symbolic links
            folders[:] = [name for name in folders if name != "__pycache__"]
            for path in (Path(parent, name) for name in names):
                yield path.relative_to(root).as_posix(), path.read_bytes()


def _description(metadata: str, entry_points: str) -> Iterator[tuple[str, str]]:
    # Leave out the long description, the README: a changed word in it must not cause a new image.
    headers = metadata.partition("\n\n")[0] + "\n"
    yield "METADATA", "".join(line for line in headers.splitlines(True) if not line.startswith("Description-Content"))
    yield "entry_points.txt", entry_points
    yield "WHEEL", f"Wheel-Version: 1.0\nGenerator: {_NAME}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def _record(contents: dict[str, bytes], own_path: str) -> str:
    lines = [f"{name},sha256={_digest(contents[name])},{len(contents[name])}" for name in sorted(contents)]
    return "\n".join([*lines, f"{own_path},,", ""])


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
