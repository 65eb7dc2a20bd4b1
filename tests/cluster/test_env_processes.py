"""Runtime environments that pip makes, and builders of them that end too early."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from open_files import locked_files
from tiny_wheel import tiny_wheel

from miniray.exceptions import RuntimeEnvSetupError
from miniray.runtime_env.cache import FolderCache
from miniray.runtime_env.install import EnvironmentManager

REPOSITORY = Path(__file__).parents[2]
JOB = b"of a job"


async def nothing_to_fetch(uri):
    raise AssertionError(uri)


def pip_entry(*packages, **fields):
    return {"pip": {"packages": [str(item) for item in packages], "pip_check": False, **fields}}


def run_python(environment, code):
    return subprocess.run(
        [environment.python, "-c", code],
        env={**os.environ, **environment.env_vars},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


async def fill(folder, lock, size=1000):
    (folder / "content").write_bytes(b"x" * size)


def test_a_builder_that_is_killed_leaves_nothing_that_looks_finished(tmp_path):
    program = textwrap.dedent(
        """
        import asyncio, sys
        from pathlib import Path
        from miniray.runtime_env.cache import FolderCache

        async def build(folder, lock):
            (folder / "half").write_text("built")
            print("building", flush=True)
            await asyncio.Event().wait()

        asyncio.run(FolderCache(Path(sys.argv[1]), 0).acquire("a", build))
        """
    )
    builder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    with builder:
        assert builder.stdout.readline() == b"building\n"
        builder.send_signal(signal.SIGKILL)

    async def main():
        cache = FolderCache(tmp_path, 10**6)
        folder = await cache.acquire("a", fill)
        assert sorted(path.name for path in folder.iterdir()) == ["content"]
        await cache.close()

    assert (tmp_path / "a" / "half").exists()
    asyncio.run(main())


def test_a_virtual_environment_has_its_packages_and_those_of_the_daemon(tmp_path):
    wheel = tiny_wheel(tmp_path)

    async def main():
        manager = EnvironmentManager(tmp_path / "cache", tmp_path / "jobs")
        environment = await manager.prepare(pip_entry(wheel), JOB, nothing_to_fetch)
        assert environment.fresh_interpreter
        code = "import tiny, miniray, cloudpickle, grpc, shutil, sys; print(tiny.VALUE, sys.prefix)"
        value, prefix = run_python(environment, code).split()
        assert value == "1"
        assert prefix == environment.env_vars["VIRTUAL_ENV"]
        assert environment.env_vars["PATH"].startswith(f"{prefix}/bin:")
        again = await manager.prepare(pip_entry(wheel), JOB, nothing_to_fetch)
        assert again == environment
        await manager.close()

    asyncio.run(main())


def test_pip_is_configured_by_the_variables_of_the_environment(tmp_path):
    tiny_wheel(tmp_path, value=7)
    spec = pip_entry("tiny", pip_check=False) | {
        "env_vars": {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    }

    async def main():
        manager = EnvironmentManager(tmp_path / "cache", tmp_path / "jobs")
        environment = await manager.prepare(spec, JOB, nothing_to_fetch)
        assert run_python(environment, "import tiny; print(tiny.VALUE)") == "7"
        await manager.close()

    asyncio.run(main())


def test_a_failed_install_shows_the_end_of_the_output_of_pip(tmp_path):
    spec = pip_entry("no-such-package-here", pip_install_options=["--no-index"])

    async def main():
        manager = EnvironmentManager(tmp_path / "cache", tmp_path / "jobs")
        with pytest.raises(
            RuntimeEnvSetupError, match="No matching distribution found for no-such"
        ):
            await manager.prepare(spec, JOB, nothing_to_fetch)
        await manager.close()

    asyncio.run(main())
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_passwords_in_requirements_are_in_no_message_and_no_file(tmp_path):
    where = "127.0.0.1:9/simple"
    spec = pip_entry(
        f"tiny @ https://me:hunter2@{where}/tiny.whl",
        pip_install_options=["--retries=0", f"--index-url=https://token:s3cret@{where}"],
    )

    async def main():
        manager = EnvironmentManager(tmp_path / "cache", tmp_path / "jobs")
        with pytest.raises(RuntimeEnvSetupError) as failed:
            await manager.prepare(spec, JOB, nothing_to_fetch)
        await manager.close()
        return str(failed.value)

    told = asyncio.run(main())
    assert "https://me:***@127.0.0.1" in told
    assert "hunter2" not in told
    assert "s3cret" not in told


def test_pip_check_finds_a_requirement_that_is_missing(tmp_path):
    wheel = tiny_wheel(tmp_path, requires="Requires-Dist: no-such-package-here\n")
    spec = pip_entry(wheel, pip_check=True, pip_install_options=["--no-index", "--no-deps"])

    async def main():
        manager = EnvironmentManager(tmp_path / "cache", tmp_path / "jobs")
        with pytest.raises(RuntimeEnvSetupError, match="requires no-such-package-here"):
            await manager.prepare(spec, JOB, nothing_to_fetch)
        await manager.close()

    asyncio.run(main())


def test_a_cancelled_install_is_killed_with_its_children_and_leaves_no_files(tmp_path, monkeypatch):
    source = tmp_path / "slow"
    source.mkdir()
    started = tmp_path / "started"
    os.mkfifo(started)
    (source / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'slow'\nbackend-path = ['.']\n"
    )
    (source / "slow.py").write_text(
        textwrap.dedent(
            f"""
            import os, subprocess, sys, tempfile, time
            tempfile.mkdtemp()
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open({str(started)!r}, "w") as pipe:
                pipe.write(f"{{os.getpid()}} {{child.pid}}")
            time.sleep(600)
            """
        )
    )

    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))

    async def main():
        manager = EnvironmentManager(tmp_path / "cache", tmp_path / "jobs")
        preparing = asyncio.create_task(manager.prepare(pip_entry(source), JOB, nothing_to_fetch))
        pids = [int(pid) for pid in (await asyncio.to_thread(started.read_text)).split()]
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing
        await manager.close()
        return pids

    pids = asyncio.run(main())
    assert len(pids) == 2
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, running = psutil.wait_procs(alive, timeout=10)
    assert [process for process in running if process.status() != psutil.STATUS_ZOMBIE] == []
    assert locked_files(tmp_path / "cache") == []
    assert list(place.iterdir()) == []
