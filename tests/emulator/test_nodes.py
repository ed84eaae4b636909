from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.emulator.conftest import RunCode
from torch.distributed import TCPStore

from azureml_strategy.cluster.environ import BATCH_PORT
from azureml_strategy.emulator import EmulatedJob, EmulationError, emulate
from azureml_strategy.emulator import nodes as module
from azureml_strategy.emulator.nodes import IsolatedNodes, reserved_port


def test_two_jobs_at_once_have_different_ports() -> None:
    with reserved_port() as first, reserved_port() as second:
        assert first != second
        assert BATCH_PORT not in (first, second)


def test_rank_0_listens_on_the_port_while_it_is_reserved() -> None:
    with reserved_port() as port:
        store = TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=10))
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_what_somebody_else_listens_on_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with reserved_port(preferred=taken) as port:
            assert port != taken


def test_a_port_is_free_again_afterwards() -> None:
    with reserved_port() as port:
        pass
    with socket.create_server(("127.0.0.1", port)):
        pass


FIT = Path(__file__).parents[1] / "multiprocess" / "scripts" / "fit.py"


def why_not() -> str:
    """Why this machine cannot isolate nodes; empty where it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "needs root"
    try:
        with IsolatedNodes(1, "1gbit"):
            return ""
    except EmulationError as error:
        return str(error)


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"azureml-{os.getpid()}-")]


isolated = [pytest.mark.root, pytest.mark.skipif(bool(why_not()), reason=why_not())]

# Node 0 serves on its own address; node 1 sends it BYTES and prints the rate.
TRANSFER = """
import json, os, socket, time
rank, addresses, size = int(os.environ["RANK"]), os.environ["AZ_BATCH_HOST_LIST"].split(","), {size}
if rank == 0:
    with socket.create_server((addresses[0], 5000)) as server:
        link, peer = server.accept()
        received = start = 0
        while chunk := link.recv(1 << 16):
            # Timed after the first megabyte: the token bucket lets half of it through at once.
            received += len(chunk)
            if not start and received > 1_000_000:
                start, first = time.perf_counter(), received
        rate = 8e-6 * (received - first) / (time.perf_counter() - start) if start else 0
    print(json.dumps({{"peer": peer[0], "received": received, "mbit": rate, "names": socket.if_nameindex()}}))
else:
    while True:
        try:
            link = socket.create_connection((addresses[0], 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    link.sendall(bytes(size))
    print(json.dumps({{"names": socket.if_nameindex()}}))
"""


class TestIsolated:
    pytestmark = isolated

    def test_nodes_reach_one_another_by_their_own_addresses(self, run_code: RunCode) -> None:
        job = run_code(TRANSFER.format(size=1000), nodes=2, isolate=True)
        assert job.exit_code == 0, job.output
        server, client = job.json()
        assert (server["peer"], server["received"]) == ("10.0.0.5", 1000)
        for node in (server, client):
            assert {name for _, name in node["names"]} >= {"lo", "eth0"}
        assert not namespaces()

    def test_links_have_the_rate_asked_for(self, run_code: RunCode) -> None:
        def mbit() -> float:
            job = run_code(TRANSFER.format(size=8_000_000), nodes=2, isolate=True, bandwidth="100mbit")
            assert job.exit_code == 0, job.output
            return float(job.json()[0]["mbit"])

        assert any(50 < mbit() < 110 for _ in range(3)), "in one of three, as the machine may have stood still"

    def test_a_cable_is_pulled_and_put_back(self) -> None:
        def reachable(nodes: IsolatedNodes) -> bool:
            connect = f"import socket; socket.create_connection(('{nodes.addresses[1]}', 5000), 0.5)"
            prefix = [*nodes.command_prefix(0), sys.executable, "-c"]
            error = subprocess.run([*prefix, connect], capture_output=True, text=True, check=False).stderr
            return "refused" in error  # by a machine that is there

        with IsolatedNodes(2, None) as nodes:
            assert Path(nodes.namespace(1)).exists()
            assert reachable(nodes)
            subprocess.run(nodes.cut_command(1), check=True)
            assert not reachable(nodes)
            subprocess.run(nodes.mend_command(1), check=True)
            assert reachable(nodes)

    def test_the_machine_itself_is_out_of_reach(self, run_code: RunCode) -> None:
        job = run_code("import socket; socket.create_connection(('8.8.8.8', 53), 1)", isolate=True)
        assert job.exit_code == 1
        assert "Network is unreachable" in job.output
        assert not namespaces(), "gone after a failure too"

    def test_ctrl_c_while_the_nodes_are_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """At the tenth command, wherever it is; a real signal's moment would differ from run to run."""
        run, commands = module._run, count()

        def interrupted(command: str) -> None:
            if next(commands) == 10:
                raise KeyboardInterrupt
            run(command)

        monkeypatch.setattr(module, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt), IsolatedNodes(4, "1gbit"):
            pass
        assert not namespaces()

    @pytest.mark.exhaustive
    def test_two_nodes_train_with_gloo(self, store: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("RESULTS", str(tmp_path / "results"))
        command = [sys.executable, str(FIT), "{'strategy': 'azureml_ddp'}"]
        assert emulate(EmulatedJob(command, nodes=2, isolate=True)) == 0
        first, second = (json.loads((tmp_path / "results" / f"{rank}.json").read_text()) for rank in (0, 1))
        assert first["world_size"] == second["world_size"] == 2
        assert first["parameters"] == second["parameters"]
        assert sorted(first["read"] + second["read"]) == list(range(64))
        assert not namespaces()

    def test_a_server_that_nodes_cannot_reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@mlflow.example.com")
        with pytest.raises(EmulationError, match=r"cannot reach https://<redacted>@mlflow\.example\.com"):
            emulate(EmulatedJob(["true"], isolate=True))

    @pytest.mark.parametrize("rate", ["fast", "1", "0mbit", "1gbit; true", "-1mbit", "1 gbit"])
    def test_a_rate_that_is_none(self, rate: str) -> None:
        with pytest.raises(EmulationError, match=r"is no rate\. Write 1gbit"):
            IsolatedNodes(2, rate)

    def test_more_nodes_than_addresses(self) -> None:
        with pytest.raises(EmulationError, match="addresses for 250 nodes, not 251"):
            IsolatedNodes(251, None)

    def test_it_needs_root(self) -> None:
        code = "import os; os.setuid(65534)\nfrom azureml_strategy.emulator import *\n"
        code = f"from azureml_strategy.emulator.nodes import *\n{code}\nIsolatedNodes(2, None)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "EmulationError: --isolate needs root" in done.stderr

    def test_the_command_that_it_tells_to_type_works(self, store: MlflowClient) -> None:
        """sudo gives it another PATH, where this environment's programs are not."""
        command = str(Path(sys.executable).with_name("azureml-strategy"))
        arguments = [command, "emulate", "--nodes", "2", "--isolate", "--", "python", "-c", "import azureml_strategy"]
        # Not by setuid: another user need not be able to read this interpreter.
        code = f"import os, sys; sys.argv[0] = {command!r}; os.geteuid = lambda: 65534\n"
        code += "from azureml_strategy.cli import main; sys.exit(main())"
        refused = subprocess.run([sys.executable, "-c", code, *arguments[1:]], capture_output=True, text=True)
        assert refused.returncode == 2, refused.stderr
        told = refused.stderr.partition("Type: ")[2].partition(", or leave")[0]
        assert told == shlex.join(["sudo", *arguments])
        as_sudo = ["sudo", "-n"] if shutil.which("sudo") else ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
        done = subprocess.run([*as_sudo, *shlex.split(told)[1:]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_it_needs_iproute2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert shutil.which("ip") is None
    with pytest.raises(EmulationError, match="needs ip and tc: install iproute2"):
        IsolatedNodes(2, None)


def test_it_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(EmulationError, match="this is darwin"):
        IsolatedNodes(2, None)
