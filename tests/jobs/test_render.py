"""What a user asks of a job, in the job."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.jobs.rendering import SIZE, cache, own_recipe, rendered

from azureml_strategy.jobs import JobError

__all__ = ["cache"]  # a fixture
PRICE = "AZUREML_STRATEGY_PRICE_PER_HOUR"


@pytest.mark.parametrize(
    ("distribution", "block"),
    [
        ("pytorch", {"type": "pytorch", "process_count_per_instance": 8}),
        ("mpi", {"type": "mpi", "process_count_per_instance": 8}),
        ("tensorflow", {"type": "tensorflow", "worker_count": 4, "parameter_server_count": 0}),
        ("ray", {"type": "ray"}),
    ],
)
def test_the_distribution(distribution: str, block: dict[str, object]) -> None:
    job = rendered("resnet50_ddp", SIZE, "cluster.num_nodes=4", f"job.distribution={distribution}")
    assert job["distribution"] == block
    assert job["resources"]["instance_count"] == 4


def test_a_compute_of_ones_own() -> None:
    job = rendered("resnet50_ddp", "cluster.compute=mine", "cluster.processes_per_node=2", name="run_1")
    assert (job["name"], job["compute"]) == ("run_1", "azureml:mine")
    assert job["distribution"]["process_count_per_instance"] == 2
    assert job["resources"]["shm_size"] == "16g"
    assert "vm_size" not in job["tags"]


def test_a_size_without_a_file_and_without_gpus() -> None:
    job = rendered("resnet50_ddp", "cluster.vm_size=Standard_D4s_v3", "cluster.num_nodes=2")
    assert (job["compute"], job["distribution"]["process_count_per_instance"]) == ("azureml:d4s-v3", 1)


def test_ethernet_is_a_choice() -> None:
    job = rendered("resnet50_ddp", "cluster=nc24ads_a100_v4", "cluster.num_nodes=2", "cluster.allow_ethernet=true")
    assert job["resources"]["instance_count"] == 2


def test_the_name_on_its_page_tells_what_was_changed_in_the_recipe() -> None:
    job = rendered("resnet50_ddp", SIZE, "data.batch_size=64", "cluster.num_nodes=2", "checkpoint.save_top_k=1")
    assert job["display_name"].startswith("resnet50_ddp data.batch_size=64, 2 x ")
    assert job["experiment_name"] == "resnet50_ddp"


def test_everything_that_azure_ml_is_told() -> None:
    job = rendered(
        "resnet50_ddp",
        SIZE,
        *("job.experiment=digits", "job.display_name='a run'", "job.description=why", "+job.tags.team=vision"),
        *("+job.environment_variables.NCCL_DEBUG=INFO", "job.timeout=3600", "job.shm_size=64g"),
        *("job.docker_args='--ulimit memlock=-1 --cap-add=IPC_LOCK'", "cluster.price_per_hour=12.5"),
        *("job.identity.type=managed", "job.identity.client_id=1b2c"),
        *(
            "+job.inputs.books={path: azureml:books:2, mode: download}",
            "job.outputs.run.path=azureml://datastores/d/paths/p",
        ),
    )
    assert (job["experiment_name"], job["display_name"], job["description"]) == ("digits", "a run", "why")
    assert job["tags"]["team"] == "vision"
    assert job["tags"]["recipe"] == "resnet50_ddp"
    assert job["environment_variables"]["NCCL_DEBUG"] == "INFO"
    assert job["environment_variables"][PRICE] == "12.5"
    assert job["limits"] == {"timeout": 3600}
    assert job["resources"]["shm_size"] == "64g"
    assert job["resources"]["docker_args"] == "--ulimit memlock=-1 --cap-add=IPC_LOCK"
    assert job["identity"] == {"type": "managed_identity", "client_id": "1b2c"}
    assert job["inputs"]["books"] == {"type": "uri_folder", "path": "azureml:books:2", "mode": "download"}
    assert job["outputs"]["run"]["path"] == "azureml://datastores/d/paths/p"


@pytest.mark.parametrize("kind", ["user_identity", "aml_token"])
def test_the_identity(kind: str) -> None:
    assert rendered("resnet50_ddp", SIZE, f"job.identity.type={kind}")["identity"]["type"] == kind


def test_the_users_variables_win() -> None:
    override = "+job.environment_variables.DATASET_MOUNT_CACHE_SIZE=1GB"
    job = rendered(
        "resnet50_imagenet", SIZE, override, f"+job.environment_variables.{PRICE}=1", "cluster.price_per_hour=2"
    )
    assert job["environment_variables"]["DATASET_MOUNT_CACHE_SIZE"] == "1GB"
    assert job["environment_variables"][PRICE] == "1"


def test_no_price_is_invented() -> None:
    assert PRICE not in rendered("resnet50_imagenet", SIZE, "cluster.region=eastus").get("environment_variables", {})


def test_a_recipe_of_the_users(tmp_path: Path) -> None:
    recipe = own_recipe("my runs/mine.yaml", "vars: {team: vision}\njob: {tags: {team: '${vars.team}'}}")
    job = rendered(recipe, SIZE)
    assert job["tags"]["team"] == "vision"
    assert job["command"].startswith("azureml-strategy train 'my runs/mine.yaml' ")
    assert Path(job["code"]).resolve() == tmp_path.resolve()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "No cluster is chosen. Name a VM size"),
        (["cluster.compute=serverless"], "How many GPUs a node has is not known"),
        (["cluster=nc24rs_v3"], "Standard_NC24rs_v3 was retired on 2025-09-30"),
        (["cluster=nd96isr_h100"], "Did you mean 'nd96isr_h100_v5'"),
        (["cluster.vm_size=Standard_NC24rs_v3"], "was retired on 2025-09-30"),
        (["cluster.vm_size=nd96isr"], "is not the name|no InfiniBand|How many GPUs"),
        (["cluster=nc24ads_a100_v4", "cluster.num_nodes=2"], r"confirm with cluster\.allow_ethernet=true"),
        ([SIZE, "cluster.num_nodes=0"], "cluster.num_nodes is 0"),
        ([SIZE, "cluster.tier=spot"], "cluster.tier is 'spot'. Known: dedicated, low_priority"),
        ([SIZE, "cluster.processes_per_node=9"], "has 8 GPUs"),
        ([SIZE, "cluster.processes_per_node=0"], "at least one process"),
        ([SIZE, "cluster.processes_per_node=8", "job.distribution=tensorflow"], "one process a node for tensorflow"),
        ([SIZE, "job.distribution=torch"], "Known: pytorch, mpi, tensorflow, ray"),
        ([SIZE, "cluster.price_per_hour=-1"], "no price"),
        (["cluster=nd96isr_mi300x_v5"], "AMD GPUs, and needs PyTorch for ROCm.*job.environment.image="),
        (["cluster=nd128isr_gb300_v6"], "Arm CPUs, and needs an image for linux/arm64"),
        (["cluster.compute=mine"], "cluster.processes_per_node=8, or name its size"),
        ([SIZE, "job.identity.client_id=1"], "is for job.identity.type=managed"),
        ([SIZE, "job.identity.type=me"], "Known: managed, user_identity, aml_token"),
        ([SIZE, "job.code=nowhere"], "no such folder"),
        ([SIZE, "job.shm_size=64gb"], r"job\.shm_size is '64gb'\. Write a number and one of b, k, m and g"),
        ([SIZE, "job.timeout=0"], r"job\.timeout is 0\. Give the seconds, 1 or more"),
        ([SIZE, "seed=1,2"], "stands for several runs.*hydra/launcher=azureml"),
        ([SIZE, "-m"], "'-m' is no override"),
        ([SIZE, "seed=(1"], "not in Hydra's notation"),
        ([SIZE, "sede=1"], "Did you mean 'seed'"),
        ([SIZE, "+job.experimant=a"], "Did you mean 'job.experiment'"),
        ([SIZE, "+vars.hf_token=abcdefgh"], "vars.hf_token looks like a secret"),
        ([SIZE, "+job.inputs.a={path: b, sets: data.rot}"], "data.rot is to get a path .* Did you mean 'data.root'"),
    ],
)
def test_what_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(JobError, match=words):
        rendered("resnet50_ddp", *overrides)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("job: {environment_variables: {HF_TOKEN: hf_abcdefgh}}", "job.environment_variables.HF_TOKEN looks like a"),
        ("job: {inputs: {a: {path: 'https://a.blob.core.windows.net/c?sig=abc'}}}", "job.inputs.a.path looks like a"),
        ("job: {display_name: 'https://me:abc@host/'}", "job.display_name looks like a"),
        ("cluster: 3", "section `cluster`|Cannot merge|cannot be composed"),
    ],
)
def test_what_is_refused_in_a_recipe(text: str, words: str) -> None:
    recipe = own_recipe("mine.yaml", text)
    with pytest.raises(JobError, match=words):
        rendered(recipe, SIZE)


def test_other_nodes_with_an_image_of_their_own() -> None:
    job = rendered("resnet50_ddp", "cluster=nd96isr_mi300x_v5", "job.environment.image=rocm/mine:1")
    assert job["environment"] == {"image": "rocm/mine:1"}


@pytest.mark.parametrize("name", ["a b", "-a", "ä", "a" * 256, ""])
def test_names_that_azure_ml_refuses(name: str) -> None:
    with pytest.raises(JobError, match="is no name of a job"):
        rendered("resnet50_ddp", SIZE, name=name)


def test_a_recipe_that_there_is_none_of() -> None:
    with pytest.raises(JobError, match="Did you mean 'resnet50_ddp'"):
        rendered("resnet50_dpd", SIZE)
