"""How long a GPU waits for its host inside forward and backward, by a trace of torch.profiler.

The spans are Lightning's own, which `tests.gpu.watching.Annotations` marks. torch also marks on the GPU what a span has
launched, but leaves out what autograd's thread launches. So the spans are the host's, and a moment of the host is on
the GPU what an event that is recorded then would be: when all that was launched before is done.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from azureml_strategy.profiling.trace_summary import Interval, subtract, total, union

SPANS = re.compile(r"\[Strategy\]\w+\.(training_step|backward)")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# torch.cuda._sleep, by which `KernelTimes` holds the GPU; and the steps after it that the breakdown leaves out, too.
_HOLD, _SETTLING = "spin_kernel", 8
_MICRO = 1e-6


class Work(NamedTuple):
    """What ran on the GPU, in microseconds.

    Attributes:
        launched: when the host launched it.
        start: of the GPU.
        end: of the GPU.
        held: whether it is no work but a hold.
    """

    launched: float
    start: float
    end: float
    held: bool


def launch_waits(trace: dict[str, Any]) -> dict[str, float]:
    """Sum up forward and backward on the GPU.

    The GPU waits where nothing runs and the next kernel was launched after the one before had ended. The microsecond
    between two kernels that are both queued is no wait, as in the breakdown.

    Args:
        trace: Chrome's format, of CPU and GPU.

    Returns:
        `steps`: how many count; held ones and those after them do not, as in the breakdown. `span_s`: seconds of their
        forward and backward. `waited_s`: seconds of these in which the GPU waited for a launch.
    """
    events = [each for each in trace["traceEvents"] if each.get("ph") == "X"]
    work = sorted(_work(events))
    steps = list(_unheld(_steps(events), work))
    on_gpu = _moments(work)
    spans = union((on_gpu(start), on_gpu(end)) for step in steps for start, end in step)
    waits = subtract(spans, union(_busy(work)))
    return {"steps": len(steps), "span_s": _MICRO * total(spans), "waited_s": _MICRO * total(waits)}


def _work(events: list[dict[str, Any]]) -> Iterator[Work]:
    launched = {_correlation(each): each["ts"] for each in events if each.get("cat") in _LAUNCHES}
    for each in events:
        if each.get("cat") in _WORK:
            # One without a launch was launched before the recording.
            at = launched.get(_correlation(each), 0.0)
            yield Work(at, each["ts"], each["ts"] + each["dur"], _HOLD in each["name"])


def _correlation(event: dict[str, Any]) -> int | None:
    """What a kernel shares with its launch."""
    found: int | None = event.get("args", {}).get("correlation")
    return found


def _steps(events: list[dict[str, Any]]) -> list[list[Interval]]:
    """The host's spans of each step, which begins with a forward."""
    steps: list[list[Interval]] = []
    spans = [each for each in events if each.get("cat") == "user_annotation" and SPANS.fullmatch(each["name"])]
    for each in sorted(spans, key=lambda one: float(one["ts"])):
        if each["name"].endswith("training_step"):
            steps.append([])
        if steps:
            steps[-1].append((each["ts"], each["ts"] + each["dur"]))
    return steps


def _unheld(steps: list[list[Interval]], work: list[Work]) -> Iterator[list[Interval]]:
    holds, since, left_out = [each.launched for each in work if each.held], 0.0, 0
    for step in steps:
        if any(since <= hold < step[-1][1] for hold in holds):
            left_out = 1 + _SETTLING
        since = step[-1][1]
        if left_out:
            left_out -= 1
        else:
            yield step


def _moments(work: list[Work]) -> Callable[[float], float]:
    """When the GPU comes to what the host does at a time: it has done what was launched before."""
    launches, ends = [each.launched for each in work], list(accumulate((each.end for each in work), max))

    def moment(at: float) -> float:
        before = bisect_left(launches, at)
        return max(at, ends[before - 1]) if before else at

    return moment


def _busy(work: list[Work]) -> Iterator[Interval]:
    until = 0.0
    for each in sorted(work, key=lambda one: one.start):
        queued = each.launched < until < each.start
        yield (until if queued else each.start), each.end
        until = max(until, each.end)
