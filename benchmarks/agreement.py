"""What the readiness to stop together and the watch for hangs cost: agreement, events and signs of life.

    python benchmarks/agreement.py

Two ranks of an emulated job train a tiny model whose step sleeps for 50 ms, as a host does while a GPU works; in turns
with the callbacks of a job and without them, inside one pair of processes. Both ranks ask a local server for Scheduled
Events, as on Azure VMs. The difference of the steps drowns in the noise of a shared machine. So what is added is
measured directly as well: the time that the main thread spends in the callbacks' hooks, and the CPU time of their
threads, all of which it would wait for if they held Python's lock.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import job_harness
import torch
import torch.distributed as dist
from harness import differences, interleave, show, spread
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.cluster.environ import CALLBACKS_SWITCH
from azureml_strategy.hang_detection import HangWatch
from azureml_strategy.preemption.termination import TerminateTogether

STEP_S = 0.05
TARGET = 0.001  # of a step
BATCH_SIZE = 16
HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_step_boundary")
THREADS = ("control-channel", "scheduled-events", "hang-watch")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(STEP_S)
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Meter(Callback):
    """When each step began, and the CPU time of the threads meanwhile."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self.threads_s: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = thread_seconds()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.moments.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        after = thread_seconds()
        self.threads_s = {name: seconds - self.before.get(name, 0.0) for name, seconds in after.items()}


def thread_seconds() -> dict[str, float]:
    """CPU time of each of our threads so far."""
    threads = [thread for thread in threading.enumerate() if thread.name in THREADS and thread.ident]
    return {each.name: time.clock_gettime(time.pthread_getcpuclockid(each.ident)) for each in threads}


def timed(hook: Callable[..., None], spent: list[float]) -> Callable[..., None]:
    """A hook that notes its own time in `spent`."""

    def run(*arguments: Any) -> None:
        start = time.perf_counter()
        hook(*arguments)
        spent.append(time.perf_counter() - start)

    return run


def fit(with_callbacks: bool, options: argparse.Namespace) -> dict[str, Any]:
    """One fit: seconds of a step, of the hooks in it, and of the threads in it."""
    spent: dict[str, list[float]] = {}
    meter = Meter()
    ours = [TerminateTogether(events_url=options.events_url), HangWatch()] if with_callbacks else []
    for callback in ours:
        for name in (name for name in HOOKS if name in vars(type(callback))):
            times = spent.setdefault(f"{type(callback).__name__}.{name}", [])
            setattr(callback, name, timed(getattr(callback, name), times))
    data = TensorDataset(torch.randn(options.steps * BATCH_SIZE, 32), torch.randint(4, (options.steps * BATCH_SIZE,)))
    trainer = Trainer(
        strategy="azureml_ddp",
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[*ours, meter],
    )
    trainer.fit(Model(), DataLoader(data, BATCH_SIZE))
    return {
        "step_s": statistics.median(end - start for start, end in pairwise(meter.moments)),
        # The median leaves out when somebody else had the processor.
        "hooks_s": {name: statistics.median(times) for name, times in spent.items()},
        "threads_s": {name: seconds / options.steps for name, seconds in meter.threads_s.items()},
    }


def run_rank(options: argparse.Namespace) -> Any:
    """All rounds of both cases, in one of the two processes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    os.environ[CALLBACKS_SWITCH] = "off"  # the callbacks are given here, so that they can be timed
    cases = {"without": partial(fit, False, options), "with": partial(fit, True, options)}
    measured = interleave(cases, options.rounds)
    dist.destroy_process_group()
    return measured


class Events(BaseHTTPRequestHandler):
    """Azure's service on a day without events."""

    def do_GET(self) -> None:
        content = json.dumps({"DocumentIncarnation": 1, "Events": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Events) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options.events_url = f"http://127.0.0.1:{server.server_port}/metadata/scheduledevents"
        try:
            return job_harness.run_job(options, figures)
        finally:
            server.shutdown()


def figures(measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What is added to a step, by the clock and by direct measurement."""
    step_s = {name: [each["step_s"] for each in rounds] for name, rounds in measured.items()}
    ours = measured["with"]
    hooks = spread([sum(each["hooks_s"].values()) for each in ours])
    threads = {name: spread([each["threads_s"].get(name, 0.0) for each in ours]) for name in THREADS}
    total = spread([sum((*each["hooks_s"].values(), *each["threads_s"].values())) for each in ours])
    return {
        "step_s": {name: spread(values) for name, values in step_s.items()},
        "added_to_step_s": differences(step_s["with"], step_s["without"]),
        "main_thread_s_per_step": hooks,
        "hooks_s": {name: spread([each["hooks_s"][name] for each in ours]) for name in ours[0]["hooks_s"]},
        "thread_cpu_s_per_step": threads,
        "share_of_50_ms": {"main thread": hooks.median / STEP_S, "with all CPU time": total.median / STEP_S},
        "target": {"main_thread_at_most": TARGET, "met": hooks.median / STEP_S <= TARGET},
    }


def parse() -> argparse.Namespace:
    parser = job_harness.parser(__doc__, "agreement")
    parser.add_argument("--rounds", type=int, default=8, help="even, so that each order comes as often")
    parser.add_argument("--steps", type=int, default=200, help="of 50 ms, in each fit")
    parser.add_argument("--events-url", help=argparse.SUPPRESS)  # given to the job's processes
    return parser.parse_args()


def main() -> None:
    options = parse()
    found = job_harness.run("agreement", options, run_rank, measure)
    if found is None:
        return
    rows = [
        ["a step without", found["step_s"]["without"].text(1e6)],
        ["a step with", found["step_s"]["with"].text(1e6)],
        ["difference", found["added_to_step_s"].text(1e6)],
        ["hooks on the main thread", found["main_thread_s_per_step"].text(1e6)],
        *([f"thread {name}, CPU", each.text(1e6)] for name, each in found["thread_cpu_s_per_step"].items()),
    ]
    columns = ["what", "us, median (quartiles)"]
    show("What being ready to stop, and the watch, add to a step of 50 ms", columns, rows)
    shares = {name: f"{share:.3%}" for name, share in found["share_of_50_ms"].items()}
    print(f"Of 50 ms: {shares}; target {TARGET:.1%} for the main thread")


if __name__ == "__main__":
    main()
