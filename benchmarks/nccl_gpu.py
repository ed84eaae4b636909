"""What NCCL says on this machine's GPUs, and whether our reader understands it.

    python benchmarks/nccl_gpu.py            # one NVIDIA GPU or more, under two minutes
    python benchmarks/nccl_gpu.py --smoke    # two processes on the CPU, by gloo: does it run?

One process for each GPU starts as in a job of one node, with the network planned, recorded and read back as our
strategies do it. On a machine with one GPU a second job puts two processes on it, which NCCL refuses: its error must be
explained. Both logs are kept beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import RESULTS, save, show

from azureml_strategy.cluster import Launch
from azureml_strategy.emulator.nodes import reserved_port
from azureml_strategy.network import read_node, read_transport
from azureml_strategy.network.session import prepare_network

TIMEOUT = timedelta(seconds=60)


def run_rank(options: argparse.Namespace) -> None:
    """Start a group as a strategy does, and write what was recorded and how long it took."""
    rank, world_size = options.rank, options.world_size
    launch = Launch("pytorch", rank, world_size, rank, world_size, 0, 1, "127.0.0.1", options.port)
    backend, device = "gloo", None
    if not options.smoke:
        backend, device = "nccl", torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    began = time.perf_counter()
    session = prepare_network(launch, backend, TIMEOUT)
    prepared = time.perf_counter()
    os.environ.update(MASTER_ADDR=launch.main_address, MASTER_PORT=str(options.port))
    dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=device)
    total = torch.ones(1 << 20, device=device)
    dist.all_reduce(total)
    if device is not None:
        torch.cuda.synchronize(device)
    connected = time.perf_counter()
    network = session.observe()
    observed = time.perf_counter()
    dist.destroy_process_group()
    if network is not None:
        found = {
            "right_sum": bool((total == world_size).all()),
            "network": json.loads(network.to_json()),
            "line": network.line,
            "prepare_s": prepared - began,
            "first_collective_s": connected - prepared,
            "observe_s": observed - connected,
            "log": session.plan.effective.get("NCCL_DEBUG_FILE"),
        }
        (options.folder / "record.json").write_text(json.dumps(found))


def run_job(world_size: int, folder: Path, smoke: bool) -> dict[str, Any]:
    """Run the ranks; what rank 0 recorded, what the logs say, and the exit codes."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder / "nccl.%p.log")}
    command = [sys.executable, os.path.abspath(__file__), "--folder", str(folder), "--world-size", str(world_size)]
    with reserved_port() as port:
        command += ["--port", str(port), *["--smoke"] * smoke]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environ) for rank in range(world_size)]
        codes = [rank.wait(timeout=180) for rank in ranks]
    log = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("nccl.*.log")))
    record = folder / "record.json"
    return {
        "exit_codes": codes,
        "record": json.loads(record.read_text()) if record.is_file() else None,
        "transport": asdict(read_transport(log)),
        "log": log,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON and the logs")
    parser.add_argument("--smoke", action="store_true", help="two processes on the CPU, by gloo")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world-size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def jobs(smoke: bool) -> dict[str, int]:
    """The processes of each job."""
    if smoke:
        return {"two_processes_on_the_cpu": 2}
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise SystemExit("nccl_gpu.py needs an NVIDIA GPU, and torch sees none here; --smoke runs it on the CPU.")
    return {"one_process_for_each_gpu": gpus, **({"two_processes_on_one_gpu": 2} if gpus == 1 else {})}


def main() -> None:
    options = parse()
    if options.rank is not None:
        run_rank(options)
        return
    figures: dict[str, Any] = {"node": asdict(read_node())}
    rows = []
    options.results.mkdir(exist_ok=True)
    for name, world_size in jobs(options.smoke).items():
        with tempfile.TemporaryDirectory() as folder:
            job = run_job(world_size, Path(folder), options.smoke)
        (options.results / f"nccl_gpu.{name}.log").write_text(job.pop("log"))
        figures[name] = job
        errors = [f"{error['text']} ({error['name']})" for error in job["transport"]["errors"]]
        rows.append([name, job["transport"]["kind"], (job["record"] or {}).get("line", ""), "; ".join(errors)])
    show("NCCL on this machine", ["job", "transport", "console line", "errors"], rows)
    settings = {"smoke": True} if options.smoke else {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    print(save("nccl_gpu", settings, json.loads(json.dumps(figures, default=str)), options.results))


if __name__ == "__main__":
    main()
