"""What a mount or a disk can do to checkpoints between two attempts of a job."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults.fault import WELL, Attempt, Fault
from tests.faults.oracle import newest_whole

Damage = Callable[[random.Random, Path, list[Path]], str]


@dataclass(frozen=True)
class FileFault(Fault):
    """Damage to the newest checkpoint, before the attempt: it must go on from the one before.

    Attributes:
        seed: of which file and which byte.
        damage: does it, and says what it did.
    """

    seed: int = 0
    damage: Damage = lambda moments, manifest, files: ""

    @contextmanager
    def around(self, attempt: Attempt) -> Iterator[None]:
        newest = newest_whole(attempt.checkpoints)
        if newest is not None:
            manifest = attempt.checkpoints / f"{newest}.manifest.json"
            files = [attempt.checkpoints / name for name in sorted(json.loads(manifest.read_text())["files"])]
            done = self.damage(random.Random(self.seed), manifest, files)
            print(f"--- {self.name}: {done}", flush=True)
            attempt.met.append(self)
        yield


def damaged(moments: random.Random) -> Fault:
    kind = moments.choice(list(_DAMAGES))
    return FileFault("files", kind, (), WELL, moments.randrange(2**32), _DAMAGES[kind])


def _truncated(moments: random.Random, manifest: Path, files: list[Path]) -> str:
    file = _one_with_bytes(moments, files)
    size = moments.randrange(file.stat().st_size)
    with open(file, "r+b") as opened:
        opened.truncate(size)
    return f"{file.name} to {size} bytes"


def _torn(moments: random.Random, manifest: Path, files: list[Path]) -> str:
    """The end of it never reached the disk: zeros, with the right length."""
    file = _one_with_bytes(moments, files)
    content = file.read_bytes()
    # the last byte that is not 0 must be among what is lost, or nothing is
    kept = moments.randrange(len(content.rstrip(b"\0")) or 1)
    file.write_bytes(content[:kept] + bytes(len(content) - kept))
    return f"{file.name} after {kept} bytes"


def _flipped(moments: random.Random, manifest: Path, files: list[Path]) -> str:
    file = _one_with_bytes(moments, files)
    content = bytearray(file.read_bytes())
    at, bit = moments.randrange(len(content)), moments.randrange(8)
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {at} of {file.name}"


def _missing(moments: random.Random, manifest: Path, files: list[Path]) -> str:
    file = moments.choice(files)
    file.unlink()
    return file.name


def _without_manifest(moments: random.Random, manifest: Path, files: list[Path]) -> str:
    manifest.unlink()
    return manifest.name


def _cut_manifest(moments: random.Random, manifest: Path, files: list[Path]) -> str:
    text = manifest.read_text()
    manifest.write_text(text[: moments.randrange(len(text) - 1)])
    return manifest.name


def _flipped_manifest(moments: random.Random, manifest: Path, files: list[Path]) -> str:
    return _flipped(moments, manifest, [manifest])


def _stale(moments: random.Random, manifest: Path, files: list[Path]) -> str:
    """An attempt that died while it wrote the next one has left half of it."""
    name = f"epoch=9-step={moments.randrange(1000, 2000)}.ckpt"
    run_id = json.loads(manifest.read_text())["run_id"]
    half = manifest.with_name(name)
    if len(files) > 1:
        half.mkdir()
        shutil.copy(files[0], half / files[0].name)
    else:
        half.with_name(name + ".part").write_bytes(files[0].read_bytes()[:1000])
    manifest.with_name(name + ".incomplete").write_text(run_id or "")
    return name


_DAMAGES: dict[str, Damage] = {
    "truncated": _truncated,
    "torn": _torn,
    "flipped": _flipped,
    "missing": _missing,
    "no manifest": _without_manifest,
    "cut manifest": _cut_manifest,
    "flipped manifest": _flipped_manifest,
    "stale temporary": _stale,
}


def _one_with_bytes(moments: random.Random, files: list[Path]) -> Path:
    return moments.choice([file for file in files if file.stat().st_size])
