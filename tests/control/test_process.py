from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from azureml_strategy.control import process
from azureml_strategy.control.process import _status, is_gone, this_process


def test_this_process_is_there() -> None:
    member = this_process(rank=3, node=1)
    assert not is_gone(member)
    assert str(member) == f"rank 3 (node 1, host {member.host})"


def test_a_process_that_has_ended_is_gone_before_its_parent_looks() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    status = _status(child.pid)
    assert status is not None
    member = replace(this_process(1, 0), pid=child.pid, started=status[1])
    assert not is_gone(member)
    child.communicate(b"\n")
    assert is_gone(member)


def test_a_number_that_is_used_again_is_another_process() -> None:
    assert is_gone(replace(this_process(0, 0), started="1"))


def test_another_machine_cannot_be_seen() -> None:
    assert not is_gone(replace(this_process(0, 0), processes="elsewhere", pid=2**22 + 1))


def test_machines_without_a_name_for_their_table_do_not_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_table", lambda: "")
    assert not is_gone(replace(this_process(0, 0), pid=2**22 + 1))
