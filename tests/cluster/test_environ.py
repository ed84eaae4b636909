from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import azureml_strategy
from azureml_strategy.cluster.environ import (
    LaunchError,
    copied,
    declared_node_rank,
    describe,
    first_number,
    host_of,
    in_azure_ml,
    is_placeholder,
    main_address,
    main_port,
    node_count,
    required_number,
    whole_number,
)


@given(st.integers(0, 99_999_999), st.sampled_from(["{}", " {} ", "0{}", "{}\n"]))
def test_numbers_are_read(number: int, form: str) -> None:
    assert whole_number({"RANK": form.format(number)}, "RANK") == number


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_empty_counts_as_not_set(text: str) -> None:
    assert whole_number({"RANK": text}, "RANK") is None
    with pytest.raises(LaunchError, match="RANK is not set, although this is a test"):
        required_number({"RANK": text}, "RANK", "this is a test")


@pytest.mark.parametrize("text", ["-1", "+1", "1.0", "1e3", "0x10", "1_000", "٣", "²", "one", "1 2", "9" * 5000])
def test_other_text_is_refused_by_name(text: str) -> None:
    with pytest.raises(LaunchError, match=r"RANK='.*' is not a whole number"):
        whole_number({"RANK": text}, "RANK")


def test_the_first_variable_that_is_set_counts() -> None:
    assert first_number({"A": "", "B": "2", "C": "3"}, ("A", "B", "C")) == 2
    assert first_number({}, ("A", "B")) is None


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.4", "10.0.0.4"),
        ("10.0.0.4:6000", "10.0.0.4"),
        (" node-0:9500 ", "node-0"),
        ("[fd00::4]:6000", "fd00::4"),
        ("fd00::4", "fd00::4"),
        ("::1", "::1"),
        ("", ""),
    ],
)
def test_the_host_of_an_address(address: str, host: str) -> None:
    assert host_of(address) == host


@given(st.from_regex(r"[a-z0-9.-]{1,30}", fullmatch=True), st.integers(0, 65535))
def test_a_port_is_cut_off_and_nothing_else(host: str, port: int) -> None:
    assert host_of(f"{host}:{port}") == host_of(host) == host


@pytest.mark.parametrize("address", ["localhost", "LOCALHOST", "127.0.0.1", "::1", "0.0.0.0", " localhost "])
def test_addresses_that_say_this_machine(address: str) -> None:
    assert is_placeholder(address)


@pytest.mark.parametrize("address", ["", "10.0.0.4", "node-0", "127.0.1.2", "localhost-0"])
def test_addresses_that_do_not(address: str) -> None:
    assert not is_placeholder(address)


@pytest.mark.parametrize(
    ("environ", "trusted", "port"),
    [
        ({}, True, 6105),
        ({"MASTER_PORT": ""}, True, 6105),
        ({"MASTER_PORT": "9500"}, True, 9500),
        ({"MASTER_PORT": "9500"}, False, 6105),
        ({"MASTER_PORT": "6000"}, True, 6105),
    ],
)
def test_the_port(environ: dict[str, str], trusted: bool, port: int) -> None:
    assert main_port(environ, trusted=trusted) == port


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http"])
def test_no_port(port: str) -> None:
    with pytest.raises(LaunchError, match="MASTER_PORT"):
        main_port({"MASTER_PORT": port}, trusted=True)


def test_an_error_shows_what_was_seen() -> None:
    assert describe({"RANK": "3", "TOKEN": "x"}, ["RANK", "WORLD_SIZE"]) == "RANK='3', WORLD_SIZE is not set"


@pytest.mark.parametrize(
    ("script", "found"),
    [
        pytest.param("", "3 of 8", id="untouched"),
        pytest.param("del os.environ['WORLD_SIZE']", "3 of 8", id="Lightning's teardown"),
        pytest.param("os.environ['WORLD_SIZE'] = '16'", "3 of 16", id="a script's own value is kept"),
        pytest.param("del os.environ['WORLD_SIZE']; os.environ['RANK'] = '0'", "0 of None", id="other ranks by now"),
        pytest.param("del os.environ['WORLD_SIZE'], os.environ['RANK']", "None of None", id="both taken out"),
    ],
)
def test_a_world_size_that_lightning_deleted_is_found_again(script: str, found: str) -> None:
    code = (
        f"import os\n{script}\nfrom azureml_strategy.cluster.environ import own_environ\n"
        "environ = own_environ()\nprint(environ.get('RANK'), 'of', environ.get('WORLD_SIZE'))"
    )
    environ = os.environ | {"RANK": "3", "WORLD_SIZE": "8"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, None),
        ({"AZUREML_NODE_COUNT": "3"}, 3),
        ({"NODE_COUNT": "2"}, 2),
        ({"AZUREML_NODE_COUNT": "3", "NODE_COUNT": "2", "AZ_BATCH_HOST_LIST": "a"}, 3),
        ({"AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5,"}, 2),
        ({"AZ_BATCH_NODE_LIST": "node-0;node-1"}, 2),
        ({"AZ_BATCH_HOST_LIST": "", "AZ_BATCH_NODE_LIST": "node-0"}, 1),
        ({"AMLARC_NUM_WORKER": "4"}, 4),
        ({"VC_WORKER_NUM": "4"}, 4),
        ({"AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5", "AMLARC_NUM_WORKER": "4"}, 2),
    ],
)
def test_the_node_count(environ: dict[str, str], count: int | None) -> None:
    assert node_count(environ) == count


def test_no_nodes_is_refused() -> None:
    with pytest.raises(LaunchError, match="AZUREML_NODE_COUNT='0'"):
        node_count({"AZUREML_NODE_COUNT": "0"})


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, None),
        ({"NODE_RANK": "0", "AZUREML_CR_NODE_RANK": "1"}, 0),
        ({"AZUREML_CR_NODE_RANK": "1"}, 1),
        ({"VK_TASK_INDEX": "2"}, 2),
        ({"VC_TASK_INDEX": "3"}, 3),
        ({"OMPI_COMM_WORLD_NODE_RANK": "3", "GROUP_RANK": "3"}, None),
    ],
)
def test_the_declared_node_rank(environ: dict[str, str], rank: int | None) -> None:
    assert declared_node_rank(environ) == rank


@pytest.mark.parametrize(
    ("environ", "nodes", "address"),
    [
        ({}, 1, "127.0.0.1"),
        ({"AZ_BATCHAI_MPI_MASTER_NODE": "localhost"}, 1, "localhost"),
        ({"MASTER_ADDR": "localhost", "AZ_BATCHAI_JOB_MASTER_NODE_IP": "10.0.0.4"}, 1, "10.0.0.4"),
        ({"MASTER_ADDR": "node-0", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, 2, "node-0"),
        ({"MASTER_ADDR": "127.0.0.1", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, 2, "10.0.0.4"),
        ({"MASTER_ADDR": "", "MASTER_IP": "10.0.0.4"}, 2, "10.0.0.4"),
        ({"VC_WORKER_HOSTS": "worker-0.job,worker-1.job"}, 2, "worker-0.job"),
    ],
)
def test_the_main_address(environ: dict[str, str], nodes: int, address: str) -> None:
    assert main_address(environ, nodes, given_by_platform=True) == address


def test_several_nodes_without_an_address_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"MASTER_ADDR='localhost'.*Set MASTER_ADDR to the address of node 0"):
        main_address({"MASTER_ADDR": "localhost"}, 2)


@pytest.mark.parametrize("name", ["AZUREML_RUN_ID", "AZUREML_EXPERIMENT_ID", "AZ_BATCHAI_X", "AMLARC_X"])
def test_azure_ml_is_recognised(name: str) -> None:
    assert in_azure_ml({name: "x"})


@pytest.mark.parametrize("environ", [{}, {"AZUREML_RUN_ID": ""}, {"AZ_BATCH_JOB_ID": "x"}, {"AZURE_ML": "x"}])
def test_other_places_are_not_azure_ml(environ: dict[str, str]) -> None:
    assert not in_azure_ml(environ)


def test_azure_batch_comes_first_where_the_platform_gives_no_address() -> None:
    """Under MPI a script wrote MASTER_ADDR, and perhaps each node its own."""
    environ = {"MASTER_ADDR": "10.0.0.5", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}
    assert main_address(environ, 2) == "10.0.0.4"
    assert main_address({"MASTER_ADDR": "10.0.0.5"}, 2) == "10.0.0.5"


class _Changed(dict[str, str]):
    """Variables of which another thread removes one while they are read."""

    def __iter__(self) -> Iterator[str]:
        return iter(["KEPT", "REMOVED"])

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


def test_a_copy_of_variables_that_another_thread_changes() -> None:
    changed = _Changed(KEPT="1")
    with pytest.raises(KeyError):
        dict(changed.items())
    assert copied(changed) == {"KEPT": "1"}
    assert copied(os.environ) == dict(os.environ)


def test_no_file_copies_this_processs_variables_otherwise() -> None:
    files = Path(azureml_strategy.__file__).parent.rglob("*.py")
    otherwise = re.compile(r"environ\.items\(\)|environ\.copy\(\)|dict\(os\.environ|\*\*os\.environ")
    assert [each for file in files for each in otherwise.findall(file.read_text(encoding="utf-8"))] == []
