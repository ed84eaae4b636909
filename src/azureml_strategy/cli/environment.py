"""environment build: builds and registers the image of jobs before they need it."""

from __future__ import annotations

import argparse

from azureml_strategy.cli.verbs import (
    Verbs,
    add_azure_verb,
    add_dry_run,
    add_group,
    add_version_option,
    add_workspace_options,
    client,
    from_options,
    make,
    print_text,
)

_BUILD = "Build an image in the workspace's registry, and register it under a name."
_EPILOG = """\
examples:
  azureml-strategy environment build training                       # this package's own Dockerfile
  azureml-strategy environment build mine --build ./docker          # a folder with your Dockerfile
  azureml-strategy environment build mine --image IMAGE --conda-file conda.yaml --check
and then:
  azureml-strategy submit resnet50_imagenet job.environment.name=azureml:training@latest
"""


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    group = add_group(verbs, "environment", "build the image that jobs run in")
    build = add_azure_verb(group, "build", _build, "build an image and register it", _BUILD, _EPILOG)
    build.add_argument("name", metavar="NAME", help="of the environment")
    add_version_option(build)
    build.add_argument("--build", metavar="FOLDER", help="folder with a Dockerfile and what it copies")
    build.add_argument("--dockerfile", default="Dockerfile", metavar="PATH", help="its path in that folder")
    build.add_argument("--base-image", metavar="IMAGE", help="this package's own Dockerfile on top of another image")
    build.add_argument("--image", metavar="IMAGE", help="an image that is in a registry already")
    build.add_argument("--conda-file", metavar="FILE", help="conda packages to put on top of --image")
    build.add_argument(
        "--check",
        nargs="?",
        const="",
        metavar="CLUSTER",
        help="run a job of seconds in it, there or on serverless compute",
    )
    add_dry_run(build)
    add_workspace_options(build)


def _build(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs.environments import build_environment, check_environment, render_environment
    from azureml_strategy.jobs.settings import EnvironmentSettings

    settings = from_options(EnvironmentSettings, options, name=None)  # NAME is what it is registered as
    environment = render_environment(settings, options.name, options.version)
    made = make(options, environment, build_environment, lambda made: f"azureml:{made.name}:{made.version}")
    if made is not None and options.check is not None:
        job = check_environment(client(options), made, options.check or None)
        print_text(f"The image is built for the job {job}: azureml-strategy jobs logs {job} --follow")
