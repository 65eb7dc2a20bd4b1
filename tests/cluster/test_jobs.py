"""Jobs that are submitted to a cluster with the command `miniray job`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import is_alive, wait_for_text, wait_until
from command_helpers import CommandLine, one_line
from job_helpers import details, log_of, submit, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def cluster() -> Iterator[CommandLine]:
    """The command line of a user with a cluster of one node."""
    root = Path(tempfile.mkdtemp(prefix="mr-cl-", dir="/tmp"))
    command = CommandLine(root)
    command.start_head("--num-cpus", "4")
    yield command
    command.run("stop", "--force", "--include-programs")
    command.leaves_nothing()
    shutil.rmtree(root)


def test_submit_shows_what_the_command_prints_and_exits_with_its_code(
    cluster: CommandLine,
) -> None:
    done = cluster.run("job", "submit", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert done.stdout == "out\nerr\n"
    assert done.returncode == 7
    assert "Its command exited with code 7." in done.stderr


def test_the_command_is_run_as_it_is_given_and_never_through_a_shell(cluster: CommandLine) -> None:
    words = ["a  b", "$HOME", "'", "--num-cpus", "*"]
    done = cluster.run("job", "submit", "--", "printf", r"%s\n", *words)
    assert done.stdout.splitlines() == words


def test_a_shell_runs_what_asks_for_one(cluster: CommandLine) -> None:
    done = cluster.run("job", "submit", "--shell", "echo a && exit 3")
    assert (done.stdout, done.returncode) == ("a\n", 3)
    assert "one argument" in one_line(cluster.run("job", "submit", "--shell", "echo", "a"))


@pytest.mark.parametrize(("program", "code"), [("/etc/passwd", 126), ("no-such-program", 127)])
def test_a_command_that_cannot_be_run_says_so_in_its_log(
    cluster: CommandLine, program: str, code: int
) -> None:
    done = cluster.run("job", "submit", "--", program)
    assert done.returncode == code
    assert f"the command {program!r} cannot be run" in done.stdout


def test_a_signal_that_ends_the_command_is_in_the_exit_code_and_in_the_status(
    cluster: CommandLine,
) -> None:
    name = submit(cluster, "--", "sh", "-c", "kill -USR1 $$")
    found = wait_for(cluster, name, "FAILED")
    assert found["driver_exit_code"] == -10
    assert "SIGUSR1" in found["message"]
    assert cluster.run("job", "logs", "-f", name).returncode == 138


def test_a_command_that_fails_is_an_event_and_one_that_has_done_its_work_is_none(
    cluster: CommandLine,
) -> None:
    names = [f"event-{uuid.uuid4().hex}" for _ in range(2)]
    for name, code in zip(names, ("0", "5"), strict=True):
        done = cluster.run("job", "submit", "--id", name, "--", "sh", "-c", f"exit {code}")
        assert done.returncode == int(code)
    told = json.loads(cluster.run("list", "events", "--json", "--limit", "1000").stdout)
    crashes = [each["message"] for each in told if each["event_type"] == "crashed"]
    assert not any(names[0] in message for message in crashes)
    assert any(names[1] in message for message in crashes)


DRIVER = """
import json, os, sys
import miniray

miniray.init()

@miniray.remote
def there():
    return os.environ.get("FLAVOUR"), open("here.txt").read()

print(json.dumps(miniray.get(there.remote())))
"""


def test_a_driver_finds_its_cluster_and_belongs_to_its_job(
    cluster: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(DRIVER)
    (tmp_path / "here.txt").write_text("a file")
    done = cluster.run(
        *("job", "submit", "--id", "training", "--working-dir", str(tmp_path)),
        *("--env", "FLAVOUR=mint", "--metadata", "team=vision", "--", "python", "train.py"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == ["mint", "a file"]
    found = details(cluster, "training")
    assert found["metadata"] == {"team": "vision"}
    assert found["driver_info"]["id"] == found["job_id"]
    listed = cluster.python(
        "import json; from miniray.util.state import get_job; import sys;"
        "print(json.dumps(get_job(sys.argv[1]).asdict()))",
        found["job_id"],
    )
    assert listed["metadata"] == {"team": "vision", "job_submission_id": "training"}


def test_a_job_that_waits_says_why_and_begins_when_there_is_room(cluster: CommandLine) -> None:
    holder = submit(cluster, "--num-cpus", "3", "--", "sleep", "100")
    wait_for(cluster, holder, "RUNNING")
    name = submit(cluster, "--num-cpus", "2", "--", "true")
    found = details(cluster, name)
    assert found["status"] == "PENDING"
    assert "needs CPU 2" in found["message"]
    assert name in cluster.run("status").stdout
    assert cluster.run("job", "stop", holder).returncode == 0
    assert wait_for(cluster, name, "SUCCEEDED")["message"] is None
    never = submit(cluster, "--num-cpus", "50", "--", "true")
    assert "the largest node" in details(cluster, never)["message"]
    assert cluster.run("job", "stop", never).stdout == f"Job {never} is STOPPED.\n"


STUBBORN = """
import os, signal, subprocess, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:  # a daemon, as far as it can
        open(sys.argv[1], "w").write(str(os.getpid()))
        while True:
            time.sleep(100)
    os._exit(0)
print("begun", flush=True)
while True:
    time.sleep(100)
"""


def test_stop_kills_a_command_that_ignores_sigterm_and_what_it_has_made_a_daemon(
    cluster: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    pid_file = tmp_path / "pid"
    other = submit(cluster, "--", "sleep", "1000")
    name = submit(cluster, "--", "python", str(tmp_path / "stubborn.py"), str(pid_file))
    daemon = int(wait_for_text(pid_file))
    wait_until(lambda: log_of(cluster, name) == "begun\n")
    assert cluster.run("job", "stop", "--grace", "0.3", name).stdout == f"Job {name} is STOPPED.\n"
    assert not is_alive(daemon)
    assert details(cluster, name)["driver_exit_code"] == -9
    assert details(cluster, other)["status"] == "RUNNING"
    cluster.run("job", "stop", other)


def test_a_shells_child_has_the_whole_grace_to_end(cluster: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), print('saved'), sys.exit()))\n"
        "print('begun', flush=True)\n"
        "time.sleep(100)\n"
    )
    name = submit(cluster, "--shell", f"python {tmp_path}/slow.py; echo never")
    wait_until(lambda: log_of(cluster, name) == "begun\n")
    assert cluster.run("job", "stop", name).stdout == f"Job {name} is STOPPED.\n"
    assert log_of(cluster, name) == "begun\nsaved\n"


ACTORS = """
import os, time
import miniray

@miniray.remote
class Thing:
    def pid(self):
        return os.getpid()

miniray.init(namespace="things")
plain, lasting = Thing.remote(), Thing.options(name="lasting", lifetime="detached").remote()
print(*miniray.get([plain.pid.remote(), lasting.pid.remote()]))
time.sleep(1000)
"""


def test_stop_ends_the_jobs_actors_and_names_the_detached_ones_which_go_on(
    cluster: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "actors.py").write_text(ACTORS)
    name = submit(cluster, "--", "python", str(tmp_path / "actors.py"))
    wait_until(lambda: log_of(cluster, name).endswith("\n"))  # each number comes by itself
    plain, lasting = map(int, log_of(cluster, name).split())
    done = cluster.run("job", "stop", name)
    assert "Its detached actors go on: lasting." in done.stdout
    wait_until(lambda: not is_alive(plain))
    assert is_alive(lasting)
    cluster.python(
        "import miniray; miniray.init(namespace='things');"
        "miniray.kill(miniray.get_actor('lasting')); print(1)"
    )


def test_what_a_command_leaves_behind_ends_with_it(cluster: CommandLine, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    name = submit(cluster, "--shell", f"sleep 1000 & echo $! > {pid_file}")
    wait_for(cluster, name, "SUCCEEDED")
    assert not is_alive(int(pid_file.read_text()))


def test_the_same_submission_twice_is_one_job_and_another_one_is_refused(
    cluster: CommandLine, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    for _ in range(2):
        done = cluster.run("job", "submit", "--id", "once", "--shell", f"echo run | tee -a {runs}")
        assert (done.stdout, done.returncode) == ("run\n", 0)
    assert runs.read_text() == "run\n"
    refused = one_line(cluster.run("job", "submit", "--id", "once", "--", "true"))
    assert "taken by another job" in refused
    assert "['true']" in refused


@pytest.mark.parametrize("subcommand", ["status", "logs", "stop", "delete"])
def test_an_unknown_job_is_an_error_of_every_command(cluster: CommandLine, subcommand: str) -> None:
    assert "no submitted job 'nobody'" in one_line(cluster.run("job", subcommand, "nobody"))


@pytest.mark.parametrize("name", ["../up", ".hidden", "", "a/b", "x" * 129, "new\nline"])
def test_an_id_that_no_file_may_have_is_refused(cluster: CommandLine, name: str) -> None:
    done = cluster.run("job", "submit", "--no-wait", "--id", name, "--", "true")
    assert "letters, digits" in one_line(done)


def test_a_job_can_be_deleted_once_it_has_ended(cluster: CommandLine) -> None:
    name = submit(cluster, "--", "sleep", "1000")
    wait_for(cluster, name, "RUNNING")
    assert "Stop it first" in one_line(cluster.run("job", "delete", name))
    cluster.run("job", "stop", name)
    log = next(iter(cluster.sessions())) / "logs" / "jobs" / f"{name}.log"
    assert cluster.run("job", "delete", name).stdout == f"Job {name} is deleted.\n"
    assert not log.exists()
    assert "no submitted job" in one_line(cluster.run("job", "status", name))


def test_the_list_has_what_waits_or_runs_and_with_all_what_has_ended(cluster: CommandLine) -> None:
    name = submit(cluster, "--", "sleep", "1000")
    ended = submit(cluster, "--", "true")
    wait_for(cluster, ended, "SUCCEEDED")
    listed = cluster.run("job", "list").stdout
    assert name in listed
    assert ended not in listed
    everything = json.loads(cluster.run("job", "list", "--all", "--json").stdout)
    states = {each["submission_id"]: each["status"] for each in everything}
    assert states[ended] == "SUCCEEDED"
    cluster.run("job", "stop", name)


def test_no_secret_is_in_the_environment_of_a_job(cluster: CommandLine) -> None:
    variables = cluster.run("job", "submit", "--", "env").stdout
    token = next(iter(cluster.sessions())) / "token"
    assert "MINIRAY_JOB_ID=" in variables
    assert "TOKEN" not in variables
    assert token.read_text().strip().rpartition(".")[2] not in variables


def test_variables_come_from_a_file_too(cluster: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "variables"
    file.write_text("# what it needs\n\n ONE=from the file\nTWO=not this\n")
    options = ("--env-file", str(file), "--env", "TWO=but this")
    done = cluster.run("job", "submit", *options, "--shell", "echo $ONE, $TWO")
    assert done.stdout == "from the file, but this\n"
    file.write_text("# a key\nKEY=first\nand second line")
    told = one_line(cluster.run("job", "submit", *options, "--", "env"))
    assert "Line 3 of --env-file is no NAME=VALUE." in told
    assert "second line" not in told


def test_variables_of_an_environment_are_a_dict_or_none(cluster: CommandLine) -> None:
    submit = ("job", "submit", "--env", "ONE=1", "--runtime-env-json")
    refused = cluster.run(*submit, '{"env_vars": 3}', "--", "true")
    assert "runtime_env['env_vars'] must be a dict of strings, not 3 (int)" in one_line(refused)
    done = cluster.run(*submit, '{"env_vars": null}', "--shell", "echo $ONE")
    assert done.stdout == "1\n"


def test_a_secret_of_a_job_reaches_its_command_and_is_not_shown(cluster: CommandLine) -> None:
    options = ["--env", "OTHER=given", "--runtime-env-json", '{"env_vars": {"THIRD": "too"}}']
    options += [word for name in ("KEY", "OTHER", "THIRD") for word in ("--secret", name)]
    program = ("--id", "secretive", "--shell", "echo $KEY $OTHER $THIRD")
    here = {"KEY": "of here", "THIRD": "not this"}
    done = cluster.run("job", "submit", *options, *program, **here)
    assert done.stdout == "of here given too\n"
    listed = details(cluster, "secretive")["runtime_env"]["env_vars"]
    assert listed == {"KEY": "***", "OTHER": "***", "THIRD": "***"}
    assert "no variable of that name" in one_line(
        cluster.run("job", "submit", "--secret", "NOT_SET_HERE", "--", "true")
    )


def test_logs_of_the_last_seconds_leave_out_what_came_before(cluster: CommandLine) -> None:
    name = submit(cluster, "--shell", "echo old; sleep 1.5; echo new")
    wait_for(cluster, name, "SUCCEEDED")
    assert cluster.run("job", "logs", "--since", "1h", name).stdout == "old\nnew\n"
    assert cluster.run("job", "logs", "--since", "0s", "-f", name).stdout == ""


def test_devices_of_a_job_are_those_that_its_command_sees() -> None:
    root = Path(tempfile.mkdtemp(prefix="mr-cl-", dir="/tmp"))
    command = CommandLine(root)
    try:
        command.start_head("--num-gpus", "2")
        show = "echo $CUDA_VISIBLE_DEVICES"
        holder = submit(command, "--num-gpus", "1", "--shell", f"{show}; sleep 1000")
        wait_until(lambda: log_of(command, holder) == "0\n")
        done = command.run("job", "submit", "--num-gpus", "0.5", "--shell", show)
        assert done.stdout == "1\n"
    finally:
        command.run("stop", "--force", "--include-programs")
        command.leaves_nothing()
        shutil.rmtree(root)


EMBEDDED = """
import miniray
from miniray.job_submission import JobSubmissionClient

address = miniray.init(address="local").address_info["address"]
JobSubmissionClient(address).submit_job(entrypoint="true")
"""


def test_a_cluster_of_one_program_takes_no_jobs(cluster: CommandLine) -> None:
    error = cluster.failing_python(EMBEDDED)
    assert "JobError" in error
    assert "miniray start --head" in error


def test_a_job_has_the_interpreter_of_its_node(cluster: CommandLine) -> None:
    done = cluster.run(
        "job", "submit", "--", "python", "-c", "import miniray, os; print(os.getpid())"
    )
    assert done.returncode == 0
    assert int(done.stdout) != os.getpid()


def test_a_command_that_fails_runs_again_as_often_as_it_may(
    cluster: CommandLine, tmp_path: Path
) -> None:
    tries = tmp_path / "tries"
    fail_twice = f"echo x >> {tries}; wc -l < {tries}; test $(wc -l < {tries}) -gt 2"
    done = cluster.run("job", "submit", "--retries", "2", "--shell", fail_twice)
    assert done.returncode == 0
    numbers = [line for line in done.stdout.splitlines() if line.isdigit()]
    assert numbers == ["1", "2", "3"]
    assert done.stdout.count("Its command exited with code 1. The job starts again.") == 2
    tries.unlink()
    assert cluster.run("job", "submit", "--retries", "1", "--shell", fail_twice).returncode == 1
    assert tries.read_text() == "x\n" * 2


def test_a_command_that_runs_for_too_long_is_ended_and_that_is_said(cluster: CommandLine) -> None:
    done = cluster.run("job", "submit", "--max-time", "0.3s", "--", "sleep", "1000")
    assert done.returncode == 128 + 15
    assert "FAILED. It was ended after 0.3 s" in done.stderr


def test_a_job_that_was_ended_for_its_time_has_failed_whatever_its_command_exits_with(
    cluster: CommandLine,
) -> None:
    saves = "trap 'exit 0' TERM; echo begun; sleep 1000 & wait"
    done = cluster.run("job", "submit", "--max-time", "2s", "--shell", saves)
    assert (done.returncode, done.stdout) == (1, "begun\n"), done.stderr
    assert "FAILED. It was ended after 2 s" in done.stderr


def test_on_rays_cluster_the_command_says_what_to_run_instead(cluster: CommandLine) -> None:
    assert "ray job submit" in one_line(cluster.run("job", "list", MINIRAY_ENGINE="ray"))
