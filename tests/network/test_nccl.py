from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.network.conftest import NOBODY, Tree, job

from azureml_strategy.network.configured import PLANNED_VARIABLES
from azureml_strategy.network.nccl import NetworkPlan, plan_nccl
from azureml_strategy.network.node import Node, read_node

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
