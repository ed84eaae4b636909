"""What planning, roll call and record of the network add to the start of a process group.

    python benchmarks/network_start.py

Two ranks of an emulated job start gloo groups in turns: torch's alone, and with `prepare_network` before and `observe`
behind it, as our strategies do. A start is over when the first all-reduce is. The third figure is what a GPU job has
besides: reading back NCCL's log, here a real one of Azure's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import RESULTS, Spread, differences, interleave, save, show, spread

from azureml_strategy.cluster import Launch, detect_launch
from azureml_strategy.emulator import EmulatedJob, emulate
from azureml_strategy.network import read_transport
from azureml_strategy.network.session import prepare_network

TARGET_S = 0.05
TIMEOUT = timedelta(seconds=60)
PLAIN, OURS = "torch", "with our network session"
SAMPLE = Path(__file__).parents[1] / "tests/samples/nccl_logs/02_azure_ndm_a100_v4_4node_ib_gdr_dev2.log"


def start(case: str, launch: Launch) -> float:
    """Seconds from nothing to the end of the first all-reduce; both ranks begin together."""
    began = time.perf_counter()
    session = prepare_network(launch, "gloo", TIMEOUT) if case == OURS else None
    address = f"tcp://{launch.main_address}:{launch.main_port}"
    if session is None:
        dist.init_process_group("gloo", init_method=address, rank=launch.rank, world_size=launch.world_size)
    else:
        os.environ.update(MASTER_ADDR=launch.main_address, MASTER_PORT=str(launch.main_port))
        dist.init_process_group("gloo", rank=launch.rank, world_size=launch.world_size)
    dist.all_reduce(torch.zeros(1))
    if session is not None:
        session.observe()
    seconds = time.perf_counter() - began
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # the other rank has let go of the port too
    return seconds


def read_log_s() -> float:
    """Seconds to read the log of four processes, where a process reads only its own."""
    text = SAMPLE.read_text()
    began = time.perf_counter()
    read_transport(text)
    return time.perf_counter() - began


def run_rank(options: argparse.Namespace) -> None:
    launch = detect_launch()
    assert launch is not None
    measured = interleave({case: partial(start, case, launch) for case in (PLAIN, OURS)}, options.rounds)
    if launch.rank == 0:
        measured["read"] = [read_log_s() for _ in range(options.rounds)]
        Path(options.figures).write_text(json.dumps(measured))


def run_job(rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, os.path.abspath(__file__), "--rounds", str(rounds), "--figures", str(figures)]
        os.chdir(folder)
        if emulate(EmulatedJob(command=command, nodes=2)):
            raise SystemExit("the emulated job failed; its output is above")
        return dict(json.loads(figures.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="starts of each kind (default 20)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--figures", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.figures:
        run_rank(options)
        return
    results = options.results.resolve()
    measured = run_job(options.rounds)
    figures: dict[str, Any] = {
        "start_s": {case: spread(measured[case]) for case in (PLAIN, OURS)},
        "added_s": differences(measured[OURS], measured[PLAIN]),
        "read_log_s": spread(measured["read"]),
        "target_s": TARGET_S,
    }
    added: Spread = figures["added_s"]
    rows = [[case, figures["start_s"][case].text(1e3)] for case in (PLAIN, OURS)]
    rows += [["added", added.text(1e3)], ["reading NCCL's log, 4 processes", figures["read_log_s"].text(1e3)]]
    show(f"Start of a process group, ms (target: at most {TARGET_S * 1e3:.0f} added)", ["", "median (quartiles)"], rows)
    print(save("network_start", {"rounds": options.rounds}, figures, results))


if __name__ == "__main__":
    main()
