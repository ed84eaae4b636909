"""workspace create|show: manages workspaces, which hold jobs, data and models."""

from __future__ import annotations

import argparse

from azureml_strategy.cli.verbs import (
    Verbs,
    add_azure_verb,
    add_create_options,
    add_group,
    add_workspace_options,
    client,
    from_options,
    make,
    print_text,
)

_CREATE = "Make a workspace, with a storage account, a key vault and Application Insights of its own."
_EPILOG = """\
examples:
  azureml-strategy workspace create training --region westeurope --resource-group vision
  azureml-strategy workspace create secret --region westeurope --hbi --network approved-outbound --no-public-access
"""


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    group = add_group(verbs, "workspace", "make or show a workspace")
    _add_create(group)
    show = add_azure_verb(group, "show", _show, "show the workspace", "Show the workspace that is used.")
    show.add_argument("--diagnose", action="store_true", help="let Azure ML examine its network, storage and key vault")
    add_workspace_options(show)


def _add_create(group: Verbs) -> None:
    create = add_azure_verb(group, "create", _create, "make a workspace", _CREATE, _EPILOG)
    create.add_argument("workspace", metavar="NAME", help="of the workspace")
    create.add_argument("--region", required=True, metavar="REGION", help="such as westeurope; clusters are made there")
    create.add_argument("--display-name", metavar="TEXT", help="for its page")
    create.add_argument("--description", metavar="TEXT", help="for its page")
    _add_protection(create)
    own = create.add_argument_group("resources of your own", "by default Azure ML makes them")
    own.add_argument("--storage-account", metavar="ID", help="resource id")
    own.add_argument("--container-registry", metavar="ID", help="resource id; default: made for the first image")
    own.add_argument("--application-insights", metavar="ID", help="resource id: where diagnostics go")
    own.add_argument("--build-cluster", metavar="NAME", help="cluster that builds images, if the registry is private")
    add_create_options(create)
    where = create.add_argument_group("where")
    where.add_argument("--subscription", metavar="ID", help="default: as for the other verbs")
    where.add_argument("--resource-group", metavar="NAME", help="an existing one; default: as for the other verbs")


def _add_protection(create: argparse.ArgumentParser) -> None:
    secure = create.add_argument_group("protection", "what is marked * cannot be changed later")
    secure.add_argument(
        "--hbi", action="store_true", help="* high business impact: encrypted local disks, less telemetry"
    )
    secure.add_argument("--key", metavar="URI", help="* your own key for encryption, in a key vault")
    secure.add_argument("--key-vault", metavar="ID", help="* resource id of the vault that has it")
    secure.add_argument(
        "--network",
        default="public",
        help="public (default); internet-outbound or approved-outbound put nodes into a network that Azure ML manages",
    )
    secure.add_argument(
        "--no-public-access", dest="public_access", action="store_false", help="answer private endpoints only"
    )
    secure.add_argument(
        "--identity-based-storage", action="store_true", help="reach storage by users' rights, not its key"
    )


def _create(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs.workspace import WorkspaceRequest, create_workspace, render_workspace

    request = from_options(WorkspaceRequest, options, name=options.workspace, high_business_impact=options.hbi)
    make(
        options,
        render_workspace(request),
        create_workspace,
        lambda made: f"{made.name}: made in {made.location}, resource group {made.resource_group}",
    )


def _show(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs.client import as_yaml
    from azureml_strategy.jobs.workspace import diagnose_workspace, show_workspace

    workspace = client(options)
    print_text(as_yaml(show_workspace(workspace)).rstrip())
    if options.diagnose:
        print_text("\n".join(diagnose_workspace(workspace)) or "Azure ML finds nothing wrong.")
