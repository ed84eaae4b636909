"""Starts Open MPI's mpirun inside a job, as Azure ML does for `distribution: {type: mpi}`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

processes, *arguments = sys.argv[1:]
mpirun = Path(sys.executable).with_name("mpirun")
as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
program = [sys.executable, str(Path(__file__).with_name("fit.py")), *arguments]
os.execve(mpirun, [str(mpirun), "-n", processes, "--oversubscribe", *program], {**os.environ, **as_root})
