"""cluster create|show|delete: manages the clusters of nodes that run jobs."""

from __future__ import annotations

import argparse
import sys

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

_CREATE = "Make a cluster that has nodes only while there are jobs."
_EPILOG = """\
examples:
  azureml-strategy cluster create --size nd96isr_h100_v5 --max-nodes 4
  azureml-strategy cluster create --size nd96amsr_a100_v4 --max-nodes 8 --tier low_priority --dry-run
  azureml-strategy cluster create --size nc40ads_h100_v5 --vnet net --subnet training --no-public-ip --identity system
"""


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    group = add_group(verbs, "cluster", "make, show or delete a cluster of nodes")
    _add_create(group)
    show = add_azure_verb(group, "show", _show, "show one cluster, or all")
    show.add_argument("name", nargs="?", metavar="NAME", help="of the cluster; all of them by default")
    delete = add_azure_verb(group, "delete", _delete, "delete a cluster", "Delete a cluster, and end the jobs on it.")
    delete.add_argument("name", metavar="NAME", help="of the cluster")
    add_workspace_options(*group.choices.values())


def _add_create(group: Verbs) -> None:
    create = add_azure_verb(group, "create", _create, "make a cluster", _CREATE, _EPILOG)
    create.add_argument("--size", required=True, metavar="VM_SIZE", help="of each node: nd96isr_h100_v5")
    create.add_argument("--max-nodes", type=int, default=1, metavar="N", help="most nodes at a time (default 1)")
    create.add_argument("--min-nodes", type=int, default=0, metavar="N", help="nodes kept without a job (default 0)")
    create.add_argument("--name", metavar="NAME", help="default: after the size, where jobs of that size look for it")
    create.add_argument("--tier", default="dedicated", help="dedicated (default) or low_priority")
    create.add_argument(
        "--idle-seconds", type=int, default=300, metavar="S", help="how long an idle node is kept (default 300)"
    )
    create.add_argument("--region", metavar="REGION", help="default: the workspace's")
    create.add_argument("--vnet", metavar="NAME", help="virtual network of the nodes")
    create.add_argument("--subnet", metavar="NAME", help="subnet in it; or the subnet's resource id, without --vnet")
    create.add_argument(
        "--no-public-ip",
        dest="public_ip",
        action="store_false",
        help="nodes without an address on the internet; needs --subnet or a workspace with a managed network",
    )
    create.add_argument("--identity", metavar="ID", help="managed identity of the nodes: its resource id, or: system")
    create.add_argument(
        "--allow-ethernet", action="store_true", help="several nodes without InfiniBand are meant: see docs/cluster.md"
    )
    add_create_options(create)


def _create(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs.client import plain
    from azureml_strategy.jobs.compute import ClusterRequest, create_cluster, render_cluster
    from azureml_strategy.jobs.resources import find_size, scale_up_advice

    cluster = render_cluster(from_options(ClusterRequest, options, vm_size=options.size))
    advice = scale_up_advice(find_size(options.size), options.max_nodes)
    if advice:
        print(f"azureml-strategy: {advice}", file=sys.stderr)
    make(
        options,
        cluster,
        create_cluster,
        lambda made: (
            f"{made.name}: {plain(made.provisioning_state)}, "
            f"{made.min_instances} to {made.max_instances} nodes of {made.size}"
        ),
    )


def _show(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs.client import as_yaml, plain
    from azureml_strategy.jobs.compute import list_clusters, show_cluster
    from azureml_strategy.tracking.tables import render_table

    workspace = client(options)
    if options.name:
        print_text(as_yaml(show_cluster(workspace, options.name)).rstrip())
        return
    rows = [
        (
            each.name,
            each.size,
            f"{each.min_instances} to {each.max_instances}",
            each.tier,
            plain(each.provisioning_state),
        )
        for each in list_clusters(workspace)
    ]
    print_text(render_table(("name", "size", "nodes", "tier", "state"), rows, empty="The workspace has no cluster."))


def _delete(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs.compute import delete_cluster

    delete_cluster(client(options), options.name)
    print_text(f"{options.name}: deleted")
