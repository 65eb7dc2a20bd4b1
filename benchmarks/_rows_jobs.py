"""Rows about submitted jobs: how long it takes from the submission to what the job prints."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _common import CPUS, Engine, Figure, row

LINE = "the first line"
TO_START = 60.0


def _client(engine: Engine) -> tuple[Any, str]:
    """Start a cluster that takes jobs; return a client of it, and its address."""
    if engine.name == "ray":
        context = engine.api.init(address="local", num_cpus=CPUS, include_dashboard=True)
        address = f"http://{context.dashboard_url}"
    else:
        engine.start_nodes([{"num_cpus": CPUS}])
        address = engine.cluster.address
    client = engine.module("job_submission").JobSubmissionClient(address)
    deadline = time.monotonic() + TO_START
    while not _takes_jobs(client) and time.monotonic() < deadline:
        time.sleep(0.2)
    return client, address


def _takes_jobs(client: Any) -> bool:
    """Run a first job, which is not measured; Ray's agents start beside the cluster."""
    try:
        _by_client(client)
    except RuntimeError:
        return False
    return True


async def _first_text(client: Any, job: str) -> None:
    async for text in client.tail_job_logs(job):
        if LINE in text:
            return


def _by_client(client: Any) -> float:
    start = time.perf_counter()
    job = client.submit_job(entrypoint=f"echo {LINE}")
    asyncio.run(_first_text(client, job))
    return time.perf_counter() - start


def _by_command(engine: Engine, address: str) -> float:
    command = str(Path(sys.executable).parent / engine.name)
    start = time.perf_counter()
    with subprocess.Popen(
        [command, "job", "submit", "--address", address, "--", "echo", *LINE.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as submitting:
        assert submitting.stdout is not None
        # Ray's command repeats the entrypoint before.
        next(line for line in submitting.stdout if line.strip() == LINE)
        elapsed = time.perf_counter() - start
        submitting.stdout.read()
    return elapsed


@row(
    "job",
    Figure("job submitted by the client, to the first line of its log", "s", 0.5),
    Figure("the command `job submit`, to the first line of the job's log", "s"),
    limit=180,
)
def job(engine: Engine) -> tuple[float, float]:
    client, address = _client(engine)
    return _by_client(client), _by_command(engine, address)
