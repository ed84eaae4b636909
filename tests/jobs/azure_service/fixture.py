"""The fixture; a folder's conftest.py imports it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.jobs.azure_service.certificate import write_certificate
from tests.jobs.azure_service.login import ENVIRONMENT
from tests.jobs.azure_service.proxy import Proxy
from tests.jobs.azure_service.service import GROUP, SUBSCRIPTION, WORKSPACE, AzureService

# Variables of the machine that would lead past the service.
_OTHERS = ("NO_PROXY", "no_proxy", "https_proxy", "http_proxy", "ALL_PROXY", "all_proxy", "CURL_CA_BUNDLE")


@pytest.fixture(scope="session")
def azure_certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def azure_service(
    azure_certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[AzureService]:
    """A service with an empty workspace; this process's variables lead there, sign in, and name the workspace."""
    service = AzureService()
    with Proxy(service.answer, *azure_certificate) as proxy:
        service.environment = {
            "HTTPS_PROXY": proxy.url,
            "HTTP_PROXY": proxy.url,
            "REQUESTS_CA_BUNDLE": str(azure_certificate[0]),
            "AZURE_CONFIG_DIR": str(tmp_path / "azure"),  # not the az command's settings of this machine
            "AZUREML_CURRENT_CLOUD": "AzureCloud",  # azure-ai-ml sets it
            "AZUREML_RUN_POLLING_INTERVAL_MIN": "0",  # seconds between two looks at a running job, at first
            "AZUREML_ARM_SUBSCRIPTION": SUBSCRIPTION,
            "AZUREML_ARM_RESOURCEGROUP": GROUP,
            "AZUREML_ARM_WORKSPACE_NAME": WORKSPACE,
            **ENVIRONMENT,
        }
        for name in _OTHERS:
            monkeypatch.delenv(name, raising=False)
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        _wait_less(monkeypatch)
        yield service


def _wait_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the client's own pauses: the service here is never slow."""
    from azure.ai.ml.constants._common import LROConfigurations
    from azure.ai.ml.operations._run_history_constants import RunHistoryConstants

    monkeypatch.setattr(LROConfigurations, "SLEEP_TIME", 0.01)
    monkeypatch.setattr(RunHistoryConstants, "_WAIT_COMPLETION_POLLING_INTERVAL_MIN", 0)
