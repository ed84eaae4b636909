"""What is read, and the document that it makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from azureml_strategy.network.doctor.facts import has_accelerators

ReadFacts = Callable[..., Any]


def test_the_facts_are_fit_for_json(tree: Any, read: ReadFacts, job: ReadFacts) -> None:
    tree.nd96isr_h100_v5()
    tree.topology("ndv5")
    document = json.loads(json.dumps(read(job("Standard_ND96isr_H100_v5", processes=8)).to_json()))
    assert document["launch"]["world_size"] == 16
    assert document["job"]["run_id"] == "quirky_plum"
    assert "subscription" not in document["job"]
    assert document["node"]["topology_file"].endswith("ndv5-topo.xml")
    assert [hca["name"] for hca in document["node"]["hcas"]][:2] == ["mlx5_an0", "mlx5_ib0"]
    variables = {setting["variable"]: setting["value"] for setting in document["plan"]["settings"]}
    assert variables["NCCL_SOCKET_IFNAME"] == "eth0"
    assert document["plan"]["infiniband"] is True
    assert document["versions"]["torch"] == "2.13.0"


def test_outside_a_job(tree: Any, read: ReadFacts) -> None:
    tree.laptop()
    facts = read()
    assert (facts.launch, facts.launch_error, facts.job, facts.num_nodes) == (None, None, None, 1)
    document = facts.to_json()
    assert (document["launch"], document["job"], document["node"]["topology_file"]) == (None, None, None)
    assert json.dumps(document)


def test_nodes_that_a_network_joins(read: ReadFacts, job: ReadFacts) -> None:
    assert read(job(nodes=4)).num_nodes == 4
    assert read(job(nodes=4, address="127.0.2.1")).num_nodes == 1
    broken = read({**job(nodes=4), "WORLD_SIZE": "3"})
    assert broken.launch is None
    assert broken.launch_error
    assert broken.num_nodes == 1


def test_nccl_matters_where_there_are_or_should_be_gpus(tree: Any, read: ReadFacts, job: ReadFacts) -> None:
    assert not has_accelerators(read().node)
    assert not has_accelerators(read(job("Standard_D4s_v5")).node)
    assert has_accelerators(read(job("Standard_ND96isr_H100_v5")).node)
    tree.accelerated_networking()
    assert has_accelerators(read().node)


def test_without_accelerators_only_gloo_is_planned(tree: Any, read: ReadFacts, job: ReadFacts) -> None:
    tree.azure()
    assert [setting.variable for setting in read(job("Standard_D4s_v5")).plan.settings] == ["GLOO_SOCKET_IFNAME"]
