"""The REST of jobs: Ray's own client drives it, and nobody without the token."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import socket
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import wait_until
from page_client import PageClient
from running_cluster import running_cluster

from miniray.client.command_connection import connect_for_cli
from miniray.job_submission import JobStatus, JobSubmissionClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine("miniray")

#: What a user of Ray writes; the address and the token are arguments.
RAY_PROGRAM = """
import asyncio, os, sys, tempfile
from ray.job_submission import JobStatus, JobSubmissionClient
address, token = sys.argv[1:]
try:
    JobSubmissionClient(address).list_jobs()
    raise SystemExit("nobody may list jobs without the token")
except Exception as error:
    assert "401" in str(error) or "uthenti" in str(error), error
client = JobSubmissionClient(address, headers={"Authorization": "Bearer " + token})
folder = tempfile.mkdtemp()
open(os.path.join(folder, "hello.txt"), "w").write("from a file")
job = client.submit_job(
    entrypoint="cat hello.txt; echo; sleep 1; echo end of $NAME",
    runtime_env={"working_dir": folder, "env_vars": {"NAME": "it"}},
    metadata={"who": "me"},
    entrypoint_num_cpus=1,
)
async def follow():
    return [text async for text in client.tail_job_logs(job)]
log = "".join(asyncio.run(follow()))
assert log == "from a file\\nend of it\\n", log
assert client.get_job_status(job) == JobStatus.SUCCEEDED
details = client.get_job_info(job)
assert (details.submission_id, details.metadata) == (job, {"who": "me"}), details
assert client.get_job_logs(job) == log
assert job in [each.submission_id for each in client.list_jobs()]
other = client.submit_job(entrypoint="sleep 600", submission_id="mine")
assert client.stop_job(other)
while not client.get_job_status(other).is_terminal():
    pass
assert client.delete_job(other)
try:
    client.get_job_info(other)
    raise SystemExit("it was deleted")
except RuntimeError as error:
    assert "404" in str(error), error
print("all of it")
"""


@pytest.fixture(scope="module")
def page(session_root: Path) -> Iterator[PageClient]:
    """A client that shows the token, as programs do."""
    with running_cluster({"num_cpus": 2}, connect=False) as cluster:
        with contextlib.closing(connect_for_cli(cluster.address, "", None)) as connection:
            page = connection.page()
        client = PageClient(page.url.partition("://")[2].partition("/")[0])
        client.headers["Authorization"] = f"Bearer {page.token}"
        yield client


def test_rays_own_client_drives_the_server(page: PageClient) -> None:
    python = os.environ.get("RAY_PYTHON") or sys.executable
    if "RAY_PYTHON" not in os.environ and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed here, nor does RAY_PYTHON name an interpreter with it")
    token = page.headers["Authorization"].removeprefix("Bearer ")
    command = [python, "-c", RAY_PROGRAM, f"http://{page.address}", token]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all of it\n")


def test_what_rays_client_sends_is_answered_as_it_reads_it(
    page: PageClient, tmp_path: Path
) -> None:
    """The requests of Ray 2.60's client, as they were recorded."""
    assert page.ask("GET", "/api/version")[2]["ray_version"] >= "2"
    package = "_ray_pkg_0123456789abcdef.zip"
    assert page.ask("GET", f"/api/packages/gcs/{package}")[0] == 404
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("hello.txt", "hello")
    assert page.put(f"/api/packages/gcs/{package}", archive.getvalue()) == 200
    assert page.ask("GET", f"/api/packages/gcs/{package}")[0] == 200
    environment = {"working_dir": f"gcs://{package}", "_ray_commit": "x"}
    body = {"entrypoint": "cat hello.txt", "runtime_env": environment, "metadata": {}}
    status, _, answer = page.ask("POST", "/api/jobs/", body)
    assert (status, answer["job_id"]) == (200, answer["submission_id"])
    job = answer["submission_id"]
    wait_until(lambda: page.ask("GET", f"/api/jobs/{job}")[2]["status"] == "SUCCEEDED")
    assert page.ask("GET", f"/api/jobs/{job}/logs")[2] == {"logs": "hello"}
    assert page.ask("POST", f"/api/jobs/{job}/stop")[2] == {"stopped": False}
    assert page.ask("DELETE", f"/api/jobs/{job}")[2] == {"deleted": True}
    status, _, answer = page.ask("GET", f"/api/jobs/{job}")
    assert (status, job in answer["error"]) == (404, True)


def test_a_log_is_followed_over_a_websocket_until_the_job_has_ended(page: PageClient) -> None:
    entrypoint = "echo first; sleep 0.5; echo second; head -c 70000 /dev/zero | tr '\\0' x"
    job = page.ask("POST", "/api/jobs/", {"entrypoint": entrypoint})[2]["submission_id"]
    head, text, closing = followed(page, job, page.headers["Authorization"])
    assert "101 Switching Protocols" in head
    # As RFC 6455 says of this key.
    assert "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head
    assert text == "first\nsecond\n" + 70000 * "x"
    assert int.from_bytes(closing[:2], "big") == 1000
    assert " 401 " in followed(page, job, "Bearer no")[0]
    _, _, closing = followed(page, "no-such-job", page.headers["Authorization"])
    assert int.from_bytes(closing[:2], "big") == 1011
    assert b"no-such-job" in closing


def followed(page: PageClient, job: str, authorization: str) -> tuple[str, str, bytes]:
    """The head of the answer to an upgrade, the texts that come, and the last frame."""
    host, _, port = page.address.partition(":")
    request = (
        f"GET /api/jobs/{job}/logs/tail HTTP/1.1\r\nHost: {page.address}\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: {authorization}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), 20) as sock, sock.makefile("rb") as answer:
        sock.sendall(request.encode())
        head = "".join(iter(lambda: answer.readline().decode().rstrip("\r\n") + "\n", "\n"))
        text = b""
        while start := answer.read(2):
            kind, size = start[0] & 0xF, start[1]
            if size >= 126:
                size = int.from_bytes(answer.read(2 if size == 126 else 8), "big")
            content = answer.read(size)
            if kind == 8:
                return head, text.decode(), content
            text += content
    return head, text.decode(), b""


def test_what_cannot_be_submitted_is_said(page: PageClient) -> None:
    for body, words in (
        ({}, "entrypoint"),
        ({"entrypoint": "true", "metadata": {"a": 1}}, "metadata"),
        ({"entrypoint": "true", "runtime_env": 3}, "int"),
        ({"entrypoint": "true", "priority": 3}, "'priority'"),
        ({"entrypoint": "true", "runtime_env": {"working_dir": "gcs://no.zip"}}, "not uploaded"),
        ({"entrypoint": "true", "runtime_env": {"working_dir": "/etc"}}, "no package"),
    ):
        status, _, answer = page.ask("POST", "/api/jobs/", body)
        assert (status, words in answer["error"]) == (400, True), answer
    assert page.put("/api/packages/gcs/..%2f..%2fx.zip", b"") in (400, 404)


def test_minirays_client_takes_the_address_of_the_page(page: PageClient) -> None:
    client = JobSubmissionClient(f"http://{page.address}")
    job = client.submit_job(entrypoint="echo done")
    wait_until(lambda: client.get_job_status(job) == JobStatus.SUCCEEDED)
    assert client.get_job_logs(job) == "done\n"
    with pytest.raises(ValueError, match=f"pages here: http://{page.address}"):
        JobSubmissionClient("http://127.0.0.1:1")
