"""data pack|upload|register|attach|show: packs training data, and manages it in Blob Storage."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from azureml_strategy.cli.data_packing import add_pack, is_packed, show_packed
from azureml_strategy.cli.verbs import (
    Verbs,
    add_create_options,
    add_dry_run,
    add_group,
    add_verb,
    add_version_option,
    add_workspace_options,
    client,
    make,
    print_text,
    refusing,
)

if TYPE_CHECKING:
    from azure.ai.ml.entities import Data

    from azureml_strategy.jobs.storage import DataRequest

_EPILOG = """\
examples:
  azureml-strategy data pack /data/imagenet /data/packed --resize 256
  azureml-strategy data upload /data/packed --name imagenet
  azureml-strategy data register azureml://datastores/premium/paths/imagenet/ --name imagenet
  azureml-strategy data attach premium --account fastimages --container training
"""


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    group = add_group(verbs, "data", "pack, upload, register or show training data")
    add_pack(group)
    upload = add_verb(
        group,
        "upload",
        _upload,
        help="upload a folder or file",
        description="Upload a folder of images or shards, or a file, and register it as a data asset.",
        epilog=_EPILOG,
    )
    upload.add_argument("path", type=Path, metavar="PATH", help="folder or file; .amlignore in it says what stays here")
    _add_asset_options(upload)
    upload.add_argument("--datastore", metavar="NAME", help="where to (default: the workspace's own storage account)")
    register = add_verb(
        group,
        "register",
        _register,
        help="register what is in storage",
        description="Register what lies in storage already as a data asset.",
        epilog=_EPILOG,
    )
    register.add_argument("path", metavar="ADDRESS", help="azureml://datastores/NAME/paths/FOLDER/ or https://...")
    register.add_argument("--file", action="store_true", help="the address is one file, not a folder")
    _add_asset_options(register)
    _add_attach(group)
    show = add_verb(
        group,
        "show",
        _show,
        help="show data, or check a packed set",
        description="Show a data asset's versions, or all there is. Show and check a packed set.",
        epilog=_EPILOG,
    )
    what = "of a data asset, all and the datastores by default; or the folder or address of a packed set, to check it"
    show.add_argument("name", nargs="?", metavar="NAME", help=what)
    show.add_argument("--quick", action="store_true", help="of a packed set read only a thousand records, not all")
    add_workspace_options(show)


def _add_asset_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--name", required=True, metavar="NAME", help="of the data asset")
    add_version_option(verb)
    verb.add_argument("--description", metavar="TEXT", help="for its page")
    add_create_options(verb)
    add_workspace_options(verb)


def _add_attach(group: Verbs) -> None:
    attach = add_verb(
        group,
        "attach",
        _attach,
        help="make a storage account known",
        description="Make a container of a storage account known to the workspace, without the account's key.",
        epilog=_EPILOG,
    )
    attach.add_argument("name", metavar="NAME", help="what to call the datastore")
    attach.add_argument("--account", required=True, metavar="NAME", help="name of the storage account")
    attach.add_argument("--container", required=True, metavar="NAME", help="name of the blob container")
    attach.add_argument("--description", metavar="TEXT", help="for its page")
    add_dry_run(attach)
    add_workspace_options(attach)


@refusing
def _upload(options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.storage import render_upload, survey_data

    survey = survey_data(options.path)
    print(f"{options.path}: {survey}", file=sys.stderr)
    if survey.advice:
        print(f"azureml-strategy: {survey.advice}", file=sys.stderr)
    return _make(options, render_upload(_request(options), options.path))


@refusing
def _register(options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.storage import render_registration

    return _make(options, render_registration(_request(options), options.path, file=options.file))


def _request(options: argparse.Namespace) -> DataRequest:
    from azureml_strategy.jobs.storage import DataRequest

    return DataRequest(
        name=options.name,
        version=options.version,
        description=options.description,
        datastore=getattr(options, "datastore", None),
        tags=dict(options.tag or ()) or None,
    )


def _make(options: argparse.Namespace, data: Data) -> int:
    from azureml_strategy.jobs.storage import create_data

    made = make(options, data, create_data)
    if made is not None:
        print_text(f"azureml:{made.name}:{made.version}  {made.path}")
    return 0


@refusing
def _attach(options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.storage import attach_datastore, render_datastore

    datastore = render_datastore(options.name, options.account, options.container, options.description)
    made = make(options, datastore, attach_datastore)
    if made is not None:
        print_text(f"{made.name}: azureml://datastores/{made.name}/paths/")
    return 0


@refusing
def _show(options: argparse.Namespace) -> int:
    if options.name and is_packed(options.name):
        return show_packed(options.name, options.quick)
    from azureml_strategy.jobs.storage import list_data, show_data
    from azureml_strategy.tracking.tables import render_table

    workspace = client(options)
    if options.name:
        versions = [(each.version, each.type, each.path) for each in show_data(workspace, options.name)]
        print_text(render_table(("version", "type", "path"), versions, empty=""))
        return 0
    assets, datastores = list_data(workspace)
    rows = [(each.name, each.latest_version, each.description) for each in assets]
    print_text(render_table(("data asset", "latest", "description"), rows, empty="There are no data assets."))
    stores = [
        (each.name, getattr(each, "account_name", None), getattr(each, "container_name", None)) for each in datastores
    ]
    print_text("\n" + render_table(("datastore", "account", "container"), stores, empty="There are no datastores."))
    return 0
