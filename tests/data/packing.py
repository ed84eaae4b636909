"""Sources to pack, and what the tests of packing share."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from azureml_strategy.data.packing.images import ImageForm
from azureml_strategy.data.packing.pack import Packing, pack
from azureml_strategy.data.packing.sources import find_images
from azureml_strategy.data.shard_index import ShardIndex


def jpeg(number: int, size: tuple[int, int] = (48, 36), mode: str = "RGB", kind: str = "JPEG") -> bytes:
    """A small picture that compresses to some kilobytes; another one for each number."""
    rng = np.random.default_rng(number)
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], 4 if mode in ("CMYK", "RGBA") else 3)
    written = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8), mode).save(written, kind, quality=90)
    return written.getvalue()


def class_folders(root: Path, counts: Mapping[str, int], first: int = 0, size: tuple[int, int] = (48, 36)) -> Path:
    """Write class folders of JPEG files, all different."""
    number = first
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for each in range(count):
            (root / name / f"{each:03}.JPEG").write_bytes(jpeg(number, size))
            number += 1
    return root


def tar_file(path: Path, entries: Mapping[str, bytes], kind: int = tarfile.USTAR_FORMAT) -> Path:
    """Write a tar by Python's own writer."""
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in entries.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def packed(source: Path, out: Path, form: ImageForm | None = None, **options: Any) -> dict[str, ShardIndex]:
    """Pack, in this process unless `workers` says otherwise."""
    form = form or ImageForm()
    kept = {"--resize": form.resize, "--raw": form.raw, "--quality": form.quality}
    return pack(Packing(find_images(source, form), out, kept, **options))


def records(out: Path, index: ShardIndex) -> list[bytes]:
    """What the index says the records are, read by the offsets alone."""
    files = {name: (out / name).read_bytes() for name in index.shards}
    places = zip(index.shard.tolist(), index.offset.tolist(), index.length.tolist(), strict=True)
    return [files[index.shards[shard]][offset : offset + length] for shard, offset, length in places]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
