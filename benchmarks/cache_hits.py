"""How many reads a node's cache of half the set answers without storage, beside the best that can be, and beside LRU.

    python benchmarks/cache_hits.py

The real client and server, with real files, and prefetch as in a training; ranks go at one pace. A record is a block.
A read is a hit if nothing was fetched for it: all reads of the passes after the first, less the blocks that were
fetched in them. Some are fetched just before a pass begins, for it, which is how hits can exceed the optimum by 1%.
Belady's optimum, which may also leave a block out of the cache, and LRU are worked out for the same reads and as many
blocks as the cache has room for.
"""

from __future__ import annotations

import argparse
import heapq
import tempfile
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from harness import RESULTS, save, show

from azureml_strategy.data.node_cache.client import CacheSettings, NodeCache
from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndex

RECORD = 32 << 10  # whole pages, so that the cache holds a known number of them
OF_OPTIMUM, OVER_LRU = 0.95, 1.5


def make_set(folder: Path, samples: int) -> None:
    folder.mkdir()
    content = np.random.default_rng(0).bytes(samples * RECORD)
    (folder / "train-000000.tar").write_bytes(content)
    places = np.arange(samples, dtype=np.int64) * RECORD
    checksum = np.array([crc32(content[at : at + RECORD]) for at in places], np.uint32)
    length = np.full(samples, RECORD, np.uint32)
    zeros = np.zeros(samples, np.int64)
    ShardIndex(
        "images",
        ("train-000000.tar",),
        np.array([len(content)], np.int64),
        zeros.astype(np.uint32),
        places,
        length,
        zeros.astype(np.int32),
        checksum,
    ).save(folder / INDEX_NAME)


def shuffled(samples: int, window: float, epoch: int) -> np.ndarray[Any, Any]:
    """The order of a pass: by position, shifted by up to a window; or of any order."""
    random = np.random.default_rng(epoch)
    if not window:
        return random.permutation(samples)
    return np.argsort(np.arange(samples) + random.random(samples) * window * samples)


def measure(orders: list[np.ndarray[Any, Any]], ranks: int, batch: int, room: int) -> dict[str, float]:
    """Read all passes but the last, which is only told; count what is fetched in those after the first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_set(folder / "set", len(orders[0]))
        # What the cache takes beside the blocks: index, presence, last uses, folders.
        limit = int((room * RECORD + (1 << 18)) * 1024 / 1023)
        settings = CacheSettings(folder / "cache", limit, block_bytes=1)
        caches = [NodeCache(str(folder / "set"), settings) for _ in range(ranks)]
        fetched = []
        for this, following in pairwise(orders):
            fetched.append(caches[0].statistics()["fetched_bytes"] // RECORD)
            for rank, cache in enumerate(caches):
                cache.expect(this[rank::ranks], following[rank::ranks])
            for at in range(0, len(this) // ranks, batch):
                for rank, cache in enumerate(caches):
                    assert all(isinstance(each, bytes) for each in cache.read(this[rank::ranks][at : at + batch]))
                for cache in caches:
                    cache.reached(at + batch)
        told = caches[0].statistics()
        # Blocks that the cache really holds: what it takes beside them differs by some pages.
        held = int(sum(path.stat().st_blocks for path in (folder / "cache").glob("*/0*")) * 512 // RECORD)
        for cache in caches:
            cache.close()
    reads = len(orders[0]) * (len(orders) - 2)
    return {"hits": 1 - (told["fetched_bytes"] // RECORD - fetched[1]) / reads, "held": held}


def optimum(reads: np.ndarray[Any, Any], room: int, counted_from: int) -> float:
    """Belady's: of the blocks that are there and the one that was read, the one whose next use is last goes."""
    following = np.full(len(reads), 1 << 40)
    last: dict[int, int] = {}
    for at in range(len(reads) - 1, -1, -1):
        following[at] = last.get(int(reads[at]), 1 << 40)
        last[int(reads[at])] = at
    held: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    hits = 0
    for at, (block, use) in enumerate(zip(reads.tolist(), following.tolist(), strict=True)):
        hits += block in held and at >= counted_from
        held[block] = use
        heapq.heappush(furthest, (-use, block))
        while len(held) > room:
            when, victim = heapq.heappop(furthest)
            if held.get(victim) == -when:
                del held[victim]
    return hits / (len(reads) - counted_from)


def least_recently_used(reads: np.ndarray[Any, Any], room: int, counted_from: int) -> float:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for at, block in enumerate(reads.tolist()):
        hits += block in held and at >= counted_from
        held[block] = None
        held.move_to_end(block)
        if len(held) > room:
            held.popitem(last=False)
    return hits / (len(reads) - counted_from)


def case(options: argparse.Namespace, ranks: int, window: float) -> dict[str, Any]:
    orders = [shuffled(options.samples, window, epoch) for epoch in range(options.epochs + 1)]
    found = measure(orders, ranks, options.batch, options.samples // 2)
    # What of the last pass is to come is known to the cache, and so it is to the optimum; but it is not counted.
    reads, passes = np.concatenate(orders), options.samples * options.epochs
    room = max(int(found["held"]), options.samples // 2)
    best = optimum(reads, room, options.samples)
    best = (best * (len(reads) - options.samples) - _last(reads, room, passes)) / (passes - options.samples)
    lru = least_recently_used(reads[:passes], room, options.samples)
    return {
        "ranks": ranks,
        "window": window,
        "room_blocks": room,
        "hits": found["hits"],
        "optimum": best,
        "lru": lru,
        "of_optimum": found["hits"] / best,
        "over_lru": found["hits"] / lru if lru else None,
    }


def _last(reads: np.ndarray[Any, Any], room: int, passes: int) -> float:
    return optimum(reads, room, passes) * (len(reads) - passes)


def row(each: dict[str, Any]) -> list[str]:
    over = "LRU has none" if each["over_lru"] is None else f"{each['over_lru']:.2f}"
    order = f"window of {each['window']:.0%}" if each["window"] else "full shuffle"
    numbers = [f"{each[name]:.3f}" for name in ("hits", "optimum", "lru", "of_optimum")]
    return [order, str(each["ranks"]), *numbers, over]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    cases = [case(options, ranks, window) for window in (0.0, 0.1) for ranks in (1, 4)]
    figures = {
        "cases": cases,
        "targets": {"of_optimum_at_least": OF_OPTIMUM, "over_lru_at_least": OVER_LRU},
        "met": all(
            each["of_optimum"] >= OF_OPTIMUM and (each["over_lru"] is None or each["over_lru"] >= OVER_LRU)
            for each in cases
        ),
    }
    show(
        "Reads that need no storage, cache of half the set, passes 2 and later",
        ["order", "ranks", "hits", "optimum", "LRU", "of optimum (0.95)", "over LRU (1.5)"],
        [row(each) for each in cases],
    )
    settings = {**vars(options), "results": None, "record_bytes": RECORD}
    save("cache_hits", settings, figures, options.results)


if __name__ == "__main__":
    main()
