"""What the printed script and manifest say is done here as Slurm and Kubernetes would do it."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest
from launch_helpers import PATIENCE, SHOW_RANKS
from ports import free_ports

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from command_helpers import CommandLine

#: Stands for srun: starts the command once per node, as the variables say.
SRUN = """#!/bin/sh
shift   # --cpus-per-task
for node in 1 0; do
    SLURM_STEP_ID=0 SLURM_NODEID=$node SLURM_LOCALID=0 MINIRAY_MACHINE_ID=n$node "$@" &
done
first=$!
wait $first; code=$?
wait
exit $code
"""


def test_the_printed_script_runs_the_program_on_all_nodes(
    command: CommandLine, tmp_path: Path
) -> None:
    printed = command.run("slurm", "script", "-N", "2", "--", sys.executable, "-c", SHOW_RANKS, "5")
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "job.sbatch").write_text(printed.stdout)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    job = command.popen(
        *("bash", str(tmp_path / "job.sbatch")),
        variables={
            "PATH": f"{tmp_path}{os.pathsep}{command.environment['PATH']}",
            "HOME": str(tmp_path),
            "SLURM_JOB_ID": "12",
            "SLURM_NNODES": "2",
            "SLURM_CPUS_ON_NODE": "1",
        },
    )
    output, _ = job.communicate(timeout=PATIENCE)
    assert (job.returncode, output) == (5, "['0', '1']\n")
    assert list((tmp_path / ".miniray/run").iterdir()) == []
    command.leaves_nothing()


@pytest.mark.parametrize(
    ("order", "kind"),
    [((0, 1), "job"), ((1, 0), "job"), ((1, 0), "jobset"), ((1, 0), "lws")],
    ids=["first pod first", "first pod last", "of a JobSet", "of a LeaderWorkerSet"],
)
def test_the_pods_of_a_manifest_become_one_cluster(
    command: CommandLine, tmp_path: Path, order: tuple[int, int], kind: str
) -> None:
    """Each pod is a process here; its Secret is a folder, and the name of the first localhost."""
    yaml = pytest.importorskip("yaml")
    assert command.run("token", "new", str(tmp_path / "secret")).returncode == 0
    printed = command.run(
        *("k8s", "manifest", "train", "--image", "app:1", "--secret", "train", "--nodes", "2"),
        *("--kind", kind, "--", sys.executable, "-c", SHOW_RANKS, "5"),
    )
    assert printed.returncode == 0, printed.stderr
    spec = list(yaml.safe_load_all(printed.stdout))[-1]["spec"]
    if kind == "jobset":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    group = spec.get("leaderWorkerTemplate", {})
    pod = (spec["template"] if kind != "lws" else group["workerTemplate"])["spec"]
    (container,) = pod["containers"]
    mounted = container["volumeMounts"][0]["mountPath"]
    program = [
        str(tmp_path / "secret") if word == mounted else word for word in container["command"]
    ]
    variables = {each["name"]: each["value"] for each in container.get("env", [])}
    first = {"job": "train-0", "jobset": "train-run-0-0"}
    head = f"localhost:{free_ports(1)[0]}"
    if kind != "lws":
        assert variables["MINIRAY_HEAD"] == f"{first[kind]}.train:6379"
        variables["MINIRAY_HEAD"] = head
    pods: dict[int, subprocess.Popen[str]] = {}
    for index in order:
        own = {"JOB_COMPLETION_INDEX": str(index)}
        if kind == "lws":
            own = {"LWS_WORKER_INDEX": str(index), "LWS_GROUP_SIZE": str(group["size"])}
            own["LWS_LEADER_ADDRESS"] = head
        own["MINIRAY_MACHINE_ID"] = f"pod{index}"
        pods[index] = command.popen(*program, variables={**variables, **own})
    outputs = {index: each.communicate(timeout=PATIENCE)[0] for index, each in pods.items()}
    assert outputs == {0: "['0', '1']\n", 1: ""}, json.dumps(outputs)
    assert [pods[0].returncode, pods[1].returncode] == [5, 0]
    command.leaves_nothing()
