"""Starts torchrun inside a job, as a user would: `NNODES` of them as one, or each node by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main

# As tests/preloaded.py replaced it, after torch was imported: an interpreter for each worker would take seconds.
subprocess_handler.Popen = subprocess.Popen
nodes, processes, *arguments = sys.argv[1:]
rendezvous = ["--master-addr", os.environ["MASTER_ADDR"], "--master-port", os.environ["MASTER_PORT"]]
joined = ["--nnodes", nodes, "--node-rank", os.environ["NODE_RANK"], *rendezvous]
alone = ["--standalone", "--nnodes", "1"]
sys.argv = [
    *("torchrun", "--nproc-per-node", processes),
    *(alone if nodes == "1" else joined),
    *(str(Path(__file__).with_name("fit.py")), *arguments),
]
main()
