"""What others run: the batch script, the manifest, and the line for the shell of a host."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from click.testing import CliRunner

from miniray.cli.main import main
from miniray.launch.kubernetes import KubernetesJob, documents, manifest
from miniray.launch.slurm import script
from miniray.launch.ssh import SshRun

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = ("k8s", "manifest", "train", "--image", "app:1", "--secret", "s")
COMMAND = ("python", "train.py", "--name", "a b", "x: 'y' \"z\"\n- #w")


def test_a_script_asks_for_one_task_per_node_and_repeats_its_cpus_for_srun() -> None:
    text = script(COMMAND, nodes=4, cpus=16, gpus=8, time="8:00:00")
    first, *lines = text.splitlines()
    assert first == "#!/bin/bash"
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=16",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=8:00:00",
        "#SBATCH --signal=TERM@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]
    run = text[text.index("srun") :]
    assert shlex.split(run)[:6] == [
        *("srun", "--cpus-per-task=$SLURM_CPUS_PER_TASK", "miniray", "run"),
        *("--grace", "110"),
    ]
    assert tuple(shlex.split(run)[7:]) == COMMAND


def test_a_script_without_a_number_of_cpus_takes_whole_nodes() -> None:
    text = script(("true",), nodes=1)
    assert "#SBATCH --exclusive\n" in text
    assert 'srun --cpus-per-task="$SLURM_CPUS_ON_NODE" miniray run' in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("slurm", "script", "-N", "0"), "'--nodes': 0 is not in the range x>=1"),
        (("slurm", "script", "-N1", "--cpus-per-task", "0"), "0 is not in the range x>=1"),
        (("slurm", "script", "-N1", "--time", "1\n#SBATCH --x"), "time must be as Slurm takes it"),
        ((*MANIFEST, "--kind", "pod"), "'pod' is not one of 'job', 'jobset', 'lws'"),
        ((*MANIFEST, "--grace", "-1"), "'--grace': -1 is not in the range 0<=x"),
    ],
    ids=str,
)
def test_nothing_is_printed_that_a_scheduler_would_refuse_or_read_otherwise(
    words: tuple[str, ...], text: str
) -> None:
    refused = CliRunner().invoke(main, [*words, "--", "true"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert text in refused.stderr


def job(**changes: object) -> KubernetesJob:
    given = {"name": "train", "image": "r/app:1", "command": COMMAND, "secret": "train-token"}
    return KubernetesJob(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["job", "jobset", "lws"])
def test_a_manifest_is_read_as_it_was_meant(kind: str) -> None:
    wanted = job(nodes=4, cpus="8", memory="32Gi", gpus=8, queue="team", kind=kind)
    assert list(yaml.safe_load_all(manifest(wanted))) == documents(wanted)


VERSIONS = ["1.29", "1.31", "1.33", "1.35", "1.37"]
FULL: dict[str, object] = {"nodes": 4, "cpus": "8", "memory": "32Gi", "gpus": 8, "queue": "team"}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_manifest_is_what_kubernetes_knows(version: str) -> None:
    for document in documents(job(**FULL)):
        kubernetes_validate.validate(document, version, strict=True)


# There is no schema of the two kinds that others define: what is Kubernetes' own in them is
# validated as that, and the rest is compared with their fields.


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_set_holds_the_job_and_finds_its_first_pod_by_the_name_that_it_gives_it(
    version: str,
) -> None:
    (found,) = documents(job(**FULL, kind="jobset"))
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    spec = found["spec"]
    (replicated,) = spec.pop("replicatedJobs")
    assert spec == {
        "network": {"enableDNSHostnames": True, "subdomain": "train"},
        "failurePolicy": {"maxRestarts": 0},
        "suspend": True,
    }
    assert (replicated["replicas"], replicated["template"].keys()) == (1, {"spec"})
    inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    kubernetes_validate.validate(
        {**inner, "spec": replicated["template"]["spec"]}, version, strict=True
    )
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    # JobSet calls pods after itself, the job in it, which of its replicas that is, and the index.
    head = {each["name"]: each["value"] for each in container["env"]}["MINIRAY_HEAD"]
    assert head == f"train-{replicated['name']}-0-0.train:6379"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_leader_worker_set_is_one_group_and_tells_its_pods_their_places_itself(
    version: str,
) -> None:
    (found,) = documents(job(**FULL, kind="lws"))
    assert (found["apiVersion"], found["kind"]) == (
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
    )
    assert found["spec"].keys() == {"replicas", "leaderWorkerTemplate"}
    group = found["spec"]["leaderWorkerTemplate"]
    assert group.keys() == {"size", "restartPolicy", "workerTemplate"}
    assert (found["spec"]["replicas"], group["size"]) == (1, 4)
    pod = {"apiVersion": "v1", "kind": "Pod", **group["workerTemplate"]}
    kubernetes_validate.validate(pod, version, strict=True)
    assert pod["spec"]["restartPolicy"] == "Always"
    assert "env" not in pod["spec"]["containers"][0]


def test_a_manifest_holds_the_name_of_a_secret_and_no_secret() -> None:
    service, run = documents(job(nodes=3, grace=50))
    assert {service["kind"], run["kind"]} == {"Service", "Job"}
    pod = run["spec"]["template"]["spec"]
    assert pod["volumes"][0]["secret"] == {"secretName": "train-token", "defaultMode": 0o400}
    container = pod["containers"][0]
    assert {each["name"]: each["value"] for each in container["env"]} == {
        "MINIRAY_NODES": "3",
        "MINIRAY_HEAD": "train-0.train:6379",
    }
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["terminationGracePeriodSeconds"] == 60
    assert tuple(container["command"][-len(COMMAND) :]) == COMMAND
    mounted = container["volumeMounts"][0]["mountPath"]
    assert container["command"][2:4] == ["--authority", mounted]


@pytest.mark.parametrize("name", ["Train", "1a", "a.b", "a" * 51, "a-"])
def test_a_name_that_kubernetes_refuses_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"name must be of at most 50 small letters"):
        job(name=name)


def test_names_of_a_job_set_leave_room_for_what_it_adds() -> None:
    assert job(name="a" * 44, kind="jobset").name == "a" * 44
    with pytest.raises(ValueError, match="name must be of at most 44 small letters"):
        job(name="a" * 45, kind="jobset")


def test_the_line_for_a_host_is_one_for_shells_that_know_no_assignments_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    line = SshRun(("a",), COMMAND, python="/opt/my env/bin/python").remote_command(0)
    begin = f"""cd {tmp_path} 2>/dev/null; exec env PATH='/opt/my env/bin':"$PATH" """
    assert line.startswith(begin)
    words = shlex.split(line.removeprefix(begin))
    assert (words[0], tuple(words[-len(COMMAND) :])) == ("/opt/my env/bin/python", COMMAND)
    assert "PATH" not in SshRun(("a",), COMMAND, python="python3").remote_command(0)


def test_with_a_working_dir_the_first_host_alone_gets_its_files(tmp_path: Path) -> None:
    (tmp_path / "program.py").touch()
    run = SshRun(("a", "b"), COMMAND, working_dir=str(tmp_path))
    archive = run.archive(0)
    assert run.archive(1) == b""
    assert shlex.split(run.remote_command(0, archive))[:3] == ["exec", "sh", "-c"]
    assert f"unpack_input({len(archive)})" in run.remote_command(0, archive)
    here = SshRun(("a",), COMMAND, working_dir=str(tmp_path), here=True)
    assert here.archive(0) == b""
    assert COMMAND[0] not in shlex.split(here.remote_command(0))
