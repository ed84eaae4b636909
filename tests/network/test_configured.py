from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.network.conftest import Tree

from azureml_strategy.network.configured import PLANNED_VARIABLES, configured_settings

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
