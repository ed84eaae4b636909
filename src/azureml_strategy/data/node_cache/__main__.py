"""Runs the cache server of a node: `python -m azureml_strategy.data.node_cache SETTINGS`, which the first client does.

This process ends with status 0 as soon as clients can connect. The server is its child, which no training waits for.
If something goes wrong before that, the error is on standard error, and the status is 1.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
import sys
from pathlib import Path


def main() -> int:
    """Start the server, unless another process was faster."""
    settings = json.loads(sys.argv[1])
    # The server has a connection for each worker of the node and each set, and open files of the cache. The limit is
    # often 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ready, ready_writer = os.pipe()
    if os.fork():
        os.close(ready_writer)
        return 0 if os.read(ready, 1) else 1
    os.close(ready)
    _run(settings, ready_writer)
    return 0


def _run(options: dict[str, object], ready_writer: int) -> None:
    from azureml_strategy.data.node_cache.protocol import QUEUE, CacheSettings, server_paths
    from azureml_strategy.data.node_cache.server import serve

    def started() -> None:
        os.write(ready_writer, b".")
        os.close(ready_writer)

    folder = Path(str(options["folder"])) if options["folder"] else None
    paths = server_paths(folder)
    lock = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.write(ready_writer, b".")
        return
    paths.socket.unlink(missing_ok=True)  # of a server that was killed
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(paths.socket))
        listening.listen(QUEUE)
        settings = CacheSettings(folder, int(str(options["limit"])), int(str(options["block_bytes"])))
        serve(settings, paths, listening, started)


if __name__ == "__main__":
    sys.exit(main())
