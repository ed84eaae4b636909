"""Azure on this machine, for the real SDK client: Resource Manager, a workspace's data plane, Blob Storage, sign-in.

The client runs unchanged, in this process or in another: it reaches the service through HTTPS_PROXY and trusts it
through REQUESTS_CA_BUNDLE, as behind a company's proxy. Requests are recorded; faults are set with `fail` and `drop`.
"""

from tests.jobs.azure_service.exchange import Reply, Request
from tests.jobs.azure_service.service import GROUP, REGION, SUBSCRIPTION, WORKSPACE, AzureService

__all__ = ["GROUP", "REGION", "SUBSCRIPTION", "WORKSPACE", "AzureService", "Reply", "Request"]
