"""Reads numbers, nodes and addresses from the environment variables of a job, with errors that name the variable,
and finds variables of this package that nothing reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from azureml_strategy.cluster.job import read_price

# With the value `off`, each disables one of the callbacks that every Trainer of a job gets. Switch the guard off for
# Trainers that are meant to train alone in each process, as in a parallel job.
GUARD_SWITCH = "AZUREML_STRATEGY_GUARD"
HANG_WATCH_SWITCH = "AZUREML_STRATEGY_HANG_WATCH"
TERMINATION_SWITCH = "AZUREML_STRATEGY_TERMINATION"
NETWORK_RECORD_SWITCH = "AZUREML_STRATEGY_NETWORK_RECORD"
DATA_CHECK_SWITCH = "AZUREML_STRATEGY_DATA_CHECK"
REPLICA_CHECK_SWITCH = "AZUREML_STRATEGY_REPLICA_CHECK"
# Its value is that of `resume`, such as `auto`. Unless it is set, we add no checkpoints.
CHECKPOINT_SWITCH = "AZUREML_STRATEGY_CHECKPOINT"
CLI_CONFIG_SWITCH = "AZUREML_STRATEGY_CLI_CONFIG"
TRACKING_SWITCH = "AZUREML_STRATEGY_TRACKING"
THROUGHPUT_SWITCH = "AZUREML_STRATEGY_THROUGHPUT"
COMPILE_CACHE_SWITCH = "AZUREML_STRATEGY_COMPILE_CACHE"
# Keeps Lightning's own "ddp", which is otherwise our strategy in a job. It belongs to no callback.
LAUNCH_SWITCH = "AZUREML_STRATEGY_LAUNCH"
# Leaves out the page of a recipe's run.
PAGE_SWITCH = "AZUREML_STRATEGY_PAGE"
# Disables all of these.
CALLBACKS_SWITCH = "AZUREML_STRATEGY_CALLBACKS"
SWITCHES = (
    *(GUARD_SWITCH, HANG_WATCH_SWITCH, TERMINATION_SWITCH, NETWORK_RECORD_SWITCH, DATA_CHECK_SWITCH),
    *(REPLICA_CHECK_SWITCH, CHECKPOINT_SWITCH, CLI_CONFIG_SWITCH, TRACKING_SWITCH, THROUGHPUT_SWITCH, LAUNCH_SWITCH),
    *(PAGE_SWITCH, COMPILE_CACHE_SWITCH, CALLBACKS_SWITCH),
)

# Azure Batch itself uses this port on the master node (`AZ_BATCH_MASTER_NODE=10.0.0.4:6000`).
BATCH_PORT = 6000
# Azure ML's MASTER_PORT on AmlCompute, and the port in its own guides where it sets none.
DEFAULT_PORT = 6105
# Address to poll for Scheduled Events, on any machine, instead of Azure's own; `off` turns polling off.
EVENTS_VARIABLE = "AZUREML_STRATEGY_SCHEDULED_EVENTS"
# The variables of communication that a plan, not the user, has set in this process or its parent, as JSON.
PLANNED_VARIABLES = "AZUREML_STRATEGY_PLANNED"
# The file into which a process reports that pretends to be a rank: see `azureml_strategy.planning`.
PRETEND_VARIABLE = "AZUREML_STRATEGY_PRETEND"
# The rate that `submit` expects of the job, with the setting for which it was planned, as JSON.
EXPECTED_RATE_VARIABLE = "AZUREML_STRATEGY_EXPECTED_RATE"
_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")
_INITIAL_ENVIRON = "/proc/self/environ"
_PLACEHOLDERS = ("localhost", "localhost.localdomain", "ip6-localhost", "127.0.0.1", "127.0.1.1", "::1", "0.0.0.0")
# AmlCompute sets it, and `learn_launch` where no variable gives the node count.
NODE_COUNT = "AZUREML_NODE_COUNT"
_COUNTS = (NODE_COUNT, "NODE_COUNT")  # the second on the Singularity back end
_KUBERNETES_COUNTS = ("AMLARC_NUM_WORKER", "VC_WORKER_NUM")  # Azure Arc and AKS: one pod is one node
_INDICES = ("AZUREML_CR_NODE_RANK", "VK_TASK_INDEX", "VC_TASK_INDEX")
# In order of precedence. Some hold the address alone, others add Batch's port, which `host_of` removes.
_MASTERS = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE", "AZ_BATCHAI_JOB_MASTER_NODE_IP", "MASTER_IP")
NODE_VARIABLES = (*_COUNTS, "AZ_BATCH_HOST_LIST", "AZ_BATCH_NODE_LIST", *_KUBERNETES_COUNTS)
ADDRESS_VARIABLES = ("MASTER_ADDR", *_MASTERS)
# All that this module reads for a launch, and the prefixes of names whose presence shows a job.
VARIABLES = (
    *("AZUREML_RUN_ID", "AZUREML_EXPERIMENT_ID", "MASTER_PORT", "NODE_RANK", "VC_WORKER_HOSTS"),
    *(*NODE_VARIABLES, *ADDRESS_VARIABLES, *_INDICES),
)
JOB_PREFIXES = ("AZ_BATCHAI_", "AMLARC_")
_PREFIX = "AZUREML_STRATEGY_"
# Variables that other rooms read.
_OTHERS = ("RESUME", "LAUNCHER", "MAX_SAMPLES", "PRICE_PER_HOUR", "PRICE_CURRENCY", "PRICE_SOURCE", "PRICE_DATE")
_PRICE = f"{_PREFIX}PRICE_PER_HOUR"
_SET_FOR_YOU = (PLANNED_VARIABLES, PRETEND_VARIABLE, EXPECTED_RATE_VARIABLE)
KNOWN = (*SWITCHES, EVENTS_VARIABLE, *_SET_FOR_YOU, *(f"{_PREFIX}{each}" for each in _OTHERS))
# These take other words than `off`. The code that reads them warns of a wrong word.
_WITH_WORDS = (CHECKPOINT_SWITCH, HANG_WATCH_SWITCH)
_MEANS_ON = ("", "on", "1", "true", "yes")


class LaunchError(RuntimeError):
    """The environment or the Trainer contradicts how the job was launched.

    The message gives the variables and their values, why they cannot be right, and what to type instead.
    """


def switched_off(environ: Mapping[str, str], switch: str) -> bool:
    """Whether a callback's own switch is off, or the switch of all callbacks."""
    return any(environ.get(name, "").strip().lower() == "off" for name in (switch, CALLBACKS_SWITCH))


def describe(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """Return `NAME='value'` or `NAME is not set` for each name, joined for an error message."""
    return ", ".join(f"{name}={environ[name]!r}" if name in environ else f"{name} is not set" for name in names)


def copied(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of a process's variables.

    Unlike `dict(environ)`, it does not fail if another thread removes a variable meanwhile, as MLflow's does.
    """
    found = ((name, environ.get(name)) for name in list(environ))
    return {name: value for name, value in found if value is not None}


def own_environ() -> Mapping[str, str]:
    """Return this process's environment, repaired if Lightning has removed WORLD_SIZE but left RANK.

    Lightning's default environment deletes WORLD_SIZE at the end of each `fit`. For a second Trainer in the same
    script, this function restores the WORLD_SIZE that the process was started with, which Linux keeps. If the process
    was started without RANK, Lightning's DeepSpeed strategy wrote RANK, so this function drops it.
    """
    if "WORLD_SIZE" in os.environ or "RANK" not in os.environ or not os.path.exists(_INITIAL_ENVIRON):
        return os.environ
    initial = initial_environ()
    if "RANK" not in initial:
        return {name: value for name, value in copied(os.environ).items() if name != "RANK"}
    if "WORLD_SIZE" not in initial or initial["RANK"] != os.environ["RANK"]:
        return os.environ
    return {**copied(os.environ), "WORLD_SIZE": initial["WORLD_SIZE"]}


def initial_environ() -> dict[str, str]:
    """Return the environment that this process was started with, which Linux keeps; an empty one elsewhere."""
    if not os.path.exists(_INITIAL_ENVIRON):
        return {}
    with open(_INITIAL_ENVIRON, encoding="utf-8", errors="replace", newline="") as file:
        entries = file.read().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def whole_number(environ: Mapping[str, str], name: str) -> int | None:
    """Read a variable as a number of at least 0; None if it is not set or empty.

    Raises:
        LaunchError: its value is anything else.
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
    """Read a variable as a number of at least 0.

    Raises:
        LaunchError: it is missing or no such number. For the message, `why` names what makes the variable necessary.
    """
    value = whole_number(environ, name)
    if value is None:
        raise LaunchError(
            f"{name} is not set, although {why}: the set is incomplete and no rank "
            "can be trusted. Let one launcher set all of its variables, and remove those that you set yourself."
        )
    return value


def first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Read the first of the variables that is set, as a number; None if none is set."""
    numbers = (whole_number(environ, name) for name in names)
    return next((number for number in numbers if number is not None), None)


def is_placeholder(address: str) -> bool:
    """Whether the address means "this machine", so that it cannot be node 0's in a job of several nodes.

    Lightning writes 127.0.0.1 into MASTER_ADDR, and Azure ML writes `localhost` into AZ_BATCHAI_MPI_MASTER_NODE. Debian
    resolves a machine's own name to 127.0.1.1. The other addresses of 127.0.0.0/8 are no placeholders: the emulator
    gives one to each of its nodes.
    """
    return address.strip().lower() in _PLACEHOLDERS


def host_of(address: str) -> str:
    """Return the host of `host`, `host:port`, `[v6]:port` or a bare IPv6 address."""
    address = address.strip()
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address if address.count(":") > 1 else address.partition(":")[0]


def main_port(environ: Mapping[str, str], *, trusted: bool) -> int:
    """Return the rendezvous port on node 0; never 6000, which Azure Batch uses there.

    MASTER_PORT is `trusted` if it can come from the platform or the user. If MASTER_ADDR is 127.0.0.1, Lightning has
    drawn MASTER_PORT at random in each process.

    Raises:
        LaunchError: MASTER_PORT is not a TCP port.
    """
    port = whole_number(environ, "MASTER_PORT") if trusted else None
    if port is not None and not 0 < port < 65536:
        raise LaunchError(f"MASTER_PORT={port} is no TCP port. Remove it, or set one between 1 and 65535.")
    return DEFAULT_PORT if port in (None, BATCH_PORT) else port


def in_azure_ml(environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to an Azure ML job, on a managed cluster or on attached Kubernetes."""
    if environ.get("AZUREML_RUN_ID") or environ.get("AZUREML_EXPERIMENT_ID"):
        return True
    return any(name.startswith(JOB_PREFIXES) for name in environ)


def node_count(environ: Mapping[str, str]) -> int | None:
    """Return the number of nodes of the job; None if no variable gives it.

    Raises:
        LaunchError: a count is 0 or not a number.
    """
    count = first_number(environ, _COUNTS)
    if count is None:
        count = len(node_addresses(environ)) or first_number(environ, _KUBERNETES_COUNTS)
    if count == 0:
        raise LaunchError(f"The job has 0 nodes ({describe(environ, NODE_VARIABLES)}). Remove the wrong variable.")
    return count


def node_addresses(environ: Mapping[str, str]) -> list[str]:
    """Return the addresses or names of the job's nodes as Azure Batch lists them; empty if it lists none."""
    return _entries(environ, "AZ_BATCH_HOST_LIST", ",") or _entries(environ, "AZ_BATCH_NODE_LIST", ";")


def declared_node_rank(environ: Mapping[str, str]) -> int | None:
    """Return NODE_RANK, else this node's index from the common runtime or Kubernetes, else None."""
    node_rank = whole_number(environ, "NODE_RANK")
    return first_number(environ, _INDICES) if node_rank is None else node_rank


def main_address(environ: Mapping[str, str], num_nodes: int, *, given_by_platform: bool = False) -> str:
    """Return the host of global rank 0, without a port.

    Unless the launcher sets MASTER_ADDR (`given_by_platform`), a script or a library wrote it, possibly each node its
    own address. Then Azure Batch's variables take precedence.

    Raises:
        LaunchError: the job has several nodes, and no variable names the first one.
    """
    given = host_of(environ.get("MASTER_ADDR", ""))
    masters = [host_of(environ.get(name, "")) for name in _MASTERS]
    masters += _entries(environ, "VC_WORKER_HOSTS", ",")[:1]
    candidates = [given, *masters] if given_by_platform else [*masters, given]
    for address in candidates:
        if address and not is_placeholder(address):
            return address
    if num_nodes == 1:
        return next(filter(None, candidates), "127.0.0.1")
    raise LaunchError(
        f"The job has {num_nodes} nodes, but nothing names an address of the first one that the others can reach "
        f"({describe(environ, ADDRESS_VARIABLES)}). Set MASTER_ADDR to the address of node 0 on every node; "
        "a `distribution: {type: pytorch}` block in the job does it."
    )


def _entries(environ: Mapping[str, str], name: str, separator: str) -> list[str]:
    return [entry.strip() for entry in environ.get(name, "").split(separator) if entry.strip()]


def variables_without_effect(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable `AZUREML_STRATEGY_*` that is set and does nothing."""
    environ, found = copied(environ), []
    for name in sorted(name for name in environ if name.upper().startswith(_PREFIX)):
        value = environ[name]
        if name not in KNOWN:
            found.append(f"{name} is set, and nothing reads it.{_suggestion(name)}")
        elif name in SWITCHES and name not in _WITH_WORDS and value.strip().lower() not in (*_MEANS_ON, "off"):
            found.append(f"{name}={value!r} switches nothing off. Write {name}=off, or remove it.")
    if environ.get(_PRICE) and read_price(environ) is None:
        found.append(f"{_PRICE}={environ[_PRICE]!r} is no price, and no cost is told. Write a number such as 3.5.")
    return found


def _suggestion(name: str) -> str:
    from difflib import get_close_matches  # only here

    near = get_close_matches(name.upper(), KNOWN, n=1, cutoff=0.85)
    return f" Did you mean {near[0]}?" if near else " Remove it, or look the name up in the documentation."
