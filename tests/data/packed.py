"""A packed set of random records, small enough to make anew for each test."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import numpy as np

from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndex

_HEADER = 1536  # what a tar has between two records: headers, a label, padding


def packed_set(folder: Path, samples: int, shards: int = 3, sizes: tuple[int, int] = (3_000, 9_000)) -> ShardIndex:
    """Write shards and their index. The records are random bytes, of lengths within `sizes`."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(samples)
    length = random.integers(sizes[0], sizes[1], samples, endpoint=True)
    shard = np.arange(samples) * shards // samples
    offset, checksum = np.zeros(samples, np.int64), np.zeros(samples, np.uint32)
    contents = [bytearray() for _ in range(shards)]
    for number in range(samples):
        content = contents[shard[number]]
        content += bytes(_HEADER)
        offset[number] = len(content)
        record = random.bytes(int(length[number]))
        checksum[number] = crc32(record)
        content += record
    names = tuple(f"train-{number:06}.tar" for number in range(shards))
    for name, content in zip(names, contents, strict=True):
        (folder / name).write_bytes(content)
    found = ShardIndex(
        "images",
        names,
        np.array([len(each) for each in contents], np.int64),
        shard.astype(np.uint32),
        offset,
        length.astype(np.uint32),
        np.zeros(samples, np.int32),
        checksum,
    )
    found.save(folder / INDEX_NAME)
    return found
