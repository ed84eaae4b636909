"""Gathers the times of all ranks over the control channel, with their TCP connections to other nodes, and reports
those that hold up the others.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import statistics
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, NamedTuple

from lightning.pytorch import Trainer

from azureml_strategy.cluster.emulated import is_emulated
from azureml_strategy.cluster.job import read_job
from azureml_strategy.control.channel import Channel, StoreLostError, lease_channel
from azureml_strategy.control.store import ControlStore
from azureml_strategy.interfaces import HasStages
from azureml_strategy.tracking.events import record_event
from azureml_strategy.tracking.logger import job_loggers
from azureml_strategy.tracking.timing.meters import Part
from azureml_strategy.tracking.timing.steps import Step
from azureml_strategy.tracking.timing.stragglers import Cause, RankWindow, Slowest, StragglerDetector, describe, hint

log = logging.getLogger(__name__)


# Seconds between two messages of a rank, and how many ranks the store serves in a second.
_INTERVAL_S, _RANKS_PER_SECOND = 2.0, 200
# A message has a rank's last windows. Rank 0 reads each of them long before newer ones have replaced it.
_SENT_WINDOWS = 16
# A link is judged over so many readings of its counters, because one interval is too short for a steady figure.
_LINK_READINGS = 4
# Most windows in the artifact. Of two that are joined to one, the slower times stay.
_HISTORY_WINDOWS = 500
_CALL_S = 5.0
_COMPUTING = (Part.FORWARD, Part.BACKWARD, Part.HOST, Part.OPTIMIZER)
_CALLBACKS = (Part.OTHER, Part.COPY)
_WAITING = (Part.FORWARD_WAIT, Part.COMMUNICATION, Part.BUBBLE)

# struct tcp_info in linux/tcp.h: tcpi_busy_time and tcpi_rwnd_limited, in microseconds.
_BUSY_TIME = struct.Struct("=QQ")
_BUSY_TIME_AT = 168
_LENGTH = _BUSY_TIME_AT + _BUSY_TIME.size
# struct sockaddr_in6, the longer one: family, port, flow, 16 bytes of address, scope.
_ADDRESS_LENGTH = 28


def shares_one_machine(trainer: Trainer) -> bool:
    """Whether all ranks share the cores of one machine, so that a slow one says nothing about a node or a network."""
    return is_emulated(os.environ) or (trainer.num_nodes == 1 and trainer.strategy.root_device.type == "cpu")


class RankTimes:
    """This rank's times in each window. Rank 0 has the times of all ranks.

    A rank writes its last windows under a key of its own, on the thread of the control channel. Rank 0 reads all keys
    on its own thread of that kind. No rank waits for another, so a rank whose script has other loops than the rest
    delays none of them. In the end, `give_back` returns the lease of the channel.
    """

    def __init__(self, trainer: Trainer, channel: Channel, give_back: Callable[[], None]) -> None:
        self._rank, self._world_size = rank, world_size = trainer.global_rank, trainer.world_size
        self._store = ControlStore(channel, "azureml_strategy/rank_times", rank, [channel.id] * world_size, _CALL_S)
        self._give_back = give_back
        strategy = trainer.strategy
        self._place: dict[str, Any] = {
            "rank": rank,
            "host": socket.gethostname(),
            "node": trainer.node_rank,
            "device": str(strategy.root_device),
        }
        # Ranks of one group do the same work.
        self._group = strategy.pipeline_stage if isinstance(strategy, HasStages) else 0
        self._one_machine = shares_one_machine(trainer)
        self._own_windows: deque[RankWindow] = deque(maxlen=_SENT_WINDOWS)
        self._changed = False
        # Rank 0's name for this fit. A store may outlive a run, and then it has keys of a previous attempt.
        self._fit = uuid.uuid4().hex if rank == 0 else None
        self._places: dict[int, dict[str, Any]] = {}
        self._windows: dict[int, dict[int, RankWindow]] = {}
        self._complete: deque[tuple[int, list[RankWindow]]] = deque()
        self._last = -1
        self._links: deque[tuple[float, dict[str, Link]]] = deque(maxlen=_LINK_READINGS)
        self._busiest: tuple[float, str] | None = None
        self._lock = threading.Lock()
        self._read_links()
        self._stragglers = StragglerDetector()
        self.history = History()
        channel.every(max(_INTERVAL_S, world_size / _RANKS_PER_SECOND), self._exchange)
        self._channel = channel

    @classmethod
    def join(cls, trainer: Trainer) -> RankTimes | None:
        """Take part without waiting for other ranks. None if there is no control channel."""
        try:
            leased = lease_channel(trainer.world_size)
        except Exception as error:  # whatever it is, training can do without
            log.debug("The ranks are not compared: %s: %s", type(error).__name__, error)
            return None
        return cls(trainer, *leased) if leased is not None else None

    def add(self, steps: Sequence[Step], step: int) -> None:
        """Keep this rank's times of a window, which ends at the same step on all ranks."""
        busiest = self._busiest
        window = RankWindow(
            step,
            _median(steps, _COMPUTING),
            _median(steps, (Part.DATA_WAIT,)),
            _median(steps, _CALLBACKS),
            _median(steps, _WAITING),
            busiest[0] * statistics.median(each.seconds for each in steps) if busiest is not None else None,
            busiest[1] if busiest is not None else "",
            self._group,
        )
        with self._lock:
            self._own_windows.append(window)
            self._changed = True

    def exchange(self) -> None:
        """Write, or on rank 0 read, the last windows now."""
        try:
            self._exchange()
        except StoreLostError as error:
            log.debug("The last times of this rank are not told: %s", error)

    def report(self, trainer: Trainer) -> dict[str, float]:
        """Compare the ranks in the windows that are complete by now. Call it on rank 0.

        Ranks that hold up the others are named on the console and in the events of the run.

        Returns:
            Metrics of the last window; empty if there is none.
        """
        metrics: dict[str, float] = {}
        while self._complete:
            step, windows = self._complete.popleft()
            for slow in self._stragglers.add(windows):
                text = describe(slow, self._where(slow.rank), self._at(slow.peer))
                text = f"{text[0].upper()}{text[1:]}, in several windows up to step {step}."
                text = f"{text} {hint(slow.cause, self._one_machine)}"
                log.warning(text)
                record_event(trainer, "slow_rank", text)
            self.history.add(windows, self._stragglers.slow)
            compute = [each.compute_s for each in windows]
            metrics = {
                "ranks/compute_s_min": min(compute),
                "ranks/compute_s_median": statistics.median(compute),
                "ranks/compute_s_max": max(compute),
                "ranks/data_wait_s_max": max(each.data_wait_s for each in windows),
                "ranks/slow": float(len({rank for rank, _ in self._stragglers.slow})),
            }
        return metrics

    def slowest(self) -> Slowest | None:
        """The rank that took longest over the whole run, if one stands out; on rank 0."""
        slow = self._stragglers.lasting()
        if not slow:
            return None
        worst, where = slow[0], self._where(slow[0].rank)
        text = describe(worst, where, self._at(worst.peer))
        return Slowest(f"rank {worst.rank} ({where})", text, worst.excess / (1 + worst.excess))

    def keep(self, trainer: Trainer) -> None:
        """Put the times of all ranks among the run's artifacts."""
        if not self.history.windows:
            return
        job = read_job()
        places = [self._places.get(rank, {"rank": rank}) for rank in range(self._world_size)]
        text = json.dumps({"ranks": places, "windows": self.history.windows})
        for logger in job_loggers(trainer):
            logger.log_text(text, f"ranks/attempt_{job.attempt if job is not None else 0}.json")

    def close(self) -> None:
        """Take part no more."""
        self._channel.no_more(self._exchange)
        self._give_back()

    def _exchange(self) -> None:
        """Write this rank's windows, or on rank 0 read the windows of all others, on the channel's thread."""
        self._read_links()
        if self._rank == 0:
            self._read_all()
            return
        fit = self._store.get("fit")
        with self._lock:
            new = fit != self._fit
            self._fit = fit
            if fit is None or not (self._changed or new):
                return
            message = json.dumps([self._place, [list(each.__dict__.values()) for each in self._own_windows]])
            self._changed = False
        self._store.set(f"{fit}/{self._rank}", message)

    def _read_all(self) -> None:
        if self._store.get("fit") != self._fit:
            self._store.set("fit", str(self._fit))
        keys = {f"{self._fit}/{rank}": rank for rank in range(1, self._world_size)}
        messages = self._store.get_all(list(keys))
        with self._lock:
            self._take(0, self._place, list(self._own_windows))
            for key, text in messages.items():
                if text is not None:
                    place, windows = json.loads(text)
                    self._take(keys[key], place, [RankWindow(*each) for each in windows])
            for step in sorted(step for step, found in self._windows.items() if len(found) == self._world_size):
                found = self._windows.pop(step)
                self._last = step
                self._complete.append((step, [found[rank] for rank in range(self._world_size)]))
            # Forget old windows that some rank never sends, because it had no whole step in them.
            for step in sorted(self._windows)[:-_SENT_WINDOWS]:
                del self._windows[step]

    def _take(self, rank: int, place: dict[str, Any], windows: Sequence[RankWindow]) -> None:
        self._places[rank] = place
        for each in windows:
            if each.step > self._last:
                self._windows.setdefault(each.step, {})[rank] = each

    def _read_links(self) -> None:
        """Find the connection that was busiest in the last readings, and the share of the time in which it was busy."""
        now = time.perf_counter()
        if self._links and now - self._links[-1][0] < _INTERVAL_S / 2:
            return
        port = os.environ.get("MASTER_PORT", "")
        links = read_links(frozenset({int(port)}) if port.isdigit() else frozenset())
        self._links.append((now, links))
        then, before = self._links[0]
        busy = {peer: link.busy_s - before[peer].busy_s for peer, link in links.items() if peer in before}
        if busy and now > then:
            peer = max(busy, key=lambda each: busy[each])
            self._busiest = max(busy[peer], 0.0) / (now - then), peer
        self._place["addresses"] = sorted({link.local_address for link in links.values()})

    def _where(self, rank: int) -> str:
        place = self._places.get(rank, {})
        return f"{place.get('host')}, node {place.get('node')}, {place.get('device')}" if place else "unknown place"

    def _at(self, address: str) -> str:
        """The address, with its host if exactly one host has it."""
        hosts = {place["host"] for place in self._places.values() if address in place.get("addresses", ())}
        return f"{hosts.pop()} ({address})" if len(hosts) == 1 else address


class History:
    """The times of all ranks over the run, in a bounded number of windows.

    Attributes:
        windows: for the run's page: of each window the step, the time, and numbers for each rank.
    """

    def __init__(self) -> None:
        self.windows: list[dict[str, Any]] = []
        self._joined = 1
        self._pending = 0

    def add(self, windows: Sequence[RankWindow], slow: set[tuple[int, Cause]]) -> None:
        """Add the windows of all ranks that ended at one step."""
        row: dict[str, Any] = {
            "step": windows[0].step,
            "time_ms": int(time.time() * 1000),
            "compute_s": [round(each.compute_s, 6) for each in windows],
            "data_wait_s": [round(each.data_wait_s, 6) for each in windows],
            "communication_s": [round(each.communication_s, 6) for each in windows],
            "slow": {str(rank): cause for rank, cause in slow},
        }
        if self._pending:
            self.windows[-1] = _slower(self.windows[-1], row)
        else:
            self.windows.append(row)
        self._pending = (self._pending + 1) % self._joined
        if len(self.windows) > _HISTORY_WINDOWS and not self._pending:
            pairs = zip(self.windows[::2], [*self.windows[1::2], self.windows[-1]], strict=False)
            self.windows = [_slower(first, second) for first, second in pairs]
            self._joined *= 2


def _slower(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Join two rows to one that ends with the second, and has the slower time of each rank."""
    joined = dict(second)
    for name in ("compute_s", "data_wait_s", "communication_s"):
        joined[name] = [max(pair) for pair in zip(first[name], second[name], strict=True)]
    joined["slow"] = first["slow"] | second["slow"]
    return joined


def _median(steps: Sequence[Step], parts: Sequence[Part]) -> float:
    return statistics.median(sum(step.parts[part] for part in parts) for step in steps)


class Link(NamedTuple):
    """What a process has sent to an address so far.

    Attributes:
        busy_s: seconds in which bytes were under way, without those in which the receiver took no more.
        local_address: address at this end.
    """

    busy_s: float
    local_address: str


def read_links(leave_out: frozenset[int] = frozenset()) -> dict[str, Link]:
    """The connections of this process to other machines by the address there; empty on other systems than Linux.

    Several connections to one address share the link, so only the busiest counts. Connections within this machine are
    left out: they cross no network, and are slow only if the machine is loaded. So are those to the ports of
    `leave_out`, such as the store's.
    """
    links: dict[str, Link] = {}
    for number in _sockets():
        with suppress(OSError, struct.error):  # it has been closed meanwhile, or is no connection
            peer, link = _read(number, leave_out)
            if peer and (peer not in links or link.busy_s > links[peer].busy_s):
                links[peer] = link
    return links


def _sockets() -> list[int]:
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.append(int(name))
    return found


# This calls the C library, because an object of Python's `socket` could change the sockets of others: if the script has
# called setdefaulttimeout, making the object sets O_NONBLOCK, which a copy of a descriptor shares with the original.
def _read(number: int, leave_out: frozenset[int]) -> tuple[str, Link]:
    library = ctypes.CDLL(None)
    peer, port = _address(library.getpeername, number)
    local_address, _ = _address(library.getsockname, number)
    if not peer or port in leave_out or peer == local_address or ip_address(peer).is_loopback:
        return "", Link(0.0, "")
    info, length = ctypes.create_string_buffer(_LENGTH), ctypes.c_uint32(_LENGTH)
    if library.getsockopt(number, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length)):
        return "", Link(0.0, "")  # a UNIX socket, or UDP
    busy_us, full_us = _BUSY_TIME.unpack_from(info.raw[: length.value], _BUSY_TIME_AT)
    return peer, Link((busy_us - full_us) / 1e6, local_address)


def _address(ask: Callable[..., int], number: int) -> tuple[str, int]:
    """The address and port at one end of a socket; an empty address if it has none, or is of another family."""
    buffer, length = ctypes.create_string_buffer(_ADDRESS_LENGTH), ctypes.c_uint32(_ADDRESS_LENGTH)
    if ask(number, buffer, ctypes.byref(length)):
        return "", 0
    raw = buffer.raw
    family, port = struct.unpack_from("=H", raw)[0], struct.unpack_from("!H", raw, 2)[0]
    found = {socket.AF_INET: raw[4:8], socket.AF_INET6: raw[8:24]}.get(family)
    return ("", 0) if found is None else (socket.inet_ntop(family, found).removeprefix("::ffff:"), port)
