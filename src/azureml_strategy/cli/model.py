"""model register|deploy: registers the weights of a run as a model, and puts a model behind an endpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_strategy.cli.verbs import (
    Verbs,
    add_checkpoint_options,
    add_create_options,
    add_group,
    add_verb,
    add_version_option,
    add_workspace_options,
    client,
    print_text,
    refusing,
)

if TYPE_CHECKING:
    from azureml_strategy.jobs.endpoints import DeployRequest

_REGISTER = """\
examples:
  azureml-strategy model register resnet50 --job JOB
  azureml-strategy model register gpt --job JOB --checkpoint checkpoints/epoch=2-step=66.ckpt
  azureml-strategy model register resnet50 --path outputs/run/checkpoints/epoch=2-step=66.ckpt
"""
_DEPLOY = """\
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


def _add_register(group: Verbs) -> None:
    register = add_verb(
        group,
        "register",
        _register,
        help="register the weights of a run",
        description="Register the weights of a finished job, or of a checkpoint here, as one file.",
        epilog=_REGISTER,
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
    add_workspace_options(register)


def _add_deploy(group: Verbs) -> None:
    deploy = add_verb(
        group,
        "deploy",
        _deploy,
        help="put a registered model behind an endpoint",
        description="Put a registered model behind an online endpoint, which answers requests, or a batch endpoint, "
        "which predicts for the files of a folder. The scoring script and the image are ours.",
        epilog=_DEPLOY,
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
    add_workspace_options(deploy)


@refusing
def _register(options: argparse.Namespace) -> int:
    from azureml_strategy.checkpoint.module_record import module_overrides
    from azureml_strategy.jobs.deploy import CLASS_TAG
    from azureml_strategy.jobs.register import register_checkpoint, register_run
    from azureml_strategy.jobs.service_errors import JobError

    if options.path and (options.output or options.checkpoint):
        raise JobError(
            "--output and --checkpoint say what of a job is meant. Give --job JOB with them, or --path alone."
        )
    workspace = client(options)
    overrides = module_overrides(options.module_class, options.input_shape, options.input_dtype)
    how: dict[str, Any] = {"version": options.version, "trust_pickles": options.trust_pickles, "overrides": overrides}
    if options.job:
        source = {"output": options.output or "run", "checkpoint": options.checkpoint}
        model = register_run(workspace, options.name, options.job, **source, **how)
    else:
        model = register_checkpoint(workspace, options.name, options.path, **how)
    print_text(f"azureml:{model.name}:{model.version}  {model.description}")
    if CLASS_TAG not in (model.tags or {}):
        print_text("Its file does not tell the class of its module. To deploy it, register it with --module-class.")
    return 0


@refusing
def _deploy(options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.service_errors import JobError

    for name in _ONLINE if options.batch else _BATCH:
        if getattr(options, name) is not None:
            kind = "online endpoints: leave it or --batch out" if options.batch else "batch endpoints: add --batch"
            raise JobError(f"--{name.replace('_', '-')} is for {kind}.")
    if options.batch and options.compute is None:
        raise JobError("A batch endpoint predicts on a cluster. Type --compute NAME; `azureml-strategy cluster show`.")
    if options.traffic is not None and not 0 <= options.traffic <= 100:
        raise JobError(f"--traffic is {options.traffic}. Give per cent, from 0 to 100.")
    return _deploy_batch(options) if options.batch else _deploy_online(options)


def _deploy_online(options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.deploy import calls_of_online, check_model, create_online
    from azureml_strategy.jobs.endpoints import render_online

    request = _request(options)
    endpoint, deployment = render_online(request)
    calls = calls_of_online(request.endpoint, request.deployment)
    if options.dry_run:
        return _print_dry_run(request, endpoint, deployment, calls)
    workspace = client(options)
    model = deployment.model = f"{request.model}:{check_model(workspace, request).version}"
    made = create_online(workspace, request, endpoint, deployment, options.traffic)
    share = (made.traffic or {}).get(request.deployment, 0)
    what = f"{made.name}/{deployment.name}: azureml:{model} on {deployment.instance_count} {deployment.instance_type}"
    print_text(f"{what}, {share} % of the requests to {made.scoring_uri}")
    print("\n".join(calls))
    return 0


def _deploy_batch(options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.deploy import calls_of_batch, check_model, create_batch, default_of, make_default
    from azureml_strategy.jobs.endpoints import render_batch

    request = _request(options)
    endpoint, deployment = render_batch(request, options.compute)
    calls = calls_of_batch(request.endpoint, request.deployment)
    if options.dry_run:
        return _print_dry_run(request, endpoint, deployment, calls)
    workspace = client(options)
    model = deployment.model = f"{request.model}:{check_model(workspace, request).version}"
    made = create_batch(workspace, request, endpoint, deployment)
    default = default_of(made)
    if default == request.deployment:
        print_text(f"{made.name}/{deployment.name}: azureml:{model}, the endpoint's default")
    else:
        print_text(f"{made.name}/{deployment.name}: azureml:{model}; the endpoint's default stays {default}")
        calls.append(make_default(request.endpoint, request.deployment))
    print("\n".join(calls))
    return 0


def _request(options: argparse.Namespace) -> DeployRequest:
    from azureml_strategy.jobs.endpoints import DeployRequest

    return DeployRequest(
        model=options.name,
        endpoint=options.endpoint,
        version=options.version,
        deployment=options.deployment,
        code=options.code,
        requirements=options.requirements,
        environment=options.environment,
        instance_type=options.instance_type,
        instance_count=options.instance_count,
        mini_batch_size=options.mini_batch_size,
        max_samples=options.max_samples,
        tags=dict(options.tag or ()) or None,
    )


def _print_dry_run(request: DeployRequest, endpoint: Any, deployment: Any, calls: list[str]) -> int:
    """Print both as YAML documents, with what they lead to as comments."""
    from azureml_strategy.jobs.endpoints import describe, document

    print_text(f"{document(endpoint)}---\n{document(deployment).rstrip()}")
    comments = [*describe(request, deployment), "", "Once they are made:", *calls]
    print("\n".join(f"# {line}".rstrip() for line in comments))  # it names variables that hold keys, and no key
    return 0
