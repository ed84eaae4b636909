"""The file in which a node keeps its compiled code: where it may lie, what it says of itself, and what is in it.

It holds files of the folder that torch's compiler keeps its results in (`TORCHINDUCTOR_CACHE_DIR`). Torch's own
`torch.compiler.save_cache_artifacts` holds less: the graphs of its own process alone, and for none of them the
libraries that the C++ compiler has made, which takes most of the time on a CPU.

Whoever can write this file can run code in the process that loads it. So it is read only if it belongs to this user
alone, and the folder as well. On a mount of storage, which invents owners, the access to the storage decides, as for
the job's code.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import subprocess
import tarfile
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from azureml_strategy.cluster.job import read_job
from azureml_strategy.files import (
    OutsideError,
    filesystem_of,
    is_private,
    name_within,
    private_folder,
    read_whole,
    write_atomically,
)

FOLDER = "compile_cache"
"""Name of the folder in the run's output."""
MOST_BYTES = 256 << 20
"""Most bytes of compiled code in a file; GPT-2's take some ten million. The newest stay."""
_FORMAT = 1
_LONGEST_HEADER = 64 << 10
# Locks; and Triton's folder, whose files name their own path. The graphs hold a copy of the kernels in it.
_LEFT_OUT = ("locks", "triton")
# What the C++ compiler reads to make what is kept.
_NEEDED_TO_COMPILE = (".gch", ".h", ".hpp", ".o")
# File systems that show made-up owners and modes: blobfuse and Azure ML's mounts, and Azure Files.
_WITHOUT_OWNERS = ("fuse", "cifs", "smb")
_WITH_OWNERS = ("fuse.overlayfs", "fuse.fuse-overlayfs", "fuse.sshfs")
_COMPILER_SECONDS = 10
# A part of a file that has not changed for so long was left by a killed process.
_STALE_SECONDS = 3600


class UnfitError(ValueError):
    """A file is damaged, or from something else than this run on this kind of node. The message says what."""


def is_trusted(folder: Path) -> bool:
    """Whether code that lies in a folder may be run: nobody else can write there, or the storage decides who can."""
    return is_private(folder) or (_invents_owners(folder) and folder.is_dir() and not folder.is_symlink())


def _invents_owners(folder: Path) -> bool:
    filesystem = filesystem_of(folder) or ""
    return filesystem.startswith(_WITHOUT_OWNERS) and filesystem not in _WITH_OWNERS


def conditions(device: torch.device) -> dict[str, str]:
    """Return what compiled code depends on beside its graph, by name.

    Torch's keys have the graph, its own source and settings, the GPU's name and the flags of the C++ compiler. They do
    not have the CPU, though the flags say `-march=native`, nor the libraries that a compiled library needs.
    """
    job = read_job()
    found = {
        "run": job.run_id if job else "none",
        "azureml-strategy": _version("azureml-strategy"),
        "Python": platform.python_version(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "CUDA": torch.version.cuda or "none",
        "triton": _version("triton"),
        "C library": " ".join(platform.libc_ver()),
        "C++ compiler": _compiler(),
        "CPU": _cpu(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["GPU"] = f"{properties.name} {properties.major}.{properties.minor}"
    return found


def compiled_files(folder: Path) -> dict[str, int]:
    """Return the complete files of compiled code in a folder, and their sizes in bytes; the newest first."""
    files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    # The C++ compiler writes under the final name. While it does, and after it was killed, there is a folder of the
    # same name, and more, beside the file. Only a list that is made after that of the files is sure to have it.
    building = [os.path.join(parent, name) for parent, names, _ in os.walk(folder) for name in names]
    found = []
    for each in files:
        parts = each.relative_to(folder).parts
        if parts[0] in _LEFT_OUT or each.name.startswith(".") or each.suffix in _NEEDED_TO_COMPILE:
            continue
        if any(name.startswith(f"{each.with_suffix('')}_") for name in building):
            continue
        try:
            status = each.lstat()
        except FileNotFoundError:  # another process has replaced it
            continue
        if stat.S_ISREG(status.st_mode):
            found.append((status.st_mtime_ns, "/".join(parts), status.st_size))
    return {name: size for _, name, size in sorted(found, reverse=True)}


def newest(files: dict[str, int]) -> list[str]:
    """Return the first of the files, as many as `MOST_BYTES` allows."""
    kept, total = [], 0
    for name, size in files.items():
        total += size
        if total > MOST_BYTES:
            break
        kept.append(name)
    return kept


def write_cache(path: Path, folder: Path, names: Iterable[str], here: dict[str, str]) -> int:
    """Write files of a folder into a file, and return its size in bytes.

    Raises:
        OutsideError: others can write into the folder of the file.
        OSError: it cannot be written.
    """
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    if not is_trusted(path.parent):
        private_folder(path.parent)
    for part in path.parent.glob(f".{path.name}.*.part"):  # of an attempt that ended while it wrote
        with suppress(FileNotFoundError):  # another training of this node may write now
            if time.time() - part.stat().st_mtime > _STALE_SECONDS:
                part.unlink()
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", compresslevel=1) as archive:
        for name in names:
            code = read_whole(folder / name)
            entry = tarfile.TarInfo(name)
            entry.size = len(code)
            archive.addfile(entry, io.BytesIO(code))
    packed = content.getvalue()
    header = {"format": _FORMAT, "sha256": hashlib.sha256(packed).hexdigest(), "conditions": here}
    whole = json.dumps(header).encode() + b"\n" + packed
    write_atomically(path, whole)
    if not _invents_owners(path.parent):
        path.chmod(0o600)  # with a umask of 002 or 0, others could write to it, and it would not be read
    return len(whole)


def read_cache(path: Path, folder: Path, here: dict[str, str]) -> list[str]:
    """Write the files of a file into a folder, and return their names.

    Raises:
        OutsideError: others can write into the folder of the file.
        UnfitError: the file is damaged, or for something else.
        OSError: it cannot be read, or the folder cannot be written to.
    """
    if not is_trusted(path.parent):
        raise OutsideError(f"{path.parent} belongs to somebody else, or others may write to it")
    try:
        return _unpack(_payload(path, here), folder)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, OutsideError) as error:
        raise UnfitError(f"it holds no compiled code ({error})") from error


def _payload(path: Path, here: dict[str, str]) -> bytes:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise UnfitError("it is no file")
    # Others may have put it there, or changed it, before the folder was made private.
    is_own = status.st_uid == os.getuid() and not status.st_mode & 0o022
    if not is_own and not _invents_owners(path.parent):
        raise UnfitError("it belongs to somebody else, or others may write to it")
    if status.st_size > MOST_BYTES + _LONGEST_HEADER:
        raise UnfitError(f"it has {status.st_size:,} bytes, and at most {MOST_BYTES:,} are written")
    head, _, packed = read_whole(path).partition(b"\n")
    try:
        header = json.loads(head)
        format_, checksum, made_for = header["format"], header["sha256"], dict(header["conditions"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UnfitError("its first line is no header of ours") from None
    if format_ != _FORMAT:
        raise UnfitError(f"it has format {format_!r:.20}, and this version reads {_FORMAT}")
    for name in here | made_for:
        if here.get(name) != made_for.get(name):
            raise UnfitError(f"it is for {name} {made_for.get(name)!r:.100}, and here is {here.get(name)!r:.100}")
    if hashlib.sha256(packed).hexdigest() != checksum:
        raise UnfitError("its checksum is wrong")
    return packed


def _unpack(packed: bytes, folder: Path) -> list[str]:
    names, total = [], 0
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        for entry in archive:
            path, total = name_within(folder, entry.name), total + entry.size
            content = archive.extractfile(entry) if entry.isreg() and total <= MOST_BYTES else None
            if content is None:
                raise UnfitError(f"{entry.name!r:.100} in it is no file, or too large")
            if not path.exists():
                write_atomically(path, content.read())
            names.append(entry.name)
    return names


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _compiler() -> str:
    """Return the version of the C++ compiler: what it makes needs the C++ library that it came with."""
    program = shutil.which(os.environ.get("CXX", "g++"))
    if program is None:
        return "none"
    try:
        command = [program, "-dumpfullversion", "-dumpversion"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return done.stdout.strip()


def _cpu(table: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the CPU and a checksum of its instruction sets."""
    try:
        first = table.read_text(errors="replace").split("\n\n", 1)[0]
    except OSError:
        return platform.machine()
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    said = {name.strip(): value.strip() for name, value in fields.items()}
    flags = said.get("flags") or said.get("Features") or ""  # on x86 and on ARM
    checksum = hashlib.sha256(flags.encode()).hexdigest()[:12]
    return f"{platform.machine()} {said.get('model name', '')} {checksum}"
