"""Reading whole numbers and ports from an environment, with errors that name the variable."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from azureml_strategy.cluster.errors import LaunchError

# Azure Batch's own port on the master node (`AZ_BATCH_MASTER_NODE=10.0.0.4:6000`): it is taken.
BATCH_PORT = 6000
# What Azure ML gives as MASTER_PORT on AmlCompute, and what its own guides use where it gives none.
DEFAULT_PORT = 6105
# Where to ask for Azure's Scheduled Events instead of at Azure's own address, on any machine; `off` asks nobody.
EVENTS_VARIABLE = "AZUREML_STRATEGY_SCHEDULED_EVENTS"
_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")
_INITIAL_ENVIRON = Path("/proc/self/environ")
_PLACEHOLDERS = ("localhost", "localhost.localdomain", "ip6-localhost", "127.0.0.1", "127.0.1.1", "::1", "0.0.0.0")


def own_environ() -> Mapping[str, str]:
    """This process's environment, made whole where Lightning left half a set in it.

    Lightning's default environment deletes WORLD_SIZE at the end of each `fit`: a second Trainer in the same script
    gets back the one that the process was started with, which Linux keeps. Where it was started without RANK,
    Lightning's DeepSpeed strategy wrote that too, and it goes the same way.
    """
    if "WORLD_SIZE" in os.environ or "RANK" not in os.environ or not _INITIAL_ENVIRON.exists():
        return os.environ
    entries = _INITIAL_ENVIRON.read_bytes().decode(errors="replace").split("\0")
    initial = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    if "RANK" not in initial:
        return {name: value for name, value in os.environ.items() if name != "RANK"}
    if "WORLD_SIZE" not in initial or initial["RANK"] != os.environ["RANK"]:
        return os.environ
    return {**os.environ, "WORLD_SIZE": initial["WORLD_SIZE"]}


def whole_number(environ: Mapping[str, str], name: str) -> int | None:
    """The variable as a number of at least 0, or None where it is not set or empty.

    Raises:
        LaunchError: it is set to something else.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not _WHOLE_NUMBER.fullmatch(text):
        raise LaunchError(
            f"{name}={environ[name]!r} is not a whole number, so this process cannot know its place in the job. "
            f"Set it to a number of at least 0, or remove it so that the platform's own value is used."
        )
    return int(text)


def required_number(environ: Mapping[str, str], name: str, why: str) -> int:
    """The variable as a number of at least 0.

    Raises:
        LaunchError: it is missing; `why` says which variables make it necessary.
    """
    value = whole_number(environ, name)
    if value is None:
        raise LaunchError(
            f"{name} is not set, although {why}: the set is incomplete and no rank "
            "can be trusted. Let one launcher set all of its variables, and remove those that you set yourself."
        )
    return value


def first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The first of the variables that is set, as a number, or None."""
    for name in names:
        value = whole_number(environ, name)
        if value is not None:
            return value
    return None


def is_placeholder(address: str) -> bool:
    """Whether the address says "this machine" and so cannot be node 0's on a job of several nodes.

    Lightning writes 127.0.0.1 into MASTER_ADDR and Azure ML `localhost` into AZ_BATCHAI_MPI_MASTER_NODE; Debian
    gives a machine's own name 127.0.1.1. The other addresses of 127.0.0.0/8 are left alone: the emulator gives one
    to each of its nodes.
    """
    return address.strip().lower() in _PLACEHOLDERS


def host_of(address: str) -> str:
    """The host of `host`, `host:port`, `[v6]:port` or a bare IPv6 address."""
    address = address.strip()
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address if address.count(":") > 1 else address.partition(":")[0]


def main_port(environ: Mapping[str, str], *, trusted: bool) -> int:
    """The port of the rendezvous on node 0; never 6000, which Azure Batch holds there.

    Args:
        environ: the process's environment.
        trusted: whether MASTER_PORT can come from the platform or the user. Beside a MASTER_ADDR of 127.0.0.1
            it was drawn at random by Lightning, in each process for itself.

    Raises:
        LaunchError: MASTER_PORT is no port.
    """
    port = whole_number(environ, "MASTER_PORT") if trusted else None
    if port is not None and not 0 < port < 65536:
        raise LaunchError(f"MASTER_PORT={port} is no TCP port. Remove it, or set one between 1 and 65535.")
    return DEFAULT_PORT if port in (None, BATCH_PORT) else port
