"""`azureml-strategy doctor`, as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.emulator.conftest import _empty_store as _empty_store
from tests.emulator.conftest import store as store

from azureml_strategy.emulator import EmulatedJob, emulate

COMMAND = [sys.executable, "-m", "azureml_strategy.cli", "doctor"]
LOG = "host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA\n"


def doctor(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    return subprocess.run(
        command, input=stdin, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )


def test_this_machine() -> None:
    done = doctor(COLUMNS="60")
    lines = done.stdout.splitlines()
    assert lines[0] == "Job"
    assert "problem" in lines[-1]
    assert done.returncode == int(not lines[-1].startswith("no problems"))
    assert not done.stderr
    document = json.loads(doctor("--json").stdout)
    assert document["summary"] == lines[-1]
    assert {"launch", "job", "node", "plan", "versions"} < document.keys()


@pytest.mark.usefixtures("store")
def test_an_emulated_job_has_no_problem_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator's nodes meet on the loopback interface, which is wrong only between machines."""
    monkeypatch.setenv("COLUMNS", "80")
    exit_code = emulate(EmulatedJob(COMMAND, nodes=2))
    told = capsys.readouterr().out
    assert exit_code == 0, told
    assert told.count("2 node(s) x 1 process(es)") >= 1
    assert "SOCKET_IFNAME" not in "".join(line for line in told.splitlines() if "PROBLEM" in line)


def test_in_a_job(job: Callable[..., dict[str, str]]) -> None:
    document = json.loads(doctor("--json", **job("Standard_ND96isr_H100_v5", nodes=4)).stdout)
    assert document["launch"]["num_nodes"] == 4
    assert document["node"]["vm_size"]["hcas"] == 8
    wrong = {check["subject"] for check in document["checks"] if check["verdict"] == "problem"}
    assert document["verdict"] == "problem"
    assert "GPUs" in wrong or "InfiniBand" in wrong, "no machine of these tests has all of them"


def test_a_log_from_a_pipe() -> None:
    done = doctor("--log", "-", stdin=LOG)
    assert done.returncode == 0, done.stderr
    assert "InfiniBand, GPUDirect RDMA" in done.stdout
    assert json.loads(doctor("--log", "-", "--json", stdin=LOG).stdout)["transport"]["kind"] == "ib"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--log", "/no/such/file"], "azureml-strategy: The log /no/such/file cannot be read: No such file"),
        (["--log", "/"], "Is a directory"),
        (["--log"], "expected one argument"),
        (["--jsn"], "has no option '--jsn'. Did you mean '--json'?"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], text: str) -> None:
    done = doctor(*arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert not done.stdout


def test_a_reader_that_goes_away() -> None:
    with subprocess.Popen([*COMMAND, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\nfrom azureml_strategy.cli import main\nmain(['doctor', '--json'])\n"
        "heavy = ['torch', 'lightning', 'mlflow', 'hydra', 'omegaconf', 'numpy', 'rich', 'subprocess']\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
