"""Advises what to try next after an error of Azure.

The rules know the codes of Azure Resource Manager ("Troubleshoot common Azure deployment errors"), of Azure Batch, on
which AmlCompute runs, of Azure ML and of Blob Storage. Azure ML gives some refusals only the code "UserError"; the
rules recognise those by their message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """The known facts of an error.

    Attributes:
        code: the service's name of the error, or the exception's name if there was no answer.
        status: HTTP status, or None.
        message: message of the error.
        url: address of the request; empty if unknown.
    """

    code: str
    status: int | None
    message: str
    url: str


@dataclass(frozen=True)
class _Rule:
    """An advice and its conditions: one of `code`, `message` and `status` must match, and `url` too if it is given."""

    advice: str
    code: str | None = None
    message: str | None = None
    status: int | None = None
    url: str | None = None

    def fits(self, failure: Failure) -> bool:
        """Whether the rule applies to the failure."""
        fits = (
            (self.code is not None and re.search(self.code, failure.code, re.I))
            or (self.message is not None and re.search(self.message, failure.message, re.I))
            or (self.status is not None and self.status == failure.status)
        )
        return bool(fits) and (self.url is None or re.search(self.url, failure.url, re.I) is not None)


def advice_for(failure: Failure) -> str:
    """What to try next, in one or two sentences. If no rule applies, they say how to learn more."""
    return next((rule.advice for rule in _RULES if rule.fits(failure)), _UNKNOWN)


_UNKNOWN = "Look at the resource in https://portal.azure.com under Activity log, which has the whole error."
_RULES = (  # the first rule that fits is used, so precise rules stand before general ones
    _Rule(
        code=r"Quota",
        message=r"\bquota\b",
        url=r"/onlineEndpoints/",
        advice="Ask for more of this VM family in Azure ML Studio under Quota, or take another --instance-type or "
        "fewer by --instance-count. For its updates, an online endpoint needs a quota of 1.2 times its machines.",
    ),
    _Rule(
        code=r"Quota",
        message=r"\bquota\b",
        advice="Ask for more of this VM family in Azure ML Studio under Quota, take fewer nodes or another size, or "
        "--tier low_priority (cluster.tier=low_priority), whose quota is its own.",
    ),
    _Rule(
        code=r"AllocationFailed|SkuNotAvailable|OverconstrainedAllocation|NotEnoughCapacity",
        message=r"insufficient capacity|not enough capacity",
        advice="The region has none free now: wait, take fewer nodes, another size, or a workspace elsewhere.",
    ),
    _Rule(
        code=r"LocationNotAvailable|NotAvailableInRegion|NotAvailableForLocation|InvalidVMSize|VmSizeNotSupported"
        r"|UnsupportedVMSize|NoRegisteredProviderFound|InvalidLocation",
        message=r"not (?:available|supported|offered) in (?:the )?(?:region|location)|VM size .*not supported",
        advice="`az vm list-skus --location REGION --resource-type virtualMachines --all -o table` lists what a region "
        "has; take another size, or a workspace in another region.",
    ),
    _Rule(
        code=r"RequestDisallowedByPolicy",
        advice="A policy of the subscription forbids this. Its name is in the message: what it asks for is often "
        "--no-public-ip, a subnet, a tag or another region; its owner can exempt you.",
    ),
    _Rule(
        code=r"CredentialUnavailable|ClientAuthentication|AuthenticationFailed|ExpiredAuthenticationToken"
        r"|InvalidAuthenticationToken",
        status=401,
        advice="Sign in with `az login` (`az login --identity` on Azure), or set AZURE_TENANT_ID, AZURE_CLIENT_ID and "
        "AZURE_CLIENT_SECRET.",
    ),
    _Rule(
        url=r"\.(?:blob|dfs)\.",
        status=403,
        advice="Ask for the role Storage Blob Data Contributor on the storage account. If you have it, the account's "
        "firewall keeps this machine out: work from the workspace's network.",
    ),
    _Rule(
        status=403,
        code=r"AuthorizationFailed|Forbidden",
        advice="Ask an owner of the resource group for a role: AzureML Data Scientist for jobs and data, AzureML "
        "Compute Operator for clusters, Contributor for workspaces; then sign in again.",
    ),
    _Rule(
        code=r"AnotherOperationInProgress|OperationInProgress",
        message=r"another operation|operation (?:is )?in progress",
        advice="Something is being done with it already. Wait until that is over, and repeat the command.",
    ),
    _Rule(
        code=r"AlreadyExists|AlreadyInUse|NameUnavailable|AccountNameInvalid|Conflict|SoftDeleted",
        message=r"already exists|already (?:in use|taken)|cannot be changed",
        status=409,
        advice="The name is taken. Give another one, or see what has it (`azureml-strategy jobs show`, "
        "`cluster show`, `workspace show`, `data show`).",
    ),
    _Rule(
        code=r"SubscriptionNotFound|InvalidSubscriptionId",
        advice="Look the subscription's id up with `az account list -o table`, and sign in to its tenant "
        "(`az login --tenant ID`).",
    ),
    _Rule(
        code=r"ResourceGroupNotFound",
        advice="Make it with `az group create --name NAME --location REGION`, or type --resource-group.",
    ),
    _Rule(
        url=r"/computes/",
        status=404,
        message=r"compute .*(?:not found|does not exist)",
        advice="There is no such cluster in the workspace. Make it with `azureml-strategy cluster create`, or name "
        "another (cluster.compute=NAME).",
    ),
    _Rule(
        message=r"compute .*(?:not found|does not exist)|unknown compute target",
        code=r"ComputeNotFound",
        advice="Make the cluster with `azureml-strategy cluster create`, or name another (cluster.compute=NAME).",
    ),
    _Rule(
        url=r"/workspaces/[^/?]+(?:\?|$)",
        status=404,
        advice="Make it with `azureml-strategy workspace create`, or check --workspace and --resource-group.",
    ),
    _Rule(url=r"/jobs/|/runs/", status=404, advice="`azureml-strategy jobs list` shows the jobs there are."),
    _Rule(
        url=r"/(?:data|datastores)/",
        status=404,
        advice="`azureml-strategy data show` lists the data assets and datastores there are.",
    ),
    _Rule(
        status=404,
        message=r"not found|does not exist",
        advice="Check its name and version, and that it is in this workspace.",
    ),
    _Rule(
        status=429,
        code=r"TooManyRequests|Throttl",
        advice="The service was asked too often, and all retries were in vain: wait some minutes, and submit fewer "
        "jobs at a time.",
    ),
    _Rule(
        code=r"UnreadableAnswer",
        advice="Something on the way may have answered in its place, as a proxy or a sign-in page does, or cut the "
        "answer short: check the network and HTTPS_PROXY, and look before you repeat it.",
    ),
    _Rule(
        code=r"ServiceRequest",
        advice="No connection: check the network, HTTPS_PROXY, and for a private workspace that this machine is in its "
        "network.",
    ),
    _Rule(
        code=r"ServiceResponse|IncompleteRead",
        advice="The connection broke, and the request may have been carried out: look before you repeat it.",
    ),
    *(
        _Rule(
            status=status,
            advice="Azure itself failed, also when asked again: try later, and see https://status.azure.com.",
        )
        for status in (500, 502, 503, 504)
    ),
    _Rule(
        code=r"Validation|InvalidParameter|InvalidRequest",
        status=400,
        advice="Correct what it names; --dry-run shows what would be sent.",
    ),
    _Rule(code=r"Exception$|Error$", advice="Correct what it names; --dry-run shows what would be sent."),
)
