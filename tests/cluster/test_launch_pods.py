"""The pods of a printed manifest as Kubernetes makes them, the first one's name known late.

Each has a network, a host name, processes and a mounted Secret of its own.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from cluster_helpers import processes_with, undisturbed_clock, wait_for_file, wait_until
from launch_helpers import LOOKS_AND_SHOWS, PATIENCE, SAVES_AT_SIGTERM
from ssh_hosts import HOSTS, Network, network

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from command_helpers import CommandLine

PYTHON = sys.executable
#: What a kubelet does before it starts the container's command as the first process of the pod.
POD = """
hostname "$POD"
mount -t tmpfs none /run
mkdir -p /run/secrets/miniray /run/own
mount --bind "$SECRET" /run/secrets/miniray
mount --bind "$NAMES" /etc/hosts
unset SECRET NAMES
exec "$@"
"""
APART = ("unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
NO_NAMES = "127.0.0.1 localhost\n"


class Pods:
    """The pods of one Job."""

    def __init__(self, command: CommandLine, hosts: Network, folder: Path) -> None:
        self._command, self._hosts = command, hosts
        self._secret, self._names = folder / "secret", folder / "names"
        self._running: list[subprocess.Popen[str]] = []
        assert command.run("token", "new", str(self._secret)).returncode == 0
        for path in self._secret.iterdir():
            path.chmod(0o400)
        self.seconds_to_end = 0

    def start(self, *program: str, grace: int = 30) -> None:
        """Start all pods; where the first one is found is told when its head runs."""
        yaml = pytest.importorskip("yaml")
        self._names.write_text(NO_NAMES)
        printed = self._command.run(
            *("k8s", "manifest", "train", "--image", "app:1", "--secret", "train"),
            *("--nodes", str(len(HOSTS)), "--grace", str(grace), "--", *program),
        )
        assert printed.returncode == 0, printed.stderr
        pod = list(yaml.safe_load_all(printed.stdout))[1]["spec"]["template"]["spec"]
        self.seconds_to_end = pod["terminationGracePeriodSeconds"]
        (container,) = pod["containers"]
        variables = {each["name"]: each["value"] for each in container["env"]}
        for index, host in reversed(list(enumerate(HOSTS))):
            own = {"JOB_COMPLETION_INDEX": str(index), "POD": f"train-{index}"}
            mounts = {"SECRET": str(self._secret), "NAMES": str(self._names)}
            self._running.insert(
                0,
                self._command.popen(
                    *(
                        "ip",
                        "netns",
                        "exec",
                        self._hosts.space(host),
                        *APART,
                        "sh",
                        "-ec",
                        POD,
                        "sh",
                    ),
                    *container["command"],
                    variables={**variables, **own, **mounts, "MINIRAY_TMPDIR": "/run/own"},
                ),
            )
        first = self._first_process(0)
        wait_until(lambda: list(Path(f"/proc/{first}/root/run/own").glob("*/clusters/*.json")))
        self._names.write_text(f"{NO_NAMES}{HOSTS['hosta']} train-0.train\n")

    def _first_process(self, index: int) -> int:
        found = psutil.Process(self._running[index].pid)
        wait_until(found.children)
        return found.children()[0].pid

    def signal(self, number: signal.Signals) -> None:
        """Do as the kubelets of all pods: the first process gets the signal."""
        for index in range(len(self._running)):
            psutil.Process(self._first_process(index)).send_signal(number)

    def kill_first(self) -> None:
        """Do as the kubelet of the first pod when the grace is over."""
        psutil.Process(self._first_process(0)).kill()

    def ends(self) -> list[tuple[int, str]]:
        """Wait for the end of all; return exit codes and output."""
        outputs = [pod.communicate(timeout=PATIENCE)[0] for pod in self._running]
        return [(pod.returncode, text) for pod, text in zip(self._running, outputs, strict=True)]

    def kill(self) -> None:
        """End what a failed test has left."""
        for pod in self._running:
            with contextlib.suppress(ProcessLookupError):
                pod.kill()
            pod.communicate(timeout=PATIENCE)
        for index in range(len(HOSTS)):
            wait_until(lambda index=index: not processes_with("POD", f"train-{index}"))  # type: ignore[misc]


@pytest.fixture
def pods(command: CommandLine, tmp_path: Path) -> Iterator[Pods]:
    with network(tmp_path, command.environment, {}, servers=False) as found:
        made = Pods(command, found, tmp_path)
        yield made
        made.kill()


def test_pods_find_each_other_by_a_name_that_comes_late_and_show_nobody_the_secret(
    pods: Pods,
) -> None:
    pods.start(PYTHON, "-c", LOOKS_AND_SHOWS, "7")
    assert pods.ends() == [(7, "0 0\n['0', '1']\n"), (0, "")]


def test_pods_that_are_deleted_hold_until_the_program_has_saved(pods: Pods, tmp_path: Path) -> None:
    pods.start(PYTHON, "-c", SAVES_AT_SIGTERM, str(tmp_path))
    wait_for_file(tmp_path / "running")
    pods.signal(signal.SIGTERM)
    assert [code for code, _ in pods.ends()] == [5, 0]
    assert (tmp_path / "checkpoint").read_text() == "saved on the other host"


def test_when_the_first_pod_is_killed_the_others_end_and_the_job_has_failed(
    pods: Pods, tmp_path: Path
) -> None:
    pods.start("sh", "-c", f"echo > {tmp_path / 'running'}; exec sleep 600")
    wait_for_file(tmp_path / "running")
    killed = undisturbed_clock()
    pods.kill_first()
    (first, _), (other, text) = pods.ends()
    assert (first != 0, other) == (True, 1), text
    assert undisturbed_clock() - killed < pods.seconds_to_end


def test_a_program_that_does_not_end_is_killed_by_its_run_before_kubernetes_does_it(
    pods: Pods, tmp_path: Path
) -> None:
    ignores = f"trap '' TERM; echo > {tmp_path / 'running'}; while :; do sleep .1; done"
    pods.start("sh", "-c", ignores, grace=1)
    wait_for_file(tmp_path / "running")
    asked = undisturbed_clock()
    pods.signal(signal.SIGTERM)
    assert [code for code, _ in pods.ends()] == [128 + signal.SIGKILL, 0]
    assert undisturbed_clock() - asked < pods.seconds_to_end
