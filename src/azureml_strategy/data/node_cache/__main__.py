"""Runs the cache server of a node: `python -m azureml_strategy.data.node_cache SETTINGS`, which the first client does.

The process that was started ends as soon as clients can connect, with status 0; the server is its child, which no
training waits for. What goes wrong before that is on standard error, and the status is 1.
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
    # A connection for each worker of the node and each set, and files of the cache. The limit is often 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ready, tell = os.pipe()
    if os.fork():
        os.close(tell)
        return 0 if os.read(ready, 1) else 1
    os.close(ready)
    _run(settings, tell)
    return 0


def _run(told: dict[str, object], tell: int) -> None:
    from azureml_strategy.data.node_cache.protocol import QUEUE, CacheSettings, meeting
    from azureml_strategy.data.node_cache.server import serve

    folder = Path(str(told["folder"])) if told["folder"] else None
    place = meeting(folder)
    lock = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.write(tell, b".")
        return
    place.socket.unlink(missing_ok=True)  # of a server that was killed
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(place.socket))
        listening.listen(QUEUE)
        settings = CacheSettings(folder, int(str(told["limit"])), int(str(told["block_bytes"])))
        serve(settings, place, listening, lambda: _tell(tell))


def _tell(ready: int) -> None:
    os.write(ready, b".")
    os.close(ready)


if __name__ == "__main__":
    sys.exit(main())
