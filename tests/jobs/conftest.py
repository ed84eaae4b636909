"""The loopback Azure for the tests of this folder."""

from tests.jobs.azure_service.fixture import azure_certificate, azure_service

__all__ = ["azure_certificate", "azure_service"]
