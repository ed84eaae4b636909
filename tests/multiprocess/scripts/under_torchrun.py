"""Starts torchrun inside a job, as a user would: `NNODES` of them as one, or each node by itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

nodes, processes, *arguments = sys.argv[1:]
rendezvous = ["--master-addr", os.environ["MASTER_ADDR"], "--master-port", os.environ["MASTER_PORT"]]
joined = ["--nnodes", nodes, "--node-rank", os.environ["NODE_RANK"], *rendezvous]
alone = ["--standalone", "--nnodes", "1"]
os.execv(
    sys.executable,
    [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes),
        *(alone if nodes == "1" else joined),
        *(str(Path(__file__).with_name("fit.py")), *arguments),
    ],
)
