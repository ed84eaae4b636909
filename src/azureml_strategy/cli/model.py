"""model register|deploy: registers the weights of a run as a model, and puts a model behind an endpoint."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_strategy.cli.verbs import (
    Verbs,
    add_azure_verb,
    add_checkpoint_options,
    add_create_options,
    add_group,
    add_version_option,
    add_workspace_options,
    client,
    from_options,
    print_text,
)

if TYPE_CHECKING:
    from azureml_strategy.jobs.endpoints import DeployRequest

_REGISTER = "Register the weights of a finished job, or of a checkpoint here, as one file."
_REGISTER_EPILOG = """\
examples:
  azureml-strategy model register resnet50 --job JOB
  azureml-strategy model register gpt --job JOB --checkpoint checkpoints/epoch=2-step=66.ckpt
  azureml-strategy model register resnet50 --path outputs/run/checkpoints/epoch=2-step=66.ckpt
"""
_DEPLOY = """\
Put a registered model behind an online endpoint, which answers requests, or a batch endpoint, which predicts for the \
files of a folder. The scoring script and the image are ours."""
_DEPLOY_EPILOG = """\
examples:
  azureml-strategy model deploy resnet50 --endpoint digits --dry-run
  azureml-strategy model deploy resnet50 --endpoint digits --version 3 --deployment green --traffic 10
  azureml-strategy model deploy mine --endpoint mine --code . --requirements requirements.txt
  azureml-strategy model deploy resnet50 --endpoint digits-batch --batch --compute cpu-cluster
"""
_ONLINE = ("instance_type", "traffic")
_BATCH = ("compute", "mini_batch_size")


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    group = add_group(verbs, "model", "register a trained model, or deploy it")
    _add_register(group)
    _add_deploy(group)
    add_workspace_options(*group.choices.values())


def _add_register(group: Verbs) -> None:
    register = add_azure_verb(
        group, "register", _register, "register the weights of a run", _REGISTER, _REGISTER_EPILOG
    )
    register.add_argument("name", metavar="NAME", help="of the model")
    source = register.add_mutually_exclusive_group(required=True)
    source.add_argument("--job", metavar="JOB", help="the job that trained it")
    source.add_argument("--path", type=Path, metavar="CHECKPOINT", help="a checkpoint here: file or folder")
    register.add_argument("--output", metavar="NAME", help="with --job: output with the checkpoints (default: run)")
    register.add_argument(
        "--checkpoint", metavar="PATH", help="which, in that output (default: the best, else the last)"
    )
    add_version_option(register)
    add_checkpoint_options(register)


def _add_deploy(group: Verbs) -> None:
    deploy = add_azure_verb(
        group, "deploy", _deploy, "put a registered model behind an endpoint", _DEPLOY, _DEPLOY_EPILOG
    )
    deploy.add_argument("name", metavar="NAME", help="of the model")
    deploy.add_argument("--endpoint", required=True, metavar="NAME", help="made unless it is there")
    deploy.add_argument("--version", metavar="VERSION", help="of the model (default: the newest)")
    deploy.add_argument("--deployment", default="default", metavar="NAME", help="at the endpoint (default: default)")
    deploy.add_argument("--code", type=Path, metavar="FOLDER", help="with the modules of a class of your own")
    deploy.add_argument("--requirements", type=Path, metavar="FILE", help="further packages for the image")
    deploy.add_argument("--environment", metavar="AZUREML:NAME@LATEST", help="a registered one in place of our image")
    sizes = deploy.add_argument_group("sizes", "by default those of the deployment if it is there, else as told here")
    sizes.add_argument("--instance-count", type=int, metavar="N", help="machines or nodes (1)")
    sizes.add_argument("--max-samples", type=int, metavar="N", help="most in one request or file (256)")
    sizes.add_argument("--instance-type", metavar="VM_SIZE", help="online: of each machine (Standard_DS3_v2)")
    sizes.add_argument("--mini-batch-size", type=int, metavar="N", help="batch: files at a time (10)")
    online = deploy.add_argument_group("online")
    online.add_argument(
        "--traffic", type=int, metavar="PERCENT", help="of the requests (default: all, unless another one has some)"
    )
    batch = deploy.add_argument_group("batch")
    batch.add_argument("--batch", action="store_true", help="a batch endpoint")
    batch.add_argument("--compute", metavar="CLUSTER", help="the cluster that predicts")
    add_create_options(deploy)


def _register(options: argparse.Namespace) -> None:
    from azureml_strategy.checkpoint.module_record import module_overrides
    from azureml_strategy.jobs.deploy import CLASS_TAG
    from azureml_strategy.jobs.register import job_checkpoint, register_checkpoint
    from azureml_strategy.jobs.service_errors import JobError

    if options.path and (options.output or options.checkpoint):
        raise JobError(
            "--output and --checkpoint say what of a job is meant. Give --job JOB with them, or --path alone."
        )
    workspace = client(options)
    overrides = module_overrides(options.module_class, options.input_shape, options.input_dtype)
    source: AbstractContextManager[tuple[Path, dict[str, str] | None]]
    if options.job:
        source = job_checkpoint(workspace, options.job, options.output or "run", options.checkpoint)
    else:
        source = nullcontext((options.path, None))
    with source as (checkpoint, tags):
        model = register_checkpoint(
            workspace,
            options.name,
            checkpoint,
            version=options.version,
            tags=tags,
            trust_pickles=options.trust_pickles,
            overrides=overrides,
        )
    print_text(f"azureml:{model.name}:{model.version}  {model.description}")
    if CLASS_TAG not in (model.tags or {}):
        print_text("Its file does not tell the class of its module. To deploy it, register it with --module-class.")


def _deploy(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs import deploy, endpoints

    _check_deploy_options(options)
    request = from_options(endpoints.DeployRequest, options, model=options.name)
    names = (request.endpoint, request.deployment)
    endpoint: Any
    deployment: Any
    if options.batch:
        endpoint, deployment = endpoints.render_batch(request, options.compute)
        calls = deploy.calls_of_batch(*names)
    else:
        endpoint, deployment = endpoints.render_online(request)
        calls = deploy.calls_of_online(*names)
    if options.dry_run:
        _print_dry_run(request, endpoint, deployment, calls)
        return
    workspace = client(options)
    model = deployment.model = f"{request.model}:{deploy.check_model(workspace, request).version}"
    made: Any
    if options.batch:
        made = deploy.create_batch(workspace, request, endpoint, deployment)
        default = deploy.default_of(made)
        if default == request.deployment:
            state = ", the endpoint's default"
        else:
            state = f"; the endpoint's default stays {default}"
            calls.append(deploy.make_default(*names))
    else:
        made = deploy.create_online(workspace, request, endpoint, deployment, options.traffic)
        share = (made.traffic or {}).get(request.deployment, 0)
        machines = f"{deployment.instance_count} {deployment.instance_type}"
        state = f" on {machines}, {share} % of the requests to {made.scoring_uri}"
    print_text(f"{made.name}/{deployment.name}: azureml:{model}{state}")
    print("\n".join(calls))


def _check_deploy_options(options: argparse.Namespace) -> None:
    """Refuse options of the other kind of endpoint, and values that no endpoint takes."""
    from azureml_strategy.jobs.service_errors import JobError

    for name in _ONLINE if options.batch else _BATCH:
        if getattr(options, name) is not None:
            kind = "online endpoints: leave it or --batch out" if options.batch else "batch endpoints: add --batch"
            raise JobError(f"--{name.replace('_', '-')} is for {kind}.")
    if options.batch and options.compute is None:
        raise JobError("A batch endpoint predicts on a cluster. Type --compute NAME; `azureml-strategy cluster show`.")
    if options.traffic is not None and not 0 <= options.traffic <= 100:
        raise JobError(f"--traffic is {options.traffic}. Give per cent, from 0 to 100.")


def _print_dry_run(request: DeployRequest, endpoint: Any, deployment: Any, calls: list[str]) -> None:
    """Print both as YAML documents, with what they lead to as comments."""
    from azureml_strategy.jobs.endpoints import describe, document

    print_text(f"{document(endpoint)}---\n{document(deployment).rstrip()}")
    comments = [*describe(request, deployment), "", "Once they are made:", *calls]
    print("\n".join(f"# {line}".rstrip() for line in comments))  # it names variables that hold keys, and no key
