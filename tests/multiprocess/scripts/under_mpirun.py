"""Runs Open MPI's mpirun inside a job, as Azure ML does for `distribution: {type: mpi}`.

    python under_mpirun.py started|forked PROCESSES ARGUMENTS...

`forked`: mpirun starts no interpreters, which take seconds, but notes what variables it gives; the programs get these.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

how, processes, *arguments = sys.argv[1:]
mpirun = [str(Path(sys.executable).with_name("mpirun")), "-n", processes, "--oversubscribe"]
environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
program = [sys.executable, str(Path(__file__).with_name("fit.py")), *arguments]
if how == "started":
    os.execve(mpirun[0], [*mpirun, *program], environ)
folder = Path(os.environ["RESULTS"]).parent
note = ["sh", "-c", f"env -0 > {folder}/environ.$OMPI_COMM_WORLD_RANK"]
subprocess.run([*mpirun, *note], env=environ, stdin=subprocess.DEVNULL, check=True)
noted = [file.read_text().rstrip("\0").split("\0") for file in sorted(folder.glob("environ.*"))]
ranks = [subprocess.Popen(program, env=dict(each.split("=", 1) for each in lines)) for lines in noted]
sys.exit(max([rank.wait() for rank in ranks]))
