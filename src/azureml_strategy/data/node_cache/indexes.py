"""The index of a set in storage: its own, or one that was made of its tars and is kept on the node."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndex, ShardIndexError, load_index
from azureml_strategy.data.storage import Storage


class Version(NamedTuple):
    """One state of a set. If it has changed, the index of the set may have changed.

    Attributes:
        place: what the address leads to.
        files: versions of the files that the index comes from, by name: `index.npz`, or all files where there is none.
    """

    place: str
    files: dict[str, str]


async def look(storage: Storage) -> Version:
    """Find the version of a set as it is now.

    Raises:
        StorageError: it cannot be listed.
    """
    place, files = await storage.place(), await storage.versions()
    return Version(place, {INDEX_NAME: files[INDEX_NAME]} if INDEX_NAME in files else files)


async def read_index(storage: Storage, version: Version, folder: Path) -> ShardIndex:
    """Read the index of a set, or make it.

    Args:
        storage: of the set.
        version: of the set, found before: what changes after that is noticed by whoever looks next.
        folder: that a made index is kept in. Only this user can write there.

    Raises:
        StorageError: it cannot be read.
        ShardIndexError: it is damaged; or there is none, and the tars are no data set.
    """
    if INDEX_NAME in version.files:
        size = (await storage.list())[INDEX_NAME]
        content = await storage.read(INDEX_NAME, 0, size)
        return await asyncio.to_thread(load_index, bytes(content), f"{storage.address}/{INDEX_NAME}")
    from azureml_strategy.data.tar_index import index_storage

    name = hashlib.sha256(repr((version.place, sorted(version.files.items()))).encode()).hexdigest()[:16]
    path = folder / f"{name}.npz"
    with suppress(ShardIndexError):  # not there yet, or damaged by a power cut
        return await asyncio.to_thread(load_index, path)
    index = await index_storage(storage)
    await asyncio.to_thread(index.save, path)
    return index
