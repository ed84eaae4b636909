"""`mlflow server`, in the one process that runs this: MLflow's own command starts a second interpreter for uvicorn.

Takes the path of a log, and what that command takes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import uvicorn
from mlflow import server
from mlflow.cli import cli


def serve(command: list[str], extra_env: dict[str, str], **options: Any) -> None:
    """What `python -m uvicorn ...` does."""
    os.environ.update(extra_env)
    uvicorn.main(command[command.index("uvicorn") + 1 :])


log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for stream in (1, 2):
    os.dup2(log, stream)
server._exec_cmd = serve
cli(["server", *sys.argv[2:]])
