"""Which workspace is meant: what was typed, a job's variables, config.json, the user's variables, az's defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from azureml_strategy.jobs.client import WorkspaceSettings, find_workspace
from azureml_strategy.jobs.service_errors import JobError

_JOB = {
    "AZUREML_ARM_SUBSCRIPTION": "s-job",
    "AZUREML_ARM_RESOURCEGROUP": "g-job",
    "AZUREML_ARM_WORKSPACE_NAME": "w-job",
}
_USER = {"AZURE_SUBSCRIPTION_ID": "s-user", "AZURE_RESOURCE_GROUP": "g-user", "AZURE_ML_WORKSPACE": "w-user"}


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """No settings of the az command."""
    return {"AZURE_CONFIG_DIR": str(tmp_path / "none")}


def _config(folder: Path, **content: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))


def _az(folder: Path, defaults: str = "", subscriptions: object = ()) -> dict[str, str]:
    folder.mkdir()
    (folder / "config").write_text(f"[defaults]\n{defaults}")
    # The az command writes a byte order mark.
    (folder / "azureProfile.json").write_text(json.dumps({"subscriptions": subscriptions}), encoding="utf-8-sig")
    return {"AZURE_CONFIG_DIR": str(folder)}


def test_what_is_typed_comes_first(nowhere: dict[str, str], tmp_path: Path) -> None:
    asked = WorkspaceSettings("s", "g", "w")
    assert find_workspace(asked, {**nowhere, **_JOB, **_USER}, tmp_path) == asked
    found = find_workspace(WorkspaceSettings(name="other"), {**nowhere, **_USER}, tmp_path)
    assert found == WorkspaceSettings("s-user", "g-user", "other")


def test_a_job_s_own_workspace_comes_before_a_file_and_a_file_before_the_user_s_variables(
    nowhere: dict[str, str], tmp_path: Path
) -> None:
    _config(tmp_path, subscription_id="s-file", resource_group="g-file", workspace_name="w-file")
    assert find_workspace(WorkspaceSettings(), {**nowhere, **_JOB, **_USER}, tmp_path).name == "w-job"
    found = find_workspace(WorkspaceSettings(), {**nowhere, **_USER}, tmp_path)
    assert found == WorkspaceSettings("s-file", "g-file", "w-file")


@pytest.mark.parametrize("place", [".", ".azureml", "aml_config"])
def test_the_file_may_lie_where_azure_s_own_tools_put_it(nowhere: dict[str, str], tmp_path: Path, place: str) -> None:
    _config(tmp_path / place, subscription_id="s", resource_group="g", workspace_name="w")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert find_workspace(WorkspaceSettings(), nowhere, below) == WorkspaceSettings("s", "g", "w")


def test_a_workspace_is_not_looked_for_in_another_one_s_group(nowhere: dict[str, str], tmp_path: Path) -> None:
    environ = {**nowhere, "AZUREML_ARM_RESOURCEGROUP": "g-other", **_USER}
    assert find_workspace(WorkspaceSettings(), environ, tmp_path) == WorkspaceSettings("s-user", "g-user", "w-user")


@pytest.mark.parametrize("contradiction", ["resource_group", "workspace_name", "subscription_id"])
def test_what_a_workspace_lacks_does_not_come_from_another_one(
    nowhere: dict[str, str], tmp_path: Path, contradiction: str
) -> None:
    user = dict(zip(("subscription_id", "resource_group", "workspace_name"), _USER.values(), strict=True))
    lacking = "resource_group" if contradiction == "subscription_id" else "subscription_id"
    _config(tmp_path, **{**user, contradiction: "of-file", lacking: None})
    with pytest.raises(JobError, match=f"its {lacking.replace('_id', '').replace('_', ' ')} could not be found"):
        find_workspace(WorkspaceSettings(), {**nowhere, **_USER}, tmp_path)
    _config(tmp_path, **{**user, lacking: None})
    assert find_workspace(WorkspaceSettings(), {**nowhere, **_USER}, tmp_path).name == "w-user"


def test_az_s_subscription_goes_with_a_workspace_that_is_not_az_s_default(tmp_path: Path) -> None:
    environ = _az(tmp_path / "az", "group = g-az\nworkspace = w-az\n", [{"id": "s-az", "isDefault": True}])
    _config(tmp_path, resource_group="g-file", workspace_name="w-file")
    assert find_workspace(WorkspaceSettings(), environ, tmp_path) == WorkspaceSettings("s-az", "g-file", "w-file")


def test_the_defaults_of_az(tmp_path: Path) -> None:
    subscriptions = [{"id": "s-no", "isDefault": False}, {"id": "s-az", "isDefault": True}]
    environ = _az(tmp_path / "az", "group = g-az\nworkspace = w-az\n", subscriptions)
    assert find_workspace(WorkspaceSettings(), environ, tmp_path) == WorkspaceSettings("s-az", "g-az", "w-az")
    environ["AZURE_DEFAULTS_GROUP"] = "g-now"
    assert find_workspace(WorkspaceSettings(), environ, tmp_path).resource_group == "g-now"


def test_az_s_subscription_completes_what_is_typed(tmp_path: Path) -> None:
    environ = _az(tmp_path / "az", subscriptions=[{"id": "s-az", "isDefault": True}])
    found = find_workspace(WorkspaceSettings(resource_group="g", name="w"), environ, tmp_path)
    assert found == WorkspaceSettings("s-az", "g", "w")


def test_what_is_missing_is_named(nowhere: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"its subscription and resource group could not be found.*--subscription"):
        find_workspace(WorkspaceSettings(name="w"), nowhere, tmp_path)


def test_a_broken_file_is_named(nowhere: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"workspace_name": "w",}')
    with pytest.raises(JobError, match=r"config\.json is no JSON document"):
        find_workspace(WorkspaceSettings(), nowhere, tmp_path)


@pytest.mark.parametrize("name", ["config", "azureProfile.json"])
def test_broken_settings_of_az_are_named(tmp_path: Path, name: str) -> None:
    environ = _az(tmp_path / "az")
    (tmp_path / "az" / name).write_text("{")
    with pytest.raises(JobError, match=r"az command's settings in \S+ cannot be read.*az login"):
        find_workspace(WorkspaceSettings(), environ, tmp_path)


def test_what_one_source_lacks_comes_from_the_next() -> None:
    found = WorkspaceSettings(name="typed").over(WorkspaceSettings("s", None, "recipe"))
    assert found == WorkspaceSettings("s", None, "typed")


@pytest.mark.parametrize("text", ["{", "[1]", '{"model_type": "gpt2"}', '["workspace_name"]'])
def test_a_config_json_of_something_else_is_passed_over(nowhere: dict[str, str], tmp_path: Path, text: str) -> None:
    _config(tmp_path, subscription_id="s", resource_group="g", workspace_name="w")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(text)
    assert find_workspace(WorkspaceSettings(), nowhere, tmp_path / "model").name == "w"
