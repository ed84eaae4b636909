from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.nccl_log.devices import Route
from azureml_strategy.network.nccl_log.reader import MAX_LINE, PIECE, Messages, read_lines

MEBIBYTE = 1 << 20
FORMS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "bytes": str.encode,
    "text stream": io.StringIO,
    "binary stream": lambda text: io.BytesIO(text.encode()),
    "lines": lambda text: iter(text.split("\n")),
}


def lines(log: Any) -> list[str]:
    return [line for some in read_lines(log) for line in some]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_log(form: str) -> None:
    text = "first\nsecond \u2588\n" + "x" * (PIECE - 20) + "\nüöä\nlast"
    assert [line for line in lines(FORMS[form](text)) if line] == text.split("\n")


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\r\nsecond\r\n")
    assert [line for line in lines(path) if line] == ["first", "second"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lines(tmp_path / "none")


def test_a_str_is_never_a_path(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("content")
    assert lines(str(path)) == [str(path)]


def test_progress_bars_end_lines() -> None:
    assert lines("  0%|\r 50%|\r100%|host NCCL\n") == ["  0%|", " 50%|", "100%|host NCCL", ""]


def test_a_character_between_two_pieces() -> None:
    text = "x" * (PIECE - 1) + "ü"
    assert lines(io.BytesIO((text + "\nend").encode()))[-1] == "end"


@given(st.text(max_size=300))
def test_no_character_of_a_log_is_lost(text: str) -> None:
    assert lines(text) == text.replace("\r", "\n").split("\n")


@given(st.binary(max_size=300))
def test_bytes_of_any_kind(content: bytes) -> None:
    assert lines(io.BytesIO(content)) == lines(content)


@pytest.mark.parametrize(
    ("content", "mebibytes"), [(b"x", 30), (b"\0", 30), (b"\xff", 30), (b"a line of text\n" * 20, 12), (b"\r", 3)]
)
def test_memory_is_bounded(content: bytes, mebibytes: int, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(content * (mebibytes * MEBIBYTE // len(content)))
    tracemalloc.start()
    longest = max(len(line) for some in read_lines(path) for line in some)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert longest <= MAX_LINE + PIECE
    assert peak < 10 * MEBIBYTE


CHANNEL = "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA"
IB = Route("NET/IB", "IB", 0, gpudirect=True)
PREFIXES = {
    "NCCL": "node-0:12:34 [0] ",
    "mpirun": "[1,3]<stdout>:node-0:12:34 [0] ",
    "mpirun's stderr": "[1,3]<stderr>:node-0:12:34 [0] ",
    "srun": "3: node-0:12:34 [0] ",
    "torchrun": "[rank3]: node-0:12:34 [0] ",
    "sky": "(head, rank=0, pid=5634) [node-0:2]:node-0:12:34 [0] ",
    "ray": "(pid=21780, ip=10.221.0.5) node-0:12:34 [0] ",
    "ray in colour": "\x1b[36m(pid=21780, ip=10.221.0.5)\x1b[0m node-0:12:34 [0] ",
    "kubernetes": "2025-01-01T12:00:00.123456789Z node-0:12:34 [0] ",
    "a logger": "[2025-01-01 12:00:00,123][job][INFO] - node-0:12:34 [0] ",
    "NCCL's time": "[2025-01-01 12:00:00] node-0:12:34 [0] ",
    "a quotation": "> node-0:12:34 [0] ",
}


class Collected:
    """Keeps what is handed over."""

    def __init__(self) -> None:
        self.channels: dict[tuple[str | None, Route], int] = {}
        self.messages: list[tuple[str | None, str, str]] = []
        self.others: list[str] = []
        self.wanted = 0

    def channel(self, host: str | None, route: Route, lines: int) -> None:
        self.channels[host, route] = self.channels.get((host, route), 0) + lines

    def message(self, host: str | None, level: str, text: str) -> None:
        self.messages.append((host, level, text))

    def other(self, text: str) -> int:
        self.others.append(text)
        return self.wanted


def collect(*lines: str, wanted: int = 0) -> Collected:
    collected = Collected()
    collected.wanted = wanted
    messages = Messages(collected)
    messages.read(list(lines))
    messages.close()
    return collected


@pytest.mark.parametrize("launcher", PREFIXES)
def test_prefixes_of_launchers(launcher: str) -> None:
    prefix = PREFIXES[launcher]
    seen = collect(*[f"{prefix}NCCL INFO {CHANNEL}"] * 3, f"{prefix}NCCL INFO Using network IB")
    assert seen.channels == {("node-0", IB): 3}
    assert seen.messages == [("node-0", "INFO", "Using network IB")]


@pytest.mark.parametrize("where", ["transport/net_ib.cc:1296 ", "misc/ibvwrap.cc:380 (wrap_ibv_modify_qp) ", ""])
def test_warnings(where: str) -> None:
    seen = collect(f"[2025-01-01 12:00:00] node-0:12:34 [0] {where}NCCL WARN Call to x failed")
    assert seen.messages == [("node-0", "WARN", "Call to x failed")]


def test_a_message_without_a_prefix() -> None:
    assert collect("NCCL INFO Using network IB").messages == [(None, "INFO", "Using network IB")]


def test_a_warning_that_names_a_route_is_no_channel() -> None:
    seen = collect("node-0:1:2 [0] net.cc:1 NCCL WARN failed via NET/IB/0")
    assert not seen.channels
    assert len(seen.messages) == 1


@pytest.mark.parametrize("at", range(10, len("node-0:12:34 [0] NCCL INFO ") + len(CHANNEL)))
def test_a_channel_line_cut_off_is_counted_whole_or_not_at_all(at: int) -> None:
    line = f"node-0:12:34 [0] NCCL INFO {CHANNEL}"
    assert {route.network for _, route in collect(line[:at]).channels} <= {"IB"}


def test_processes_that_wrote_into_one_line() -> None:
    first, second = f"node-0:1:2 [0] NCCL INFO {CHANNEL}", f"node-1:3:4 [1] NCCL INFO {CHANNEL}"
    assert collect(first + second).channels == {("node-0", IB): 1, (None, IB): 1}


def test_a_wrapped_message() -> None:
    words = f"node-0:1:2 [0] NCCL INFO {CHANNEL}".split(" ")
    for at in range(words.index(":") + 3, len(words)):
        seen = collect(" ".join(words[:at]), "", " ".join(words[at:]))
        assert seen.channels == {("node-0", IB): 1}, at


def test_a_wrapped_list_of_devices() -> None:
    lines = ["NET/IB : Using [0]mlx5_ib0:1/IB [1]mlx5_ib1:1/IB", "[2]mlx5_ib2:1/IB [RO];", "OOB eth0:10.0.0.4<0>"]
    seen = collect(f"node-0:1:2 [0] NCCL INFO {lines[0]}", *lines[1:])
    assert seen.messages == [("node-0", "INFO", " ".join(lines))]


def test_a_message_without_end_takes_nothing_from_the_training() -> None:
    start = "NET/IB : Using [0]mlx5_ib0:1/IB"
    steps = [f"step {step}" for step in range(10)]
    assert collect(f"node-0:1:2 [0] NCCL INFO {start}", *steps).messages == [("node-0", "INFO", start)]
    assert collect(f"node-0:1:2 [0] NCCL INFO {start}").messages == [("node-0", "INFO", start)]
    following = collect(f"node-0:1:2 [0] NCCL INFO {start}", "node-1:1:2 [0] NCCL INFO Using network IB")
    assert [text for _, _, text in following.messages] == [start, "Using network IB"]


def test_lines_behind_are_passed_on_as_wanted() -> None:
    assert collect("ncclSystemError: x", "", "Last error:", "epoch 1", wanted=0).others == ["ncclSystemError: x"]
    assert len(collect("ncclSystemError: x", "a", "b", wanted=1).others) == 3


@given(st.lists(st.text(max_size=60) | st.sampled_from(["NCCL INFO ", " via ", CHANNEL, "ncclX", "NCCL WARN "])))
def test_no_text_raises(parts: list[str]) -> None:
    collect(*parts)
    collect("".join(parts))
