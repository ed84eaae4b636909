"""How fast records come through the cache of a node from Blob Storage behind a link of 1 Gbit/s, and from its disk.

    sudo python benchmarks/stream_rate.py

Azurite, Microsoft's Blob server, runs on one emulated node, and reads on another, each in its network namespace. A
round is: one TCP stream over the link; a first pass in full shuffle, with a new cache; twelve later passes, in turns
with the same records from the local shards by pread, verified as well, and with webdataset, which reads the local
shards in their order. No record is decoded.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from harness import RESULTS, ratios, save, show, spread

from azureml_strategy.data.node_cache.client import CacheSettings, NodeCache
from azureml_strategy.data.readers import FolderReader
from azureml_strategy.data.shard_index import INDEX_NAME
from azureml_strategy.data.tar_index import index_tars
from azureml_strategy.emulator.nodes import EmulationError, IsolatedNodes

ACCOUNT = "devstoreaccount1"
# In Azurite's documentation.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
BLOB_PORT, STREAM_PORT = 10000, 10001
STREAM_BYTES = 128 << 20
LATER = 12  # passes after the first; one takes some 0.1 s
TARGETS = {"first_of_line": 0.92, "wire_of_set": 1.02, "later_of_local": 0.97, "later_of_webdataset": 1.3}


def make_set(folder: Path, samples: int, record_bytes: int, shards: int) -> None:
    """Shards of random bytes; they cannot be told from JPEG files by what reads them."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for shard in range(shards):
        with tarfile.open(folder / f"train-{shard:06}.tar", "w") as tar:
            for number in range(shard * samples // shards, (shard + 1) * samples // shards):
                size = int(random.integers(3 * record_bytes // 4, 5 * record_bytes // 4))
                for suffix, content in ((".jpg", random.bytes(size)), (".cls", b"0")):
                    member = tarfile.TarInfo(f"{number:06}{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    index_tars(folder).save(folder / INDEX_NAME)


def upload(folder: Path, endpoint: str) -> str:
    from azure.storage.blob import BlobServiceClient

    credential = {"account_name": ACCOUNT, "account_key": KEY}
    container = BlobServiceClient(endpoint, credential=credential).create_container("data")
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            container.upload_blob(f"set/{path.name}", file)
    return "az://data/set"


def serve_streams() -> None:
    """On the node of the storage: whoever connects gets zeros."""
    with socket.create_server(("", STREAM_PORT)) as server:
        while True:
            connection, _ = server.accept()
            with connection, suppress(ConnectionError):  # one that only looks whether somebody listens
                connection.sendall(bytes(STREAM_BYTES))


def line_rate(host: str) -> float:
    """Bytes a second of one TCP stream."""
    buffer, missing = bytearray(1 << 20), STREAM_BYTES
    with socket.create_connection((host, STREAM_PORT)) as connection:
        start = time.perf_counter()
        while missing:
            missing -= connection.recv_into(buffer)
    return STREAM_BYTES / (time.perf_counter() - start)


def read_all(reader: Any, order: np.ndarray[Any, Any], batch: int) -> float:
    """Bytes a second of a pass."""
    size, start = 0, time.perf_counter()
    for at in range(0, len(order), batch):
        records = reader.read(order[at : at + batch])
        size += sum(len(record) for record in records)
        reader.reached(at + batch)
    return size / (time.perf_counter() - start)


def read_webdataset(folder: Path) -> float:
    import webdataset

    shards = [str(path) for path in sorted(folder.glob("*.tar"))]
    size, start = 0, time.perf_counter()
    for sample in webdataset.WebDataset(shards, shardshuffle=False):
        size += len(sample["jpg"])
    return size / (time.perf_counter() - start)


def received() -> int:
    return int(Path("/sys/class/net/eth0/statistics/rx_bytes").read_text())


def measure_round(options: argparse.Namespace, folder: Path, address: str, size: int, number: int) -> dict[str, Any]:
    cache_folder = folder / f"cache-{number}"
    found: dict[str, Any] = {"line": line_rate(options.host)}
    cache = NodeCache(address, CacheSettings(cache_folder, 2 * options.samples * options.record_bytes))
    local = FolderReader(folder / "set")
    orders = [np.random.default_rng(epoch).permutation(options.samples) for epoch in range(LATER + 2)]
    before = received()
    cache.expect(orders[0], orders[1])
    start = time.perf_counter()
    read_all(cache, orders[0], options.batch)
    found["first"] = size / (time.perf_counter() - start)
    found["wire"] = received() - before
    found["fetched"] = cache.statistics()["fetched_bytes"]
    requests = cache.statistics()["requests"]
    while cache.statistics()["stored_blocks"] < options.samples:
        time.sleep(0.01)
    cases: list[tuple[str, Callable[[int], float]]] = [
        ("later", lambda epoch: read_all(cache, orders[epoch], options.batch)),
        ("local", lambda epoch: read_all(local, orders[epoch], options.batch)),
        ("webdataset", lambda epoch: read_webdataset(folder / "set")),
    ]
    for name, case in cases:  # all files are in memory now
        case(0)
        found[name] = []
    for epoch in range(1, LATER + 1):
        cache.expect(orders[epoch], orders[epoch + 1])
        for name, case in cases if (number + epoch) % 2 else cases[::-1]:
            found[name].append(case(epoch))
    found["later_requests"] = cache.statistics()["requests"] - requests
    cache.close()
    local.close()
    shutil.rmtree(cache_folder)
    return found


def run_inside(options: argparse.Namespace) -> None:
    """On the node that reads."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_set(folder / "set", options.samples, options.record_bytes, shards=8)
        address = upload(folder / "set", f"http://{options.host}:{BLOB_PORT}/{ACCOUNT}")
        size = sum(path.stat().st_size for path in (folder / "set").glob("*.tar"))
        rounds = [measure_round(options, folder, address, size, number) for number in range(options.rounds + 1)][1:]
    print(json.dumps({"set_bytes": size, "rounds": rounds}))


def run_nodes(options: argparse.Namespace) -> dict[str, Any]:
    azurite = Path(sys.prefix, "azurite", "node_modules", ".bin", "azurite-blob")
    flags = ["--silent", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--loose"]
    with ExitStack() as stack:
        nodes = stack.enter_context(IsolatedNodes(2, options.bandwidth))
        host, storage, reading = nodes.addresses[0], nodes.command_prefix(0), nodes.command_prefix(1)
        servers = (
            [str(azurite), *flags, "--blobHost", host, "--blobPort", str(BLOB_PORT)],
            [sys.executable, __file__, "--serve"],
        )
        for command in servers:
            process = subprocess.Popen([*storage, *command], stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.send_signal, signal.SIGKILL)
        for port in (BLOB_PORT, STREAM_PORT):
            wait = f"until (exec 3<>/dev/tcp/{host}/{port}) 2>/dev/null; do sleep 0.1; done"
            subprocess.run([*reading, "bash", "-c", wait], check=True, timeout=60)
        told = [f"--{name}={getattr(options, name)}" for name in ("samples", "record_bytes", "batch", "rounds")]
        command = [
            "env",
            "AZURE_STORAGE_USE_EMULATOR=1",
            f"AZURE_STORAGE_ACCOUNT_NAME={ACCOUNT}",
            f"AZURE_STORAGE_ACCOUNT_KEY={KEY}",
        ]
        command += [f"AZURE_STORAGE_ENDPOINT=http://{host}:{BLOB_PORT}/{ACCOUNT}", sys.executable, __file__]
        done = subprocess.run([*reading, *command, f"--host={host}", *told], stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def figures(measured: dict[str, Any]) -> dict[str, Any]:
    size, rounds = measured["set_bytes"], measured["rounds"]
    later, local, other = (
        [rate for each in rounds for rate in each[name]] for name in ("later", "local", "webdataset")
    )
    return {
        "first_of_line": spread([each["first"] / each["line"] for each in rounds]),
        "wire_of_set": spread([each["wire"] / size for each in rounds]),
        "fetched_of_set": spread([each["fetched"] / size for each in rounds]),
        "later_requests": sum(each["later_requests"] for each in rounds),
        "later_of_local": ratios(later, local),
        "later_of_webdataset": ratios(later, other),
        "MB_per_s": {
            "line": spread([each["line"] / 1e6 for each in rounds]),
            "first": spread([each["first"] / 1e6 for each in rounds]),
            "later": spread([rate / 1e6 for rate in later]),
            "local": spread([rate / 1e6 for rate in local]),
            "webdataset": spread([rate / 1e6 for rate in other]),
        },
        "targets": TARGETS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--record_bytes", type=int, default=110_000, help="mean of a record")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--bandwidth", default="1gbit")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_streams()
    elif options.host:
        run_inside(options)
    else:
        try:
            found = figures(run_nodes(options))
        except EmulationError as error:
            raise SystemExit(str(error)) from None
        rows = [[name, found[name].text(digits=3), str(TARGETS.get(name, ""))] for name in (*TARGETS, "fetched_of_set")]
        rows += [["requests in later passes", str(found["later_requests"]), "0"]]
        rows += [[f"{name}, MB/s", rate.text(), ""] for name, rate in found["MB_per_s"].items()]
        show("Records through the cache of a node", ["", "median (quartiles)", "target"], rows)
        settings = {
            name: getattr(options, name) for name in ("samples", "record_bytes", "batch", "rounds", "bandwidth")
        }
        save("stream_rate", settings, found, options.results)


if __name__ == "__main__":
    main()
