"""Sums up one rank's trace: the top operators, exposed communication by collective, idle time."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from azureml_strategy.profiling.kernel_names import kernel_name, printable, shorten

Interval = tuple[float, float]
"""A start and an end, which is not before the start."""
Intervals = list[Interval]
"""Sorted intervals with a gap between each two; none is empty."""
Event = dict[str, Any]

# To read a larger trace, Python would need more than ten times this memory.
MOST_BYTES = 1_000_000_000
_TOP = 20
_READ, _LONGEST_OPERATOR = 4096, 100  # characters of a name that are read, and of an operator's that are kept
_MICRO = 1e-6
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CPU = ("cpu_op", "user_annotation")
_STEP = re.compile(r"ProfilerStep#\d+")
# The beginning of the name of the span that torch's DataLoader records around `next` of its iterator.
_LOADING = "enumerate(DataLoader)"
# `gloo:all_reduce` is the collective itself on gloo's thread. Other operators are its calls on the training's threads:
# torch's dispatcher, functional collectives, and the record of parameters. NCCL's kernels are ncclKernel_..., since
# 2.19 ncclDevKernel_..., and on symmetric memory ncclSymDevKernel_... in 2.27 and ncclSymkDevKernel_... since 2.28
# (kernel_cname in its src/device/symmetric/generate.py). torch's own kernels there are named after the algorithm.
_COMMUNICATES = re.compile(
    r"(gloo|nccl|mpi|ucc|xccl):|_?c10d(_functional)?::|record_param_comms|nccl\w*Kernel|"
    r"(void )?([\w:]|\(anonymous namespace\)|<unnamed>)*(multimem_\w*|(one|two)_shot_all_reduce_)kernel"
)
# Operators of torch and of extensions, without the nodes of autograd around them: hooks there may wait for other ranks.
_COMPUTES = re.compile(r"(?!autograd::engine|torch::autograd::)\w[\w.]*::|Torch-Compiled Region|CompiledFunction")
# The longer names first: `reducescatter` contains `reduce`.
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "waittensor": "wait",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}


def union(intervals: Iterable[Interval]) -> Intervals:
    """Return the times in at least one interval. Intervals may be in any order, overlap, touch or be empty."""
    joined: Intervals = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def subtract(whole: Intervals, away: Intervals) -> Intervals:
    """Return the times in the first set that are not in the second one."""
    left: Intervals = []
    index = 0
    for start, end in whole:
        while index < len(away) and away[index][1] <= start:
            index += 1
        place = index
        while place < len(away) and away[place][0] < end:
            if start < away[place][0]:
                left.append((start, away[place][0]))
            start = max(start, away[place][1])
            place += 1
        if start < end:
            left.append((start, end))
    return left


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """Return the times that are in both sets."""
    return subtract(one, subtract(one, other))


def total(intervals: Intervals) -> float:
    """Return the length of all intervals together."""
    return sum(end - start for start, end in intervals)


def summarize(trace: dict[str, Any], last: int | None = None) -> dict[str, Any]:
    """Return what the steps of a trace spent their time on.

    On a GPU it counts what runs on the device. Without one it counts operators, on all threads of the process.
    `compute_s`, `exposed_communication_s`, `copy_s` and `idle_s` add up to `window_s`; `data_wait_s` is the part of
    `idle_s` in which the training waits for torch's DataLoader. Overlapping collectives each count in full in
    `collectives`, but their common time counts once in the sum.

    Args:
        trace: Chrome's format, as torch.profiler writes it.
        last: the last step that counts; torch marks a further one where a training ends early. None for all.

    Returns:
        Plain values, ready for JSON. Times are in seconds, over all steps.
    """
    events = [each for each in trace["traceEvents"] if each.get("ph") == "X"]
    on_gpu = any(each.get("cat") == "kernel" for each in events)
    steps = _steps(events, "user_annotation", last)
    # The host runs ahead of the device. torch marks on the device the work that the host has launched within a step.
    window = _whole_span((_steps(events, "gpu_user_annotation", last) if on_gpu else []) or steps or events)
    categories = _GPU if on_gpu else _CPU
    work = [each for each in events if each.get("cat") in categories and _overlaps(each, window)]
    # The times in which a thread of the training waits for its loader.
    threads = {each["tid"] for each in steps}
    loads = (each for each in events if each["name"].startswith(_LOADING) and each["tid"] in threads)
    loading = union(map(_span, loads))
    return {
        "device": "gpu" if on_gpu else "cpu",
        "steps": sorted(map(_number, steps)),
        **_parts(work, loading, window, on_gpu),
        "operators": _operators(work, on_gpu),
    }


def _steps(events: list[Event], category: str, last: int | None) -> list[Event]:
    steps = [each for each in events if each.get("cat") == category and _STEP.fullmatch(each["name"])]
    return [each for each in steps if last is None or _number(each) <= last]


def _number(step: Event) -> int:
    return int(step["name"].partition("#")[2])


def _overlaps(event: Event, window: Intervals) -> bool:
    start, end = _span(event)
    return any(start < until and end > since for since, until in window)


def _parts(work: list[Event], loading: Intervals, window: Intervals, on_gpu: bool) -> dict[str, Any]:
    """Split the window into parts that add up to it."""

    def within(events: Iterable[Event]) -> Intervals:
        return intersect(union(map(_span, events)), window)

    communicating = [each for each in work if _communicates(each)]
    computing = [each for each in work if _is_computing(each)]
    compute = within(computing)
    if not on_gpu:
        compute = subtract(compute, loading)  # operators that put a batch together
    communication = within(communicating)
    exposed = subtract(communication, compute)
    copies = subtract(within(each for each in work if each["cat"].startswith("gpu_mem")), union([*compute, *exposed]))
    idle = subtract(window, union([*compute, *exposed, *copies]))
    by_name: dict[str, list[Event]] = defaultdict(list)
    for each in communicating:
        by_name[_collective(each)].append(each)
    collectives = [
        {
            "name": name,
            "calls": _count_calls(each),
            "total_s": _seconds(within(each)),
            "exposed_s": _seconds(subtract(within(each), compute)),
        }
        for name, each in by_name.items()
    ]
    return {
        "window_s": _seconds(window),
        "compute_s": _seconds(compute),
        "exposed_communication_s": _seconds(exposed),
        "overlapped_communication_s": _seconds(communication) - _seconds(exposed),
        "copy_s": _seconds(copies),
        "idle_s": _seconds(idle),
        "data_wait_s": _seconds(intersect(idle, loading)),
        "collectives": sorted(collectives, key=lambda each: -float(each["exposed_s"])),
    }


def _is_computing(event: Event) -> bool:
    if event["cat"] == "kernel":
        return not _communicates(event)
    return event["cat"] == "cpu_op" and not _communicates(event) and bool(_COMPUTES.match(event["name"]))


def _communicates(event: Event) -> bool:
    return _COMMUNICATES.match(event["name"], 0, _READ) is not None


def _collective(event: Event) -> str:
    given = str(event.get("args", {}).get("Collective name", "")) or event["name"].partition("_Sum")[0]
    letters = re.sub(r"[^a-z]", "", given.lower())
    return next((name for word, name in _COLLECTIVES.items() if word in letters), "other")


def _count_calls(events: list[Event]) -> int:
    """How often a collective ran. On a CPU the thread that calls one and the thread that runs it both record it."""
    ran = sum(":" in each["name"] and "::" not in each["name"] for each in events)
    return ran or len(events)


def _operators(work: list[Event], on_gpu: bool) -> list[dict[str, Any]]:
    """The operators or kernels that took longest, by short names, without the time of those that they call."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for each, self_us in [(each, each["dur"]) for each in work] if on_gpu else _own_times(work):
        by_name[each["name"]].append(self_us * _MICRO)
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for raw, times in by_name.items():
        name = kernel_name(raw) if on_gpu else shorten(printable(raw[:_READ]), _LONGEST_OPERATOR)
        seconds[name] += sum(times)
        calls[name] += len(times)
    most = sorted(seconds, key=lambda name: -seconds[name])[:_TOP]
    return [{"name": name, "calls": calls[name], "self_s": round(seconds[name], 9)} for name in most]


def _own_times(work: list[Event]) -> list[tuple[Event, float]]:
    """Each operator with its time in microseconds, without the time of the operators that it calls on its thread."""
    operators = [each for each in work if each["cat"] == "cpu_op"]
    operators.sort(key=lambda each: (each["ts"], -each["dur"]))
    called = [0.0] * len(operators)
    running: dict[Any, list[int]] = defaultdict(list)  # by thread, the innermost last
    for index, each in enumerate(operators):
        callers = running[each["tid"]]
        while callers and _span(operators[callers[-1]])[1] <= each["ts"]:
            callers.pop()
        if callers:
            called[callers[-1]] += each["dur"]
        callers.append(index)
    return [(each, max(0.0, each["dur"] - inner)) for each, inner in zip(operators, called, strict=True)]


def _span(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _whole_span(events: list[Event]) -> Intervals:
    """The time from the first start to the last end, empty if there are no events."""
    spans = [_span(each) for each in events]
    return union([(min(start for start, _ in spans), max(end for _, end in spans))]) if spans else []


def _seconds(intervals: Intervals) -> float:
    return round(total(intervals) * _MICRO, 9)


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace, gzipped or not.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no trace, or too large to be read.
    """
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES / 1e9:.0f} GB, too much to sum up: profile fewer steps.")
    trace = json.loads(text)
    if not isinstance(trace, dict) or "traceEvents" not in trace:
        raise ValueError(f"{path} is no trace in Chrome's format: it has no traceEvents.")
    return trace


def compress(path: Path) -> Path:
    """Gzip a file, and remove the plain file once the gzipped one is complete; return the new path."""
    zipped = path.with_name(f"{path.name}.gz")
    part = zipped.with_name(f".{zipped.name}.part")
    with path.open("rb") as plain, gzip.open(part, "wb", compresslevel=6) as file:
        shutil.copyfileobj(plain, file, 1 << 20)
    part.replace(zipped)
    path.unlink()
    return zipped


def main(arguments: list[str]) -> int:
    """Print the summary of the trace at a path. With a second path, write it there and gzip the trace.

    A third argument is the last step that counts.
    """
    trace = Path(arguments[0])
    try:
        last = int(arguments[2]) if len(arguments) > 2 else None
        text = json.dumps(summarize(read_trace(trace), last), indent=1)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if len(arguments) > 1:
            compress(trace)
    if len(arguments) == 1:
        print(text)
    else:
        Path(arguments[1]).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
