from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.cluster.errors import LaunchError, seen
from azureml_strategy.cluster.variables import (
    first_number,
    host_of,
    is_placeholder,
    main_port,
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
    assert seen({"RANK": "3", "TOKEN": "x"}, ["RANK", "WORLD_SIZE"]) == "RANK='3', WORLD_SIZE is not set"


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
        f"import os\n{script}\nfrom azureml_strategy.cluster.variables import own_environ\n"
        "environ = own_environ()\nprint(environ.get('RANK'), 'of', environ.get('WORLD_SIZE'))"
    )
    environ = os.environ | {"RANK": "3", "WORLD_SIZE": "8"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found
