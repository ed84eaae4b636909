"""Small packed sets, written by the standard library alone, so that nothing of ours is compared with itself."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndex


def write_set(
    folder: Path, shards: Sequence[Sequence[tuple[str, bytes, int]]], classes: Sequence[str] = (), kind: str = "images"
) -> ShardIndex:
    """Write shards of (file name, record, label), and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[int, int, int, int, int]] = []
    for number, samples in enumerate(shards):
        path = folder / f"shard-{number:06}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for name, record, label in samples:
                for file, content in ((name, record), (f"{name.partition('.')[0]}.cls", str(label).encode())):
                    info = tarfile.TarInfo(file)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        with tarfile.open(path) as tar:
            members = {member.name: member for member in tar}
        rows += [(number, members[n].offset_data, len(r), label, zlib.crc32(r)) for n, r, label in samples]
    columns = np.array(rows, np.int64).T
    names = tuple(path.name for path in sorted(folder.glob("*.tar")))
    sizes = np.array([(folder / name).stat().st_size for name in names])
    kinds = (np.uint32, np.int64, np.uint32, np.int32, np.uint32)
    arrays = [column.astype(kind) for column, kind in zip(columns, kinds, strict=True)]
    index = ShardIndex(kind, names, sizes, *arrays, classes=tuple(classes))
    index.save(folder / INDEX_NAME)
    return index
