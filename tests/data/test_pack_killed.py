"""A packing that is killed goes on where it was, and gives the same bytes: real processes and a real kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import pytest
from tests.data.packing import class_folders, jpeg, packed, tree

from azureml_strategy.data.packing.images import ImageForm

# Packs, and kills itself at the n-th moment at which something becomes visible or lasting on the disk.
_KILLED = """
import os, signal, sys
from azureml_strategy.cli import main
left = int(sys.argv[1])
def dying(function):
    def call(*arguments, **named):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return call
for name in ("replace", "fsync", "unlink", "rmdir", "mkdir"):
    setattr(os, name, dying(getattr(os, name)))
sys.argv[:2] = ["azureml-strategy"]
sys.exit(main())
"""


def pack_until(moment: int, *words: str) -> int:
    command = [sys.executable, "-c", _KILLED, str(moment), "data", "pack", *words, "--workers", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    return ended.returncode


def test_killed_at_every_moment_it_goes_on(tmp_path: Path) -> None:
    """One packing is killed again and again, each time a little later than what it had done before."""
    class_folders(tmp_path / "src" / "train", {"cat": 9, "dog": 9})
    class_folders(tmp_path / "src" / "val", {"cat": 2, "dog": 2}, first=50)
    packed(tmp_path / "src", tmp_path / "whole", ImageForm(resize=24), shard_size=12_000)
    words = (str(tmp_path / "src"), str(tmp_path / "out"), "--resize", "24", "--shard-size", "12000")
    codes = []
    while not codes or codes[-1] == -signal.SIGKILL:
        codes.append(pack_until(3 + 2 * len(codes), *words))
        assert len(codes) < 60
    assert codes[-1] == 0
    assert len(codes) > 4
    assert unplanned(tree(tmp_path / "out")) == unplanned(tree(tmp_path / "whole"))


@pytest.mark.parametrize(
    "moment", [5, 20, *(pytest.param(moment, marks=pytest.mark.exhaustive) for moment in (2, 8, 12, 16, 25, 30, 37))]
)
def test_killed_at_one_moment_it_goes_on(tmp_path: Path, moment: int) -> None:
    table(tmp_path / "src" / "data" / "train-00000-of-00001.parquet", 12)
    words = (str(tmp_path / "src"), str(tmp_path / "out"), "--resize", "24", "--shard-size", "12000")
    assert pack_until(moment, *words) == -signal.SIGKILL
    assert pack_until(10_000, *words) == 0
    packed(tmp_path / "src", tmp_path / "whole", ImageForm(resize=24), shard_size=12_000)
    assert unplanned(tree(tmp_path / "out")) == unplanned(tree(tmp_path / "whole"))


def test_processes_end_with_the_one_that_was_killed_and_any_number_gives_the_same(tmp_path: Path) -> None:
    class_folders(tmp_path / "src", {"cat": 60, "dog": 60}, size=(400, 300))
    words = ["data", "pack", str(tmp_path / "src"), str(tmp_path / "out"), "--resize", "64", "--shard-size", "15kB"]
    command = [sys.executable, "-m", "azureml_strategy.cli", *words]
    with subprocess.Popen([*command, "--workers", "3"], stderr=subprocess.DEVNULL) as process:
        own = psutil.Process(process.pid)
        while not list((tmp_path / "out").glob("*.tar")):
            assert process.poll() is None, "it ended before it was killed"
        process.send_signal(signal.SIGSTOP)  # so that it does not end meanwhile
        children = own.children(recursive=True)
        process.kill()
    assert len(children) >= 3
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert not (tmp_path / "out" / "index.npz").exists()
    subprocess.run([*command, "--workers", "2"], check=True, timeout=120, stdout=subprocess.DEVNULL)
    whole = [str(tmp_path / "whole") if word == str(tmp_path / "out") else word for word in command]
    subprocess.run([*whole, "--workers", "1"], check=True, timeout=120, stdout=subprocess.DEVNULL)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_ctrl_c_ends_all_processes_with_a_sentence(tmp_path: Path) -> None:
    class_folders(tmp_path / "src", {"cat": 60, "dog": 60}, size=(400, 300))
    words = ["data", "pack", str(tmp_path / "src"), str(tmp_path / "out"), "--resize", "64", "--shard-size", "15kB"]
    command = [sys.executable, "-m", "azureml_strategy.cli", *words, "--workers", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not list((tmp_path / "out").glob("*.tar")):
            assert process.poll() is None, "it ended before it was stopped"
        process.send_signal(signal.SIGSTOP)  # so that it does not end meanwhile
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        assert process.stderr is not None
        told = process.stderr.read()
    assert process.returncode == 130
    assert told == "azureml-strategy: stopped by Ctrl-C. The same command goes on where it was.\n"
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    class_folders(tmp_path / "src", {"cat": 60, "dog": 60}, size=(400, 300))
    words = ["data", "pack", str(tmp_path / "src"), str(tmp_path / "out"), "--resize", "64", "--shard-size", "15kB"]
    command = [sys.executable, "-m", "azureml_strategy.cli", *words, "--workers", "1"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            while not list((tmp_path / "out").glob("*.tar")):
                assert process.poll() is None, "it ended before the other began"
            process.send_signal(signal.SIGSTOP)
            second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        finally:
            process.kill()
    assert second.returncode == 2
    assert "Another process is packing to" in second.stderr


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_is_one_sentence_and_more_room_goes_on(tmp_path: Path) -> None:
    class_folders(tmp_path / "src", {"cat": 40, "dog": 40}, size=(400, 300))
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        words = ["data", "pack", str(tmp_path / "src"), str(disk / "out"), "--shard-size", "300kB", "--workers", "2"]
        command = [sys.executable, "-m", "azureml_strategy.cli", *words]
        first = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert first.returncode == 2
        assert first.stderr.count("\n") == 1
        assert "is full. What is packed stays there. Make room." in first.stderr
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
        subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
        packed(tmp_path / "src", tmp_path / "whole", shard_size=300_000)
        assert unplanned(tree(disk / "out")) == unplanned(tree(tmp_path / "whole"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def unplanned(files: dict[str, bytes]) -> dict[str, bytes]:
    """The shards: the index of `packed` has a hash of the options as the tests give them."""
    return {name: content for name, content in files.items() if not name.endswith(".npz")}


def table(path: Path, rows: int) -> None:
    path.parent.mkdir(parents=True)
    images = [{"bytes": jpeg(number), "path": f"{number}.jpg"} for number in range(rows)]
    content = pyarrow.table({"image": images, "label": [number % 3 for number in range(rows)]})
    pyarrow.parquet.write_table(content, path, row_group_size=5)
