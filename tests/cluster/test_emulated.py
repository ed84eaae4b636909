from __future__ import annotations

import pytest

from azureml_strategy.cluster.emulated import DISTRIBUTIONS, EmulatedRun, azure_variables, without_job_variables
from azureml_strategy.cluster.environ import SWITCHES, LaunchError
from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import detect_launch

RUN = EmulatedRun("quirky_plum", "resnet50", "17", "sqlite:///mlflow.db")
LAUNCH = Launch("pytorch", 5, 8, 1, 4, 1, 2, "127.0.0.2", 6105)
ADDRESSES = ["127.0.0.2", "127.0.0.3"]
SHELL = {
    "PATH": "/bin",
    "HOME": "/root",
    "CUDA_VISIBLE_DEVICES": "0",
    "NCCL_DEBUG": "INFO",
    **dict.fromkeys(SWITCHES, "off"),
}
# Settings of the user's, or of the image, with names like those of a launch.
SETTINGS = (
    *("OMPI_MCA_btl", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_ess_singleton_isolated", "OMPI_MCA_coll_hcoll_enable"),
    *("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_CC", "OMPI_MCA_orte_base_help_aggregate", "PMIX_MCA_gds", "PMIX_INSTALL_PREFIX"),
    *(
        "PRTE_MCA_plm_ssh_agent",
        "I_MPI_FABRICS",
        "MV2_USE_CUDA",
        "MPI_HOME",
        "VC_PATH",
        "SLURM_CONF",
        "AZURE_ML_WORKSPACE",
    ),
    *("TORCHELASTIC_ENABLE_FILE_TIMER", "AZUREML_STRATEGY_SCHEDULED_EVENTS", "AZUREML_STRATEGY_PLANNED"),
)
# What mpirun of Open MPI 4 and 5 sets, as processes of theirs have printed it.
OF_MPIRUN = (
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("OMPI_COMM_WORLD_NODE_RANK", "OMPI_WORLD_SIZE", "OMPI_WORLD_LOCAL_SIZE", "OMPI_UNIVERSE_SIZE", "OMPI_ARGV"),
    *("OMPI_NUM_APP_CTX", "OMPI_FIRST_RANKS", "OMPI_APP_CTX_NUM_PROCS", "OMPI_FILE_LOCATION", "OMPI_COMMAND"),
    *("OMPI_MCA_ess", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_ess_base_vpid", "OMPI_MCA_pmix", "OMPI_MCA_initial_wdir"),
    *("OMPI_MCA_num_procs", "OMPI_MCA_cpu_type", "OMPI_MCA_shmem_RUNTIME_QUERY_hint", "OMPI_MCA_mpi_oversubscribe"),
    *("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri", "OMPI_MCA_orte_app_num", "OMPI_MCA_orte_num_nodes"),
    *("OMPI_MCA_orte_launch", "OMPI_MCA_orte_tmpdir_base", "OMPI_MCA_orte_bound_at_launch"),
    *("OMPI_MCA_orte_precondition_transports", "OMPI_MCA_orte_top_session_dir", "OMPI_MCA_orte_jobfam_session_dir"),
    *("OMPI_MCA_orte_ess_num_procs", "OMPI_MCA_orte_ess_node_rank", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_VERSION"),
    *("PMIX_SERVER_URI41", "PMIX_SERVER_TMPDIR", "PMIX_SYSTEM_TMPDIR", "PMIX_SECURITY_MODE", "PMIX_GDS_MODULE"),
    *("PMIX_HOSTNAME", "PMIX_BFROP_BUFFER_TYPE", "PRTE_LAUNCHED"),
)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_shell_keeps_nothing_of_a_job(distribution: str) -> None:
    inside = SHELL | azure_variables(LAUNCH, distribution, ADDRESSES, RUN, 6105)
    assert without_job_variables(inside) == SHELL


def test_settings_of_the_users_stay() -> None:
    shell = SHELL | dict.fromkeys(SETTINGS, "mine")
    assert without_job_variables(shell) == shell
    of_other_jobs = dict.fromkeys((*OF_MPIRUN, "SLURM_JOB_ID", "PMI_RANK", "MPI_LOCALRANKID", "VC_TASK_INDEX"), "1")
    assert without_job_variables(shell | of_other_jobs) == shell


def test_only_an_mpirun_that_started_the_shell_has_set_variables_by_which_mpi_finds_it() -> None:
    mine = dict.fromkeys((name for name in OF_MPIRUN if name.startswith("OMPI_MCA_")), "mine")
    assert without_job_variables(mine) == mine


def test_paths_of_inputs_are_another_jobs_or_the_users() -> None:
    paths = {"AZURE_ML_INPUT_images": "/data", "AZURE_ML_OUTPUT_run": "/out"}
    assert without_job_variables(SHELL | paths) == SHELL | paths
    assert without_job_variables(SHELL | paths | {"AZUREML_RUN_ID": "other"}) == SHELL


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_job_is_the_emulated_run(distribution: str) -> None:
    variables = azure_variables(LAUNCH, distribution, ADDRESSES, RUN)
    job = read_job(variables)
    assert job is not None
    assert (job.run_id, job.experiment, job.attempt, job.priority) == ("quirky_plum", "resnet50", 0, "dedicated")
    assert variables["MLFLOW_RUN_ID"] == "quirky_plum"
    assert variables["MLFLOW_TRACKING_URI"] == "sqlite:///mlflow.db"


def test_two_nodes_without_a_distribution_block_are_refused_here_too() -> None:
    with pytest.raises(LaunchError, match="Add to the job"):
        detect_launch(azure_variables(LAUNCH, "none", ADDRESSES, RUN))


def test_one_node_without_a_distribution_block_has_no_launch() -> None:
    alone = Launch("none", 0, 1, 0, 1, 0, 1, "127.0.0.2", 6105)
    assert detect_launch(azure_variables(alone, "none", ADDRESSES[:1], RUN)) is None


@pytest.mark.parametrize("distribution", ["mpi", "tensorflow", "none"])
def test_only_pytorch_gives_torchs_variables(distribution: str) -> None:
    variables = azure_variables(LAUNCH, distribution, ADDRESSES, RUN)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} & variables.keys()


def test_the_traps_of_azure_ml_are_set_too() -> None:
    several = azure_variables(LAUNCH, "mpi", ADDRESSES, RUN)
    assert several["AZ_BATCH_MASTER_NODE"] == "127.0.0.2:6000"
    assert several["OMPI_COMM_WORLD_NODE_RANK"] == "1", "which is the local rank"
    one = azure_variables(Launch("mpi", 0, 1, 0, 1, 0, 1, "127.0.0.2", 6105), "mpi", ADDRESSES[:1], RUN)
    assert one["AZ_BATCHAI_MPI_MASTER_NODE"] == "localhost"
    assert "AZ_BATCH_MASTER_NODE" not in one


def test_a_distribution_that_azure_ml_lacks() -> None:
    with pytest.raises(KeyError):
        azure_variables(LAUNCH, "slurm", ADDRESSES, RUN)
