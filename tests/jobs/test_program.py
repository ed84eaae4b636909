"""A user's own script, module or command as a job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from azure.ai.ml import load_job
from tests.jobs.rendering import cache

from azureml_strategy.cli import main
from azureml_strategy.jobs import JobError, job_yaml
from azureml_strategy.jobs.program import Program, ProgramData, plan_program
from azureml_strategy.jobs.render import build_offline

__all__ = ["cache"]  # a fixture

SIZE = "cluster=nc24ads_a100_v4"


@pytest.fixture(autouse=True)
def script() -> None:
    Path("train.py").write_text("print('hello')\n")


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """The job, loaded and written again by azure-ai-ml, and what is told beside it."""
    assert main(["submit", "--dry-run", *words]) == 0
    captured = capsys.readouterr()
    Path("job.yaml").write_text(captured.out)
    assert job_yaml(load_job("job.yaml")).rstrip() == captured.out.rstrip()
    Path("job.yaml").unlink()
    job: dict[str, Any] = yaml.safe_load(captured.out)
    return job, captured.err


def test_the_line_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    job, told = dry_run(
        capsys,
        *("train.py", "cluster=nd96isr_h100_v5", "cluster.num_nodes=2", "--input", "images=azureml:imagenet@latest"),
        *("--", "--lr", "0.1", "--data", "${{inputs.images}}"),
    )
    assert job["command"] == 'python train.py --lr 0.1 --data "${{inputs.images}}"'
    assert job["code"] == os.getcwd()
    assert job["distribution"] == {"type": "pytorch", "process_count_per_instance": 8}
    assert job["resources"]["instance_count"] == 2
    assert job["compute"] == "azureml:nd96isr-h100-v5"
    assert job["inputs"]["images"] == {"type": "uri_folder", "mode": "ro_mount", "path": "azureml:imagenet@latest"}
    assert job["outputs"]["run"] == {"type": "uri_folder", "mode": "rw_mount"}
    assert job["tags"]["program"] == "train"
    assert "code: ., 1 file, " in told


def test_a_script_in_a_git_work_tree_runs_where_it_runs_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(".git").mkdir()
    Path("src/deep dir").mkdir(parents=True)
    Path("src/deep dir/mine.py").touch()
    root = os.getcwd()
    job, _ = dry_run(capsys, "src/deep dir/mine.py", SIZE)
    assert (job["command"], job["code"]) == ("python 'src/deep dir/mine.py'", root)
    monkeypatch.chdir("src/deep dir")
    job, _ = dry_run(capsys, "mine.py", SIZE)
    assert (job["command"], job["code"]) == ("cd 'src/deep dir' && python mine.py", root)
    job, _ = dry_run(capsys, "mine.py", SIZE, "job.code=.")
    assert (job["command"], job["code"]) == ("python mine.py", f"{root}/src/deep dir")
    job, _ = dry_run(capsys, "../../train.py", SIZE)
    assert job["command"] == "cd 'src/deep dir' && python ../../train.py"
    monkeypatch.chdir(Path(root).parent)
    job, _ = dry_run(capsys, f"{root}/train.py", SIZE)
    assert (job["command"], job["code"]) == ("python train.py", root)


def test_a_home_folder_that_is_a_work_tree_is_not_uploaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(".git").mkdir()
    monkeypatch.setenv("HOME", os.getcwd())
    Path("project").mkdir()
    Path("project/mine.py").touch()
    job, _ = dry_run(capsys, "project/mine.py", SIZE)
    assert (job["command"], job["code"]) == ("python mine.py", f"{os.getcwd()}/project")


def test_a_module_and_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    job, _ = dry_run(capsys, "--module", "package.train", SIZE, "--", "--lr", "a b")
    assert job["command"] == "python -m package.train --lr 'a b'"
    assert job["experiment_name"] == "train"
    text = 'torchrun --nproc-per-node 8 --nnodes 2 --node-rank $NODE_RANK train.py --x "$A" | tee log'
    job, told = dry_run(capsys, "--command", text, "cluster=nd96isr_h100_v5", "cluster.num_nodes=2")
    assert job["command"] == text
    assert job["distribution"]["process_count_per_instance"] == 1
    assert "one on each node, since torchrun starts the others" in told
    asked = "cluster.processes_per_node=4"
    job, told = dry_run(capsys, "--command", text, "cluster=nd96isr_h100_v5", asked)
    assert job["distribution"]["process_count_per_instance"] == 4


@pytest.mark.parametrize(("verb", "processes"), [("bench", 8), ("doctor", 1)])
def test_our_own_verbs_as_jobs(verb: str, processes: int, capsys: pytest.CaptureFixture[str]) -> None:
    job, _ = dry_run(capsys, verb, "cluster=nd96isr_h100_v5", "cluster.num_nodes=2", "--", "--json")
    assert job["command"] == f"azureml-strategy {verb} --json"
    assert job["distribution"]["process_count_per_instance"] == processes
    assert "code" not in job
    assert "outputs" not in job


def test_inputs_and_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    Path("labels.csv").touch()
    Path("images").mkdir()
    job, _ = dry_run(
        capsys,
        *("train.py", SIZE, "--input", "labels=labels.csv", "--input", "images=images", "--input", "lr=0.5"),
        *(
            "--input",
            "far=https://host.example/a/b.csv?v=1",
            "--input",
            "kernel=rbf",
            "job.inputs.images.mode=download",
        ),
        *("--output", "model", "--output", "best=azureml://datastores/a/paths/it's", "job.outputs.best.mode=upload"),
    )
    inputs = job["inputs"]
    assert inputs["labels"]["type"] == "uri_file"
    assert inputs["images"]["mode"] == "download"
    assert inputs["far"]["type"] == "uri_file"
    assert (inputs["lr"], inputs["kernel"]) == (0.5, "rbf")
    assert job["outputs"]["model"] == {"type": "uri_folder", "mode": "rw_mount"}
    assert job["outputs"]["best"]["path"] == "azureml://datastores/a/paths/it's"
    assert job["outputs"]["best"]["mode"] == "upload"


def test_low_priority_nodes_save_and_resume(capsys: pytest.CaptureFixture[str]) -> None:
    job, told = dry_run(capsys, "train.py", SIZE, "cluster.tier=low_priority")
    assert job["environment_variables"]["AZUREML_STRATEGY_CHECKPOINT"] == "auto"
    assert "a Lightning Trainer saves to the output run and resumes" in told
    job, told = dry_run(capsys, "train.py", SIZE, "cluster.tier=low_priority", "job.checkpoint=off")
    assert "environment_variables" not in job
    job, _ = dry_run(capsys, "train.py", SIZE, "job.checkpoint=any")
    assert job["environment_variables"] == {"AZUREML_STRATEGY_CHECKPOINT": "any"}


def test_plain_is_nothing_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train.py", "job=plain", "cluster.compute=cpu-cluster", "job.distribution=none")
    job, _ = dry_run(capsys, *words, "job.environment.name=azureml:mine@latest", "cluster.tier=low_priority")
    del job["$schema"]
    assert job == {
        "type": "command",
        "command": "python train.py",
        "code": os.getcwd(),
        "environment": "azureml:mine@latest",
        "compute": "azureml:cpu-cluster",
    }


def test_ways_into_the_job_and_its_place_in_the_queue(capsys: pytest.CaptureFixture[str]) -> None:
    Path("id.pub").write_text("ssh-ed25519 AAAA me@host\n")
    job, _ = dry_run(
        capsys,
        *("train.py", SIZE, "cluster.compute=serverless", "job.locations=[westeurope,northeurope]"),
        *("job.queue.priority=high", "cluster.num_nodes=2", "cluster.allow_ethernet=true", "job.max_instance_count=4"),
        *("+job.services.vs_code={nodes: all}", "+job.services.board={type: tensor_board, log_dir: outputs/tb}"),
        *("+job.services.ssh={ssh_public_keys: id.pub}", "+job.services.lab={type: jupyter_lab}"),
    )
    assert job["services"] == {
        "vs_code": {"type": "vs_code", "nodes": "all"},
        "board": {"type": "tensor_board", "log_dir": "outputs/tb"},
        "ssh": {"type": "ssh", "ssh_public_keys": "ssh-ed25519 AAAA me@host"},
        "lab": {"type": "jupyter_lab"},
    }
    assert job["queue_settings"] == {"priority": "high"}
    assert job["resources"]["locations"] == ["westeurope", "northeurope"]
    assert job["resources"]["max_instance_count"] == 4


def test_kubernetes_and_parameter_servers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train.py", "cluster.compute=k8s", "job.instance_type=gpu-large", "cluster.processes_per_node=2")
    job, _ = dry_run(capsys, *words)
    assert job["resources"]["instance_type"] == "gpu-large"
    words = ("train.py", SIZE, "job.distribution=tensorflow", "job.parameter_server_count=1", "cluster.num_nodes=2")
    job, _ = dry_run(capsys, *words, "cluster.allow_ethernet=true")
    assert job["distribution"] == {"type": "tensorflow", "worker_count": 2, "parameter_server_count": 1}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["trian.py", SIZE], "There is no script trian.py. Did you mean 'train.py'?"),
        (["train.py", SIZE, "model.lr=1"], "the program's own arguments stand after `--`"),
        (["train.py", SIZE, "job.timout=1"], "Did you mean 'job.timeout'"),
        (["train.py", SIZE, "--", "${{inputs.images}}"], "refers to no input or output of this job"),
        (["train.py", SIZE, "--", "--api-key", "0a1b2c3d4e"], "the argument api-key looks like a secret"),
        (
            ["train.py", SIZE, "--", "--hf-token=hf_abcdefghijklmnopqrstuvwxyzabcdefgh"],
            "the argument hf-token looks like a secret",
        ),
        (["--command", "HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyzabcdefgh python train.py", SIZE], "looks like a secret"),
        (["train.py", SIZE, "--input", "k=hf_abcdefghijklmnopqrstuvwxyzabcdefgh"], "job.inputs.k looks like a secret"),
        (["train.py", SIZE, "--input", "images"], "names no data"),
        (["train.py", SIZE, "--input", "images=./nowhere"], "nothing is there"),
        (["train.py", SIZE, "--input", "k=a $HOME", "--", "${{inputs.k}}"], "would read as code"),
        (["train.py", "--command", "ls", SIZE], "Name one thing to run"),
        ([SIZE], "Type the recipe first"),
        ([], "Name one thing to run"),
        (["--command", " ", SIZE], "The command is empty"),
        (["--command", "ls", SIZE, "--", "a"], "the whole command line"),
        (["resnet50_ddp", SIZE, "--", "--lr", "1"], "resnet50_ddp is a recipe"),
        (["bench", SIZE, "--sweep", "a=choice(1)"], "nothing to sweep"),
        (["train.py", SIZE, "--metric", "loss"], "--metric is about a sweep"),
        (["train.py", SIZE, "job.checkpoint=on"], "Known: auto, any, never, off"),
        (["train.py", SIZE, "job.checkpoint=auto", "~job.outputs.run"], "needs a folder that outlives the node"),
        (["train.py", SIZE, "job.outputs.run.sets=model.path"], "a key of a recipe"),
        (["train.py", SIZE, "job.code=nowhere"], "there is no such folder"),
        (["train.py", SIZE, "job.code=sub"], "lies outside of sub"),
        (["train.py", SIZE, "job.queue.priority=urgent"], "Known: low, medium, high"),
        (["train.py", SIZE, "job.locations=[westeurope]"], "add cluster.compute=serverless"),
        (["train.py", SIZE, "job.instance_type=large"], "cluster.compute=NAME"),
        (["train.py", SIZE, "job.max_instance_count=0"], "may only grow"),
        (["train.py", SIZE, "job.parameter_server_count=1"], "job.distribution=tensorflow"),
        (
            ["train.py", SIZE, "job.distribution=none", "cluster.num_nodes=2", "cluster.allow_ethernet=true"],
            "job=plain",
        ),
        (["train.py", SIZE, "+job.services.shell={}"], "Known: ssh, vs_code, jupyter_lab, tensor_board"),
        (["train.py", SIZE, "+job.services.ssh={}"], "needs job.services.ssh.ssh_public_keys"),
        (["train.py", SIZE, "+job.services.ssh={ssh_public_keys: train.py}"], "neither a public key nor the file"),
        (["train.py", SIZE, "+job.services.vs_code={log_dir: a}"], "is for type tensor_board"),
        (["train.py", SIZE, "+job.services.vs_code={nodes: 2}"], "Write all for every node"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sub").mkdir()
    assert main(["submit", "--dry-run", *words]) == 2
    captured = capsys.readouterr()
    assert error in captured.err
    assert captured.out == ""


def test_a_script_that_the_rules_leave_out_is_named() -> None:
    Path(".amlignore").write_text("train.py\n")
    Path("other.py").touch()
    plan = plan_program(Program(script="train.py"), [SIZE])
    with pytest.raises(JobError, match=r"train\.py is left out by \./\.amlignore"):
        plan.snapshot()


def test_values_of_the_python_interface() -> None:
    plan = plan_program(
        Program(script="train.py", arguments=("${{inputs.lr}}", "${{inputs.on}}")),
        [SIZE],
        ProgramData({"lr": 0.5, "on": True, "name": "x"}, {"run": "azureml://datastores/a/paths/b"}),
    )
    job = yaml.safe_load(job_yaml(build_offline(plan)))
    assert (job["inputs"]["lr"], job["inputs"]["name"]) == (0.5, "x")
    assert job["outputs"]["run"]["path"] == "azureml://datastores/a/paths/b"
