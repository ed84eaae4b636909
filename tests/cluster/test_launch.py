"""Properties that hold for every launcher, shape and order of damage; single cases are in launchers/."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables
from azureml_strategy.cluster.environ import ADDRESS_VARIABLES, NODE_VARIABLES, LaunchError, in_azure_ml
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import _parse, detect_launch, local

RUN = EmulatedRun("quirky_plum", "resnet50", "1", "file:mlruns")
LAUNCHERS = ("pytorch", "mpi", "tensorflow", "ray", "torchrun", "deepspeed", "local")
OWN = {
    "pytorch": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "mpi": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "tensorflow": ("TF_CONFIG",),
    "ray": ("RAY_ADDRESS",),
    "torchrun": (
        *("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        *("GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ),
    "deepspeed": (
        *("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"),
        "MASTER_PORT",
    ),
    "local": (local.MARKER, *local.NUMBERS, "MASTER_ADDR"),
}
EVERY_NAME = sorted(
    {name for names in OWN.values() for name in names}
    | {*NODE_VARIABLES, *ADDRESS_VARIABLES, "AZUREML_CR_NODE_RANK", "VK_TASK_INDEX", "VC_WORKER_HOSTS"}
    | {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK"}
    | {"MV2_COMM_WORLD_LOCAL_RANK", "PMI_LOCAL_RANK", "VC_TASK_INDEX"}
)


def addresses(nodes: int) -> list[str]:
    return [f"10.0.0.{4 + node}" for node in range(nodes)]


@st.composite
def launches(draw: st.DrawFn, launchers: tuple[str, ...] = LAUNCHERS, port: int | None = None) -> Launch:
    launcher = draw(st.sampled_from(launchers))
    nodes, processes = draw(st.integers(1, 40)), 1 if launcher == "ray" else draw(st.integers(1, 16))
    node_rank, local_rank = draw(st.integers(0, nodes - 1)), draw(st.integers(0, processes - 1))
    return Launch(
        launcher=launcher,
        rank=node_rank * processes + local_rank,
        world_size=nodes * processes,
        local_rank=local_rank,
        local_world_size=processes,
        node_rank=node_rank,
        num_nodes=nodes,
        main_address=addresses(nodes)[0],
        main_port=port or draw(st.integers(1, 65535).filter(lambda number: number != 6000)),
    )


def environment_of(launch: Launch) -> dict[str, str]:
    """What a process of this launch sees, Azure ML's own variables included."""
    hosts, own = addresses(launch.num_nodes), launch.launcher in ("pytorch", "mpi", "tensorflow")
    distribution = launch.launcher if own else "none"
    base = azure_variables(launch, distribution, hosts, RUN, launch.main_port)
    if own:
        return base
    common = local.variables(launch)
    ranks = {name: common[name] for name in OWN["pytorch"] if name != "NODE_RANK"}
    return (
        base
        | {
            "ray": {"RAY_ADDRESS": f"{hosts[0]}:6379"},
            "torchrun": {
                **ranks,
                "TORCHELASTIC_RUN_ID": "none",
                "LOCAL_WORLD_SIZE": str(launch.local_world_size),
                "GROUP_RANK": str(launch.node_rank),
                "GROUP_WORLD_SIZE": str(launch.num_nodes),
            },
            "deepspeed": {
                **ranks,
                "CROSS_RANK": str(launch.node_rank),
                "CROSS_SIZE": str(launch.num_nodes),
                "LOCAL_SIZE": str(launch.local_world_size),
            },
            "local": {**common, local.MARKER: "local"},
        }[launch.launcher]
    )


def detect(environ: dict[str, str]) -> Launch | LaunchError | None:
    """The launch or its refusal; any other exception fails the test."""
    try:
        return detect_launch(environ)
    except LaunchError as error:
        return error


@given(launches())
def test_what_azure_writes_is_read_back(launch: Launch) -> None:
    assert detect_launch(environment_of(launch)) == launch


@given(launches(port=6105), st.data())
def test_a_launcher_that_lost_variables_is_the_same_or_refused(launch: Launch, data: st.DataObject) -> None:
    environ = environment_of(launch)
    dropped = data.draw(st.sets(st.sampled_from(OWN[launch.launcher]), min_size=1))
    kept = {name: value for name, value in environ.items() if name not in dropped}
    found = detect(kept)
    if isinstance(found, LaunchError):
        assert "no launcher gave this process a rank" in str(found) or any(name in str(found) for name in dropped)
    elif found is None:  # one node, and too little is left to tell it from a job without a distribution block
        assert launch.num_nodes == 1
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", *OWN["mpi"]} & kept.keys()
    else:
        assert replace(found, launcher=launch.launcher) == launch


@given(launches(("pytorch", "mpi", "tensorflow", "torchrun", "deepspeed", "local"), port=6105), st.data())
def test_lost_facts_about_the_nodes_never_change_the_ranks(launch: Launch, data: st.DataObject) -> None:
    environ = environment_of(launch)
    dropped = data.draw(st.sets(st.sampled_from(sorted(name for name in environ if name.startswith("AZ_BATCH")))))
    dropped |= data.draw(st.sets(st.sampled_from(["AZUREML_NODE_COUNT", "AZUREML_CR_NODE_RANK"])))
    found = detect({name: value for name, value in environ.items() if name not in dropped})
    if isinstance(found, LaunchError):
        assert any(name in str(found) for name in dropped)
        return
    assert found is not None
    if launch.num_nodes == 1:  # this machine under any name will do
        found = replace(found, main_address=launch.main_address)
    assert found == launch


GARBAGE = st.one_of(
    st.text(max_size=8),
    st.integers(-2, 70000).map(str),
    st.sampled_from(
        ["", " ", "0", "-1", "1.0", "٣", "0x1", "9" * 5000, "localhost", "127.0.0.1", "[::1]:6000", ":", ";"]
    ),
    st.recursive(
        st.none() | st.integers(-1, 3) | st.text(max_size=3) | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from(["cluster", "task", "worker", "type", "index"]), inner, max_size=3)
        ),
        max_leaves=6,
    ).map(json.dumps),
)


@given(launches(), st.dictionaries(st.sampled_from(EVERY_NAME), GARBAGE, min_size=1, max_size=5))
def test_garbage_gives_a_sound_launch_or_a_launch_error(launch: Launch, garbage: dict[str, str]) -> None:
    assert_sound(detect(environment_of(launch) | garbage))


@given(st.dictionaries(st.sampled_from([*EVERY_NAME, "AZUREML_RUN_ID"]), GARBAGE, max_size=8))
def test_garbage_alone_gives_a_sound_launch_or_a_launch_error(garbage: dict[str, str]) -> None:
    assert_sound(detect(garbage))


def assert_sound(launch: Launch | LaunchError | None) -> None:
    if not isinstance(launch, Launch):
        return
    assert launch.world_size == launch.num_nodes * launch.local_world_size
    assert launch.rank == launch.node_rank * launch.local_world_size + launch.local_rank
    assert 0 <= launch.rank < launch.world_size
    assert 0 <= launch.local_rank < launch.local_world_size
    assert launch.main_address
    assert 0 < launch.main_port < 65536


@given(launches(), st.integers(1, 16), st.data())
def test_local_processes_extend_each_node_by_itself(launch: Launch, processes: int, data: st.DataObject) -> None:
    local_rank = data.draw(st.integers(0, processes - 1))
    extended = launch.with_local_processes(processes, local_rank)
    assert_sound(extended)
    assert (extended.node_rank, extended.num_nodes) == (launch.node_rank, launch.num_nodes)
    assert (extended.local_rank, extended.local_world_size) == (local_rank, processes)


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_rank_of_a_job_is_given_once(nodes: int, processes: int) -> None:
    on_nodes = [Launch("mpi", node, nodes, 0, 1, node, nodes, "10.0.0.4", 6105) for node in range(nodes)]
    ranks = [launch.with_local_processes(processes, i).rank for launch in on_nodes for i in range(processes)]
    assert ranks == list(range(nodes * processes))


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("world_size", 9, "world_size must be"),
        ("num_nodes", 0, "world_size must be"),
        ("local_rank", 4, "local_rank must be below"),
        ("local_rank", -1, "local_rank must be below"),
        ("node_rank", 2, "node_rank must be below"),
        ("rank", 4, "rank must be"),
        ("main_address", "", "MASTER_ADDR"),
        ("main_port", 0, "MASTER_PORT"),
        ("main_port", 65536, "MASTER_PORT"),
    ],
)
def test_a_launch_that_contradicts_itself_cannot_be_made(field: str, value: int | str, complaint: str) -> None:
    launch = Launch("pytorch", 5, 8, 1, 4, 1, 2, "10.0.0.4", 6105)
    with pytest.raises(LaunchError, match=complaint) as error:
        replace(launch, **{field: value})  # type: ignore[arg-type]
    assert f"{field}={value}" in str(error.value)


def test_a_launch_cannot_be_changed() -> None:
    launch = Launch("pytorch", 5, 8, 1, 4, 1, 2, "10.0.0.4", 6105)
    with pytest.raises(FrozenInstanceError):
        launch.rank = 0  # type: ignore[misc]


def test_this_process_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect_launch() is None
    launch = Launch("pytorch", 5, 8, 1, 4, 1, 2, "10.0.0.4", 6105)
    for name, value in environment_of(launch).items():
        monkeypatch.setenv(name, value)
    assert detect_launch() == launch


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[tuple[str, str]]]:
    """The sets of variables that were parsed, not read only."""
    _parse.cache_clear()
    parsed: list[frozenset[tuple[str, str]]] = []

    def note(environ: Mapping[str, str]) -> bool:
        parsed.append(frozenset(environ.items()))
        return in_azure_ml(environ)

    monkeypatch.setattr("azureml_strategy.cluster.launchers.in_azure_ml", note)
    return parsed


def test_the_same_variables_are_parsed_once(
    monkeypatch: pytest.MonkeyPatch, parses: list[frozenset[tuple[str, str]]]
) -> None:
    for name, value in environment_of(Launch("pytorch", 5, 8, 1, 4, 1, 2, "10.0.0.4", 6105)).items():
        monkeypatch.setenv(name, value)
    first = detect_launch()
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("AZUREML_RUN_TOKEN", "secret")
    assert detect_launch() is first
    assert len(parses) == 1
    assert "AZUREML_RUN_TOKEN" not in dict(parses[0]), "no secret is kept"


def test_a_stock_trainer_that_removes_the_world_size_changes_no_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parses: list[frozenset[tuple[str, str]]]
) -> None:
    environ = environment_of(Launch("pytorch", 5, 8, 1, 4, 1, 2, "10.0.0.4", 6105))
    (tmp_path / "environ").write_text("\0".join(f"{name}={value}" for name, value in environ.items()))
    monkeypatch.setattr("azureml_strategy.cluster.environ._INITIAL_ENVIRON", str(tmp_path / "environ"))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    first = detect_launch()
    monkeypatch.delenv("WORLD_SIZE")
    assert first is not None
    assert detect_launch() is first
    assert len(parses) == 1


@pytest.mark.parametrize("name", EVERY_NAME)
def test_any_variable_of_a_launcher_that_changes_is_noticed(
    monkeypatch: pytest.MonkeyPatch, parses: list[frozenset[tuple[str, str]]], name: str
) -> None:
    monkeypatch.setattr("azureml_strategy.cluster.environ._INITIAL_ENVIRON", "/nonexistent")
    monkeypatch.setenv("AZUREML_RUN_ID", "quirky_plum")
    for value in ("0", "1"):
        monkeypatch.setenv(name, value)
        with suppress(LaunchError):
            detect_launch()
    monkeypatch.delenv(name)
    assert detect_launch() is None
    assert [dict(variables).get(name) for variables in parses] == ["0", "1", None]


def test_a_launch_changes_when_a_strategy_has_started_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Launch("pytorch", 1, 2, 0, 1, 1, 2, "10.0.0.4", 6105)
    for name, value in environment_of(node).items():
        monkeypatch.setenv(name, value)
    assert detect_launch() == node
    for local_rank in (0, 1):
        place = node.with_local_processes(2, local_rank)
        with monkeypatch.context() as patched:
            for name, value in local.variables(place).items():
                patched.setenv(name, value)
            assert detect_launch() == place
    assert detect_launch() == node


def test_a_refusal_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZUREML_RUN_ID", "quirky_plum")
    monkeypatch.setenv("AZUREML_NODE_COUNT", "2")
    for _ in range(2):
        with pytest.raises(LaunchError, match="no launcher gave this process a rank"):
            detect_launch()
