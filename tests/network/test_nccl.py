from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.network.conftest import NOBODY, Tree, job
from torch._C import _distributed_c10d

from azureml_strategy.cluster.environ import PLANNED_VARIABLES
from azureml_strategy.network.nccl import (
    NetworkPlan,
    configured_settings,
    log_folder,
    log_settings,
    own_log,
    plan_nccl,
    recorder_settings,
)
from azureml_strategy.network.node import Node, read_node

NAME = "NCCL_IB_HCA"
PLACES = ("environment", "NCCL_CONF_FILE", "home", "etc")


@pytest.fixture
def environ(tree: Tree) -> dict[str, str]:
    """A home folder and nothing else."""
    return {"HOME": str(tree.root / "home")}


@pytest.mark.parametrize("places", [PLACES[i:j] for i in range(4) for j in range(i + 1, 5)], ids="-".join)
def test_which_place_wins(tree: Tree, environ: dict[str, str], places: tuple[str, ...]) -> None:
    """The environment, then NCCL_CONF_FILE or else the home folder's file, then that in /etc: initEnv of NCCL."""
    sources = {"environment": "environment"}
    for place, file in (("NCCL_CONF_FILE", "own.conf"), ("home", "home/.nccl.conf"), ("etc", "etc/nccl.conf")):
        if place in places:
            sources[place] = str(tree.write(file, f"{NAME}={place}\n"))
    if "NCCL_CONF_FILE" in places:
        environ["NCCL_CONF_FILE"] = sources["NCCL_CONF_FILE"]
    if "environment" in places:
        environ[NAME] = "environment"
    assert configured_settings(environ, root=tree.root)[NAME] == (places[0], sources[places[0]])


def test_the_places_add_up(tree: Tree, environ: dict[str, str]) -> None:
    home, etc = tree.write("home/.nccl.conf", "NCCL_ALGO=Ring"), tree.write("etc/nccl.conf", "NCCL_PROTO=Simple")
    assert configured_settings(environ | {"NCCL_DEBUG": "WARN"}, root=tree.root) == {
        "NCCL_DEBUG": ("WARN", "environment"),
        "NCCL_ALGO": ("Ring", str(home)),
        "NCCL_PROTO": ("Simple", str(etc)),
    }


@pytest.mark.parametrize("library", ["NCCL", "RCCL", "GLOO"])
def test_what_an_image_says_of_its_library_is_no_setting(tree: Tree, environ: dict[str, str], library: str) -> None:
    """NVIDIA's images set NCCL_VERSION=2.27.3 and the like; `doctor` and the record of a run take them for nobody's."""
    about = [f"{library}_{name}" for name in ("VERSION", "HOME", "ROOT", "ROOT_DIR", "INCLUDE_DIR", "LIB_DIR", "PATH")]
    settings = {f"{library}_DEBUG": "WARN", f"{library}_LIBRARIES_MAX": "1", f"{library}_NET_PLUGIN": "none"}
    tree.write("etc/nccl.conf", f"{library}_VERSION=2.7")
    environ |= settings | dict.fromkeys(about, "2.27.3")
    assert configured_settings(environ, root=tree.root).keys() == settings.keys()
    assert {each.variable for each in plan_nccl(environ=environ, root=tree.root).kept} == settings.keys()


def test_a_file_that_the_user_names_stands_for_that_at_home_even_if_it_is_not_there(
    tree: Tree, environ: dict[str, str]
) -> None:
    tree.write("home/.nccl.conf", f"{NAME}=home")
    environ["NCCL_CONF_FILE"] = "/nonexistent"
    assert NAME not in configured_settings(environ, root=tree.root)
    environ["NCCL_CONF_FILE"] = ""
    assert configured_settings(environ, root=tree.root)[NAME][0] == "home"


def test_rccl_has_files_of_its_own(tree: Tree, environ: dict[str, str]) -> None:
    tree.write("etc/nccl.conf", f"{NAME}=nccl")
    tree.write("home/.rccl.conf", "NCCL_DEBUG=rccl")
    tree.write("etc/rccl.conf", f"{NAME}=rccl")
    found = configured_settings(environ, root=tree.root, library="rccl")
    assert {name: value for name, (value, _) in found.items()} == {NAME: "rccl", "NCCL_DEBUG": "rccl"}
    assert configured_settings(environ, root=tree.root)[NAME][0] == "nccl"


def test_lines_are_read_as_nccl_reads_them(tree: Tree, environ: dict[str, str]) -> None:
    lines = (
        "# NCCL_ALGO=Ring",
        "NCCL_SOCKET_IFNAME==eth0",
        "",
        "NCCL_PROTO",
        " NCCL_NET=IB",  # a variable whose name begins with a blank
        "NCCL_IB_SL =1",
        "NCCL_DEBUG= INFO",
        "NCCL_IB_TC=",
        "LD_PRELOAD=/evil.so",
    )
    tree.write("etc/nccl.conf", "\n".join(lines))
    found = configured_settings(environ, root=tree.root)
    assert {name: value for name, (value, _) in found.items()} == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NCCL_IB_SL ": "1",
        "NCCL_DEBUG": " INFO",
        "NCCL_IB_TC": "",
    }


def test_only_variables_about_communication_are_read(environ: dict[str, str]) -> None:
    mine = {"NCCL_IB_DISABLE": "1", "RCCL_MSCCL_ENABLE": "0", "GLOO_SOCKET_IFNAME": "eth0", "CUDA_LAUNCH_BLOCKING": "1"}
    others = {"AZUREML_RUN_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "0", "MY_NCCL_DEBUG": "x"}
    assert configured_settings(environ | mine | others, root="/nonexistent").keys() == mine.keys()


def test_what_an_earlier_plan_has_set_is_not_the_users(environ: dict[str, str]) -> None:
    environ |= {NAME: "=mlx5_ib0:1", "NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring", PLANNED_VARIABLES: ""}
    environ[PLANNED_VARIABLES] = json.dumps({NAME: "=mlx5_ib0:1", "NCCL_DEBUG": "INFO"})
    assert configured_settings(environ, root="/nonexistent") == {"NCCL_ALGO": ("Ring", "environment")}


def test_this_process_is_read_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_IB_SL", "3")
    assert configured_settings(root=tmp_path)["NCCL_IB_SL"] == ("3", "environment")


@pytest.mark.parametrize("kind", ["folder", "dangling"])
def test_a_file_that_cannot_be_read(tree: Tree, environ: dict[str, str], kind: str) -> None:
    path = tree.write("etc/nccl.conf", "")
    path.unlink()
    path.mkdir() if kind == "folder" else path.symlink_to("gone")
    assert configured_settings(environ, root=tree.root) == {}


@given(st.binary(max_size=80))
def test_no_bytes_raise(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Tree(Path(folder)).write("etc/nccl.conf", b"NCCL_IB_SL=1\n" + content)
        assert "NCCL_IB_SL" in configured_settings({}, root=folder)


def planned(folder: Path, **configured: str) -> dict[str, str]:
    sources = {name: (value, "environment") for name, value in configured.items()}
    return {setting.variable: setting.value for setting in log_settings(sources, folder)}


def test_nccl_writes_one_file_for_each_process(tmp_path: Path) -> None:
    settings = planned(tmp_path)
    assert settings == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%h.%p.log"}
    host = socket.gethostname().partition(".")[0]
    assert own_log(settings) == tmp_path / f"nccl.{host}.{os.getpid()}.log"


def test_a_log_that_the_user_wants_is_left_as_it_is(tmp_path: Path) -> None:
    assert planned(tmp_path, NCCL_DEBUG="WARN") == {}
    assert planned(tmp_path, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE="/mine") == {}
    assert planned(tmp_path, NCCL_DEBUG_FILE="/mine.%p") == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize("level", ["INFO", "info", "TRACE", "ABORT"])
def test_the_users_own_file_is_read_back(level: str) -> None:
    assert own_log({"NCCL_DEBUG": level, "NCCL_DEBUG_FILE": "/logs/a.%p.%p"}) == Path(
        f"/logs/a.{os.getpid()}.{os.getpid()}"
    )


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/a"}, "NCCL_DEBUG=WARN keeps NCCL from telling it. Remove"),
        ({"NCCL_DEBUG": "VERSION"}, "NCCL_DEBUG=VERSION keeps NCCL from telling it."),
        ({"NCCL_DEBUG": "INFO"}, "NCCL_DEBUG=INFO writes to standard output, .* `azureml-strategy doctor --log FILE`"),
    ],
)
def test_why_there_is_no_log_to_read(variables: dict[str, str], text: str) -> None:
    with pytest.raises(LookupError, match=text):
        own_log(variables)


@pytest.mark.parametrize(
    ("subsystems", "told"),
    [("COLL", False), ("^INIT,ENV", False), ("INIT,ENV", True), ("net", True), ("ALL", True), ("^COLL", True)],
)
def test_subsystems_that_leave_the_transport_out(subsystems: str, told: bool) -> None:
    variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/log", "NCCL_DEBUG_SUBSYS": subsystems}
    if told:
        assert own_log(variables) == Path("/tmp/log")
    else:
        with pytest.raises(LookupError, match="Remove NCCL_DEBUG_SUBSYS"):
            own_log(variables)


def test_in_a_job_the_log_is_among_those_that_are_uploaded(tmp_path: Path) -> None:
    assert log_folder(azure=True) == tmp_path / "logs/nccl"  # each test has a working folder of its own
    assert (tmp_path / "logs/nccl").is_dir()


def test_elsewhere_it_is_temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    assert log_folder(azure=False) == tmp_path / "tmp" / f"azureml_strategy_nccl_{os.getuid()}"
    assert not (tmp_path / "logs").exists()


def test_a_working_folder_that_takes_no_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "logs").write_text("a file where a folder should be")
    assert log_folder(azure=True) == tmp_path / f"azureml_strategy_nccl_{os.getuid()}"
    assert log_folder(azure=True).is_dir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "logs"))
    assert (
        log_folder(azure=True) == tmp_path / "logs" / f"azureml_strategy_nccl_{os.getuid()}"
    )  # NCCL fails to open its log, and goes on


FOLDER = Path("/logs/nccl")


def values(configured: dict[str, str], folder: Path | None = FOLDER) -> dict[str, str]:
    found = {name: (value, "environment") for name, value in configured.items()}
    return {setting.variable: setting.value for setting in recorder_settings(found, folder)}


def test_it_is_switched_on_and_kept() -> None:
    assert values({}) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "/logs/nccl/flight_recorder.rank_",
    }
    assert values({}, folder=None) == {"TORCH_FR_BUFFER_SIZE": "2000"}


def test_older_releases_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_distributed_c10d, "_dump_fr_trace")
    assert values({}) == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/logs/nccl/flight_recorder.rank_",
    }


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_what_the_user_has_set_stays(name: str) -> None:
    assert values({name: "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_FR_DUMP_TEMP_FILE": "/mine"}) == {}


H100 = "Standard_ND96isr_H100_v5"


def plan(tree: Tree, node: Node, environ: dict[str, str] | None = None, num_nodes: int = 2) -> NetworkPlan:
    environ = {} if environ is None else environ
    return plan_nccl(node, num_nodes=num_nodes, environ=environ, root=tree.root)


def test_what_is_planned_and_applied(tree: Tree) -> None:
    environ: dict[str, str] = {}
    made = plan(tree, tree.nd96isr_h100_v5(), environ)
    assert (made.infiniband, made.kept, made.findings) == (True, (), ())
    assert environ == {}  # nothing is changed until it is applied
    made.apply(environ)
    assert json.loads(environ.pop(PLANNED_VARIABLES)) == made.variables
    assert environ == made.variables == made.effective
    assert environ["NCCL_IB_HCA"].startswith("=mlx5_ib0:1,")


def test_every_setting_has_a_reason_and_a_source(tree: Tree) -> None:
    made = plan_nccl(tree.nd96isr_h100_v5(), num_nodes=2, environ={}, root=tree.root, log_folder=tree.root)
    assert {"NCCL_DEBUG", "NCCL_DEBUG_FILE"} <= made.variables.keys()
    assert all(setting.reason and setting.source for setting in made.settings)


def test_the_users_values_win_and_are_compared_with_the_hardware(tree: Tree) -> None:
    environ = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0"}
    made = plan(tree, tree.nd96isr_h100_v5(), environ)
    assert not environ.keys() & made.variables.keys()
    assert [(kept.variable, kept.value, kept.source) for kept in made.kept] == [
        ("NCCL_IB_DISABLE", "1", "environment"),
        ("NCCL_SOCKET_IFNAME", "eth0", "environment"),
    ]
    (finding,) = made.findings
    assert "8 InfiniBand adapter(s) with 400 GB/s stay unused" in finding.text
    assert not made.infiniband
    made.apply(environ)
    assert environ["NCCL_IB_DISABLE"] == "1"


def test_a_value_in_a_file_that_nccl_reads_is_not_overridden_by_the_environment(tree: Tree) -> None:
    file = tree.write("etc/nccl.conf", "NCCL_IB_PCI_RELAXED_ORDERING=0\nNCCL_TOPO_FILE=/absent.xml\n")
    made = plan(tree, tree.nd96isr_h100_v5())
    assert "NCCL_IB_PCI_RELAXED_ORDERING" not in made.variables
    assert made.effective["NCCL_IB_PCI_RELAXED_ORDERING"] == "0"
    assert [finding.subject.partition(" in ")[2] for finding in made.findings] == [str(file)] * 2


def test_on_amd_gpus_the_files_are_those_of_rccl(tree: Tree) -> None:
    tree.write("etc/nccl.conf", "NCCL_IB_HCA=mlx5_0")
    tree.write("etc/rccl.conf", "NCCL_SOCKET_IFNAME=eth0")
    made = plan(tree, tree.nd96isr_mi300x_v5())
    assert [kept.variable for kept in made.kept] == ["NCCL_SOCKET_IFNAME"]
    assert "NCCL_IB_HCA" in made.variables
    assert made.infiniband


def test_a_second_plan_does_not_take_the_first_ones_values_for_the_users(tree: Tree) -> None:
    environ = {"NCCL_ALGO": "Ring"}
    node = tree.nd96isr_h100_v5()
    first = plan(tree, node, environ, num_nodes=1)
    first.apply(environ)
    second = plan(tree, node, environ)
    assert [kept.variable for kept in second.kept] == ["NCCL_ALGO"]
    assert second.variables.keys() - first.variables.keys() == {"GLOO_SOCKET_IFNAME", "NCCL_IB_QPS_PER_CONNECTION"}
    second.apply(environ)
    assert json.loads(environ[PLANNED_VARIABLES]) == first.variables | second.variables
    assert plan(tree, node, environ) == second
    environ["NCCL_IB_HCA"] = "=mlx5_ib0:1"  # changed by the user since
    assert plan(tree, node, environ).effective["NCCL_IB_HCA"] == "=mlx5_ib0:1"


def test_a_damaged_note_of_an_earlier_plan_is_none(tree: Tree) -> None:
    environ = {PLANNED_VARIABLES: "{", "NCCL_ALGO": "Ring"}
    assert [kept.variable for kept in plan(tree, tree.nd96isr_h100_v5(), environ).kept] == ["NCCL_ALGO"]


def test_an_adapter_that_the_user_names_is_not_switched_off(tree: Tree) -> None:
    made = plan(tree, tree.nc96ads_a100_v4(), {"NCCL_IB_HCA": "mlx5_an0"})
    assert "NCCL_IB_DISABLE" not in made.variables
    (finding,) = made.findings
    assert "run RoCE over it" in finding.text


def test_a_plan_without_settings_leaves_the_environment_alone(tree: Tree) -> None:
    environ: dict[str, str] = {}
    plan(tree, tree.read(), environ).apply(environ)
    assert environ == {}


def test_this_process_is_planned_for_by_default(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_SL", "2")
    for name in ("NCCL_SOCKET_IFNAME", PLANNED_VARIABLES):
        monkeypatch.setenv(name, "")  # so that what is applied is taken back
        monkeypatch.delenv(name)
    node = tree.laptop()
    made = plan_nccl(node, root=tree.root)
    assert [kept.variable for kept in made.kept] == ["NCCL_IB_SL"]
    made.apply()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "wlp2s0"


def test_the_node_is_read_where_it_is_not_given(tree: Tree) -> None:
    tree.nc96ads_a100_v4()
    made = plan_nccl(environ=job("Standard_NC96ads_A100_v4"), root=tree.root)
    assert made.variables == {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}
    assert not made.infiniband


def test_a_faulty_node_is_told_with_the_plan(tree: Tree) -> None:
    tree.nd96isr_h100_v5()
    tree.hca("mlx5_ib3", state="1: DOWN")
    made = plan(tree, tree.read(job(H100)))
    assert "mlx5_ib3" not in made.variables["NCCL_IB_HCA"]
    assert [finding.subject for finding in made.findings] == ["InfiniBand mlx5_ib3"]
    assert made.infiniband  # seven adapters are left


def test_the_part_that_concerns_gloo(tree: Tree) -> None:
    made = plan(tree, tree.nd96isr_h100_v5(), {"NCCL_IB_DISABLE": "1"}).for_gloo()
    assert made.variables == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert (made.kept, made.findings, made.infiniband) == ((), (), False)
    made = plan(tree, tree.nd96isr_h100_v5(), {"GLOO_SOCKET_IFNAME": "eth9"}).for_gloo()
    assert (made.variables, made.effective) == ({}, {"GLOO_SOCKET_IFNAME": "eth9"})
    assert [finding.subject for finding in made.findings] == ["GLOO_SOCKET_IFNAME=eth9"]


def test_nothing_known_nothing_planned(tmp_path: Path) -> None:
    node = read_node(tmp_path / "absent", {}, metadata_url=NOBODY)
    made = plan_nccl(node, num_nodes=2, environ={}, root=tmp_path)
    assert made == NetworkPlan((), (), (), infiniband=False)


def test_secrets_of_the_job_are_not_in_the_plan(tree: Tree) -> None:
    environ = {"AZUREML_RUN_TOKEN": "eyJhbGciOi.secret", "NCCL_ALGO": "Ring"}
    assert "secret" not in repr(plan(tree, tree.nd96isr_h100_v5(), environ))


def test_planning_imports_nothing_heavy() -> None:
    code = (
        "import sys; from azureml_strategy.network import plan_nccl; plan_nccl(root='/nonexistent')\n"
        "print({'torch', 'lightning', 'mlflow', 'hydra', 'rich', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
