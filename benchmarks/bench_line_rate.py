"""What share of a link's rate `azureml-strategy bench` reports, beside one TCP stream over the same link.

    sudo python benchmarks/bench_line_rate.py                 # two isolated nodes, 1gbit

Both processes of an emulated job take part in all cases, in turns: each of the benchmark's collectives, measured by the
benchmark's own code, and a plain socket on which rank 1 sends rank 0 as many bytes. The rate is the one that the links
are shaped to. Bus bandwidth of two ranks is what each link carries in one direction.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import job_harness
import torch
from harness import Spread, interleave, ratios, show, spread

from azureml_strategy.bench.collectives import COLLECTIVES
from azureml_strategy.bench.measure import Procedure, measure
from azureml_strategy.bench.run import Member, join, require_launch

RAW = "one TCP stream"
TARGET = 0.9  # share of the line rate
JUDGED = ("all-reduce", "send-receive")
PORT = 5000
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class Stream:
    """A connection from rank 1 to rank 0, which nothing but the kernel is behind."""

    def __init__(self, member: Member, size: int) -> None:
        self.member = member
        self.message = bytes(size)
        address = (member.launch.main_address, PORT)
        if member.launch.rank == 0:
            with socket.create_server(address) as server:
                member.place.barrier()
                self.link, _ = server.accept()
        else:
            member.place.barrier()
            self.link = socket.create_connection(address)

    def bandwidth(self, times: int) -> float:
        """GB/s of the median transfer of the message, from before its first byte is sent until its last is here."""
        seconds = []
        for _ in range(times):
            self.member.place.barrier()
            start = time.perf_counter()
            self._transfer()
            seconds.append(time.perf_counter() - start)
        slowest = self.member.place.highest(seconds)
        return len(self.message) / spread(slowest).median / 1e9

    def _transfer(self) -> None:
        if self.member.launch.rank == 1:
            self.link.sendall(self.message)
            self.link.recv(1)
            return
        buffer, missing = bytearray(1 << 20), len(self.message)
        while missing:
            missing -= self.link.recv_into(buffer, min(missing, len(buffer)))
        self.link.sendall(b"x")


def collective_bandwidth(name: str, member: Member, size: int, times: int) -> float:
    """GB/s as the benchmark reports them."""
    found = measure(COLLECTIVES[name], member.place, size, Procedure(torch.float32, times, warmup=1))
    assert not found.wrong
    return found.bus_bandwidth


def run_rank(options: argparse.Namespace) -> Any:
    """All rounds of all cases, in one of the two processes."""
    with join(require_launch(), "gloo", timedelta(minutes=5)) as member:
        stream = Stream(member, options.size)
        cases = {RAW: partial(stream.bandwidth, options.times)}
        for name in COLLECTIVES:
            cases[name] = partial(collective_bandwidth, name, member, options.size, options.times)
        measured = interleave(cases, options.rounds)
        stream.link.close()
    return measured


def measure_job(options: argparse.Namespace) -> dict[str, Any]:
    rate = line_rate(options.bandwidth)
    return job_harness.run_job(options, partial(figures, rate=rate), bandwidth=options.bandwidth)


def line_rate(bandwidth: str) -> float:
    """GB/s of a rate such as 1gbit."""
    return float(bandwidth[:-4]) * UNITS[bandwidth[-4:]] / 8 / 1e9


def figures(measured: Mapping[str, list[float]], rate: float) -> dict[str, Any]:
    """Bandwidth of each case, its share of the rate, and the share of what the plain stream got in the same round."""
    share = {name: spread([value / rate for value in values]) for name, values in measured.items()}
    return {
        "line_rate_GBps": rate,
        "bus_bandwidth_GBps": {name: spread(values) for name, values in measured.items()},
        "share_of_line_rate": share,
        "ratio_to_stream": {name: ratios(values, measured[RAW]) for name, values in measured.items()},
        "target": {
            "share_of_line_rate_at_least": TARGET,
            "met": {name: share[name].median >= TARGET for name in JUDGED},
        },
        "rounds_GBps": measured,
    }


def rows(measured: Mapping[str, Any]) -> list[list[str]]:
    if "skipped" in measured:
        return [["skipped", measured["skipped"], "", ""]]
    bandwidth: dict[str, Spread] = measured["bus_bandwidth_GBps"]
    kinds = (measured["share_of_line_rate"], measured["ratio_to_stream"])
    shares = {name: [kind[name].text(digits=3) for kind in kinds] for name in bandwidth}
    return [[name, bandwidth[name].text(digits=4), *shares[name]] for name in bandwidth]


def parse() -> argparse.Namespace:
    parser = job_harness.parser(__doc__, "bench_line_rate")
    parser.add_argument("--rounds", type=int, default=6, help="even, so that each order comes as often")
    parser.add_argument("--times", type=int, default=3, help="each case runs in a round; the median counts")
    parser.add_argument("--size", type=int, default=64 << 20, help="bytes of a message; the shaper lets 512 kB burst")
    parser.add_argument("--bandwidth", default="1gbit", help="of the links, such as 500mbit")
    return parser.parse_args()


def main() -> None:
    options = parse()
    measured = job_harness.run("bench_line_rate", options, run_rank, measure_job)
    if measured is None:
        return
    columns = ["case", "bus bandwidth, GB/s", "of the line rate", "to the stream's"]
    show(f"Two isolated nodes, {options.bandwidth}: median (quartiles)", columns, rows(measured))


if __name__ == "__main__":
    main()
