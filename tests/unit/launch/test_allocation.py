"""From the environment that a scheduler makes to the place of a host in a run."""

from __future__ import annotations

import pytest

from miniray.launch.allocation import (
    ALONE,
    AllocationError,
    HostAllocation,
    few_cpus,
    find_allocation,
)

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "3",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "prterun-n1-5@1",
}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}
JOB = {"JOB_COMPLETION_INDEX": "2", "MINIRAY_NODES": "3", "MINIRAY_HEAD": "train-0.train"}
LWS = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "x-0.x.default"}
SKY = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_TASK_ID": "sky-2026-11-24_train",
}
HAND = {"MINIRAY_INDEX": "1", "MINIRAY_NODES": "2", "MINIRAY_HEAD": "a:7000, b:7000"}

PLACES = {
    "nothing": ({}, ALONE),
    "slurm": (SLURM, HostAllocation("Slurm", 3, 4, run_id="slurm-77-2-0")),
    "slurm, requeued": (
        {**SLURM, "SLURM_RESTART_COUNT": "1"},
        HostAllocation("Slurm", 3, 4, run_id="slurm-77-2-1"),
    ),
    "slurm, with its name": (
        {**SLURM, "SLURM_CLUSTER_NAME": "alps"},
        HostAllocation("Slurm", 3, 4, run_id="slurm-alps-77-2-0"),
    ),
    "slurm, a step of some nodes": (
        {**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"},
        HostAllocation("Slurm", 1, 2, run_id="slurm-77-2-0"),
    ),
    "slurm, a second task of a node": (
        {**SLURM, "SLURM_LOCALID": "1"},
        HostAllocation("Slurm", 3, 4, run_id="slurm-77-2-0", local_rank=1),
    ),
    "slurm, with CPUs": (
        {**SLURM, "SLURM_JOB_CPUS_PER_NODE": "64(x3),16"},
        HostAllocation("Slurm", 3, 4, run_id="slurm-77-2-0", cpus=16),
    ),
    "slurm, the batch script of one node": ({"SLURM_JOB_ID": "1", "SLURM_NNODES": "1"}, ALONE),
    "open mpi": (OPEN_MPI, HostAllocation("Open MPI", 1, 2, run_id="Open_MPI-prterun-n1-5_1")),
    "open mpi 4": (
        {**OPEN_MPI, "PMIX_NAMESPACE": "", "OMPI_MCA_ess_base_jobid": "99"},
        HostAllocation("Open MPI", 1, 2, run_id="Open_MPI-99"),
    ),
    "open mpi in slurm": (
        {**SLURM, **OPEN_MPI},
        HostAllocation("Open MPI", 1, 2, run_id="Open_MPI-prterun-n1-5_1"),
    ),
    "mpich": (HYDRA, HostAllocation("MPI", 0, 2)),
    "mpich in pbs": (
        {**HYDRA, "PBS_JOBID": "12.pbs"},
        HostAllocation("MPI", 0, 2, run_id="MPI-12.pbs"),
    ),
    "mpich in slurm": ({**SLURM, **HYDRA}, HostAllocation("Slurm", 3, 4, run_id="slurm-77-2-0")),
    "kubernetes": (JOB, HostAllocation("Kubernetes", 2, 3, head=("train-0.train",))),
    "a job of other pods": ({"JOB_COMPLETION_INDEX": "2"}, ALONE),
    "lws": (LWS, HostAllocation("LeaderWorkerSet", 1, 2, head=("x-0.x.default",))),
    "skypilot": (
        SKY,
        HostAllocation(
            "SkyPilot", 1, 2, run_id="SkyPilot-sky-2026-11-24_train", head=("10.0.0.4",)
        ),
    ),
    "skypilot in slurm": (
        {**SLURM, **SKY},
        HostAllocation(
            "SkyPilot", 1, 2, run_id="SkyPilot-sky-2026-11-24_train", head=("10.0.0.4",)
        ),
    ),
    "by hand": (HAND, HostAllocation("by hand", 1, 2, head=("a:7000", "b:7000"))),
    "by hand in slurm": (
        {**SLURM, **HAND},
        HostAllocation("by hand", 1, 2, head=("a:7000", "b:7000")),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_environment_says_which_host_this_is(name: str) -> None:
    environment, expected = PLACES[name]
    assert find_allocation(environment) == expected


REFUSED = {
    "slurm without srun": (
        {"SLURM_JOB_ID": "1", "SLURM_NNODES": "4"},
        "You have 4 nodes and this runs on one: write `srun miniray run -- ...`.",
    ),
    "several of a host, open mpi": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        "4 processes of the run are on this host, and each starts a node: write `mpirun -N 1 ",
    ),
    "several of a host, mpich": ({**HYDRA, "MPI_LOCALNRANKS": "4"}, "`mpiexec -ppn 1 "),
    "no size": ({"MINIRAY_INDEX": "1"}, "MINIRAY_INDEX is set and MINIRAY_NODES is not"),
    "no index": ({"MINIRAY_NODES": "2"}, "Nothing says which of 2 hosts this is: give --index"),
    "no number": (
        {"MINIRAY_INDEX": "one", "MINIRAY_NODES": "2"},
        "MINIRAY_INDEX must be a whole number, not 'one'.",
    ),
    "not one of them": (
        {"MINIRAY_INDEX": "2", "MINIRAY_NODES": "2"},
        "this is host 2 of 2; the first is 0, the last 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_told_with_the_remedy(name: str) -> None:
    environment, text = REFUSED[name]
    with pytest.raises(AllocationError) as refused:
        find_allocation(environment)
    assert text in str(refused.value)


def test_one_cpu_of_sixty_four_is_told() -> None:
    place = HostAllocation("Slurm", 0, 1, run_id="x", cpus=64)
    assert "1 of the 64 CPUs" in few_cpus(place, 1)
    assert "srun --cpus-per-task=64 miniray run" in few_cpus(place, 1)
    assert few_cpus(place, 64) == ""
    assert few_cpus(ALONE, 1) == ""
