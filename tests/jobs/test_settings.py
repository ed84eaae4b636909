from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.settings import ClusterSettings, InputSettings, JobSettings, read_section


def test_what_is_left_out_has_its_default_and_values_get_their_types() -> None:
    config = OmegaConf.create(
        {
            "cluster": {"num_nodes": "4", "vm_size": "${vars.size}"},
            "job": {"inputs": {"images": {"path": "azureml:a:1"}}, "tags": {"n": 3}, "timeout": 7},
            "vars": {"size": "Standard_ND96isr_H100_v5"},
        }
    )
    assert read_section(config, "cluster", ClusterSettings) == ClusterSettings("Standard_ND96isr_H100_v5", 4)
    job = read_section(config, "job", JobSettings)
    assert job == JobSettings(inputs={"images": InputSettings("azureml:a:1")}, tags={"n": "3"}, timeout=7)
    assert job.workspace.name is None


def test_what_azure_ml_puts_in_is_left_to_it() -> None:
    path = "azureml://datastores/a/paths/${{name}}"
    config = OmegaConf.create({"job": {"outputs": {"run": {"path": path.replace("$", r"\$")}}}})
    assert read_section(config, "job", JobSettings).outputs["run"].path == path


@pytest.mark.parametrize(
    ("section", "content", "words"),
    [
        ("job", {"experimant": "a"}, "sets job.experimant, .* Did you mean 'job.experiment'"),
        ("job", {"environment": {"imag": "a"}}, "'job.environment.image'"),
        ("job", {"inputs": {"a": {"pth": "a"}}}, "sets job.inputs.a.pth"),
        ("job", {"inputs": ["a"]}, "job cannot be used: Cannot merge"),
        ("job", 3, "section `job` is 3. Start from a shipped recipe"),
        ("cluster", None, "section `cluster` is None"),
        ("cluster", {"num_nodes": "two"}, "cluster.num_nodes cannot be used: Value 'two'"),
        ("cluster", {"tier": "${nowhere}"}, "cluster.tier cannot be used: Interpolation key 'nowhere' not found"),
    ],
)
def test_what_cannot_be(section: str, content: Any, words: str) -> None:
    kind: type = {"job": JobSettings, "cluster": ClusterSettings}[section]
    with pytest.raises(JobError, match=words):
        read_section(OmegaConf.create({section: content}), section, kind)
