import asyncio
import fcntl
import hashlib
import io
import os
import zipfile
from pathlib import Path

import pytest
from open_files import locked_files
from tiny_wheel import tiny_wheel

from miniray.exceptions import RuntimeEnvSetupError
from miniray.runtime_env.cache import FolderCache, collect
from miniray.runtime_env.install import (
    EnvironmentManager,
    expand,
    needs_fresh_interpreter,
    venv_key,
)

REPOSITORY = Path(__file__).parents[3]


def package(suffix=".zip", **files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, text in files.items():
            made.writestr(name, text)
    content = buffer.getvalue()
    return f"mrpkg://{hashlib.sha256(content).hexdigest()}{suffix}", content


JOB = b"of a job"


def manager_in(folder, jobs="jobs"):
    return EnvironmentManager(folder / "cache", folder / jobs)


class Store:
    """Packages of a cluster; fetching counts."""

    def __init__(self, *packages):
        self.content = dict(packages)
        self.fetched = []

    async def fetch(self, uri):
        self.fetched.append(uri)
        await asyncio.sleep(0)
        return self.content[uri]


def pip_entry(*packages, **fields):
    return {"pip": {"packages": [str(item) for item in packages], "pip_check": False, **fields}}


# --- variables ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "OMP_NUM_THREADS",
        "LD_PRELOAD",
        "PYTHONPATH",
        "MALLOC_ARENA_MAX",
        "TORCHDYNAMO_DISABLE",
        "FSSPEC_S3_ENDPOINT_URL",
    ],
)
def test_a_variable_that_is_read_at_load_needs_a_fresh_interpreter(name):
    assert needs_fresh_interpreter({"A": "1", name: "1"})


def test_other_variables_can_be_set_after_a_fork():
    assert not needs_fresh_interpreter({"MY_OMP_": "1", "HF_HOME": "/x", "GOLD": "1"})


def test_references_stand_for_the_variables_of_the_node():
    values = {"A": "${HOME}/a:${NOT_SET}:$HOME:$NOT_SET"}
    assert expand(values, {"HOME": "/h"}) == {"A": "/h/a::/h:$NOT_SET"}


# --- packages -----------------------------------------------------------------------------


def test_a_package_is_fetched_once_per_job_and_node_however_many_ask(tmp_path):
    code = package(a="1")
    store = Store(code)

    async def main():
        one, two = manager_in(tmp_path), manager_in(tmp_path, "other")
        asked = [
            manager.prepare({"working_dir": code[0]}, JOB, store.fetch)
            for manager in (one, two)
            for _ in range(10)
        ]
        environments = await asyncio.gather(*asked)
        # One copy for the workers of a job on each node.
        assert len({environment.cwd for environment in environments}) == 2
        await one.close()
        await two.close()

    asyncio.run(main())
    assert len(store.fetched) == 2


def test_a_package_with_another_content_is_refused_and_nothing_stays(tmp_path):
    uri, _ = package(a="1")
    store = Store((uri, package(a="2")[1]))

    async def main():
        manager = manager_in(tmp_path)
        with pytest.raises(RuntimeEnvSetupError, match="damaged"):
            await manager.prepare({"working_dir": uri}, JOB, store.fetch)
        await manager.close()

    asyncio.run(main())
    assert not [*tmp_path.rglob("*.ready"), *tmp_path.rglob("archive"), *tmp_path.rglob("a")]


def test_a_failed_package_is_tried_again_by_the_next_who_asks(tmp_path):
    code = package(a="1")
    store = Store()

    async def main():
        manager = manager_in(tmp_path)
        with pytest.raises(RuntimeEnvSetupError, match="could not be fetched"):
            await manager.prepare({"working_dir": code[0]}, JOB, store.fetch)
        store.content.update([code])
        environment = await manager.prepare({"working_dir": code[0]}, JOB, store.fetch)
        assert (Path(environment.cwd) / "a").exists()
        await manager.close()

    asyncio.run(main())


def test_a_path_that_was_not_uploaded_is_refused(tmp_path):
    async def main():
        with pytest.raises(RuntimeEnvSetupError, match="was not uploaded"):
            await manager_in(tmp_path).prepare({"working_dir": "/code"}, JOB, Store().fetch)

    asyncio.run(main())


def test_setting_up_that_takes_too_long_is_an_error_that_names_the_option(tmp_path):
    code = package(a="1")

    async def fetch(uri):
        await asyncio.Event().wait()

    async def main():
        manager = manager_in(tmp_path)
        spec = {"working_dir": code[0], "config": {"setup_timeout_seconds": 0.01}}
        with pytest.raises(RuntimeEnvSetupError, match="setup_timeout_seconds"):
            await manager.prepare(spec, JOB, fetch)
        await manager.close()

    asyncio.run(main())
    assert [locked_files(tmp_path / each) for each in ("cache", "jobs")] == [[], []]


def test_an_impatient_caller_does_not_end_the_setup_of_a_patient_one(tmp_path):
    code = package(a="1")
    go = asyncio.Event()

    async def fetch(uri):
        await go.wait()
        return code[1]

    async def main():
        manager = manager_in(tmp_path)
        patient = asyncio.create_task(manager.prepare({"working_dir": code[0]}, JOB, fetch))
        hasty = {"working_dir": code[0], "config": {"setup_timeout_seconds": 0.01}}
        with pytest.raises(RuntimeEnvSetupError):
            await manager.prepare(hasty, JOB, fetch)
        go.set()
        assert (await patient).cwd
        await manager.close()

    asyncio.run(main())


# --- the cache ----------------------------------------------------------------------------


async def fill(folder, lock, size=1000):
    (folder / "content").write_bytes(b"x" * size)


def test_unused_folders_go_when_the_limit_is_passed_longest_unused_first(tmp_path):
    async def main():
        cache = FolderCache(tmp_path, limit=2500)
        for age, key in [(300, "old"), (200, "middle"), (100, "new")]:
            await cache.acquire(key, fill)
            os.utime(tmp_path / f"{key}.ready", (age, -age + 1000))
        await cache.close()

    asyncio.run(main())
    collect(tmp_path, 2500)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["middle", "new"]
    assert not list(tmp_path.glob("old*"))


def test_a_folder_in_use_stays_even_above_the_limit_until_it_is_released(tmp_path):
    async def main():
        user, other = FolderCache(tmp_path, limit=0), FolderCache(tmp_path, limit=0)
        await user.acquire("a", fill)
        await user.acquire("a", fill)
        await other.acquire("a", fill)
        user.release("a")
        user.release("a")
        await user.close()
        assert (tmp_path / "a").exists()
        other.release("a")
        await other.close()
        assert list(tmp_path.iterdir()) == []

    asyncio.run(main())


def test_two_caches_of_one_folder_build_one_after_the_other(tmp_path):
    built = []
    go = asyncio.Event()

    async def build(folder, lock):
        built.append(folder)
        await go.wait()

    async def main():
        one, two = FolderCache(tmp_path, 0), FolderCache(tmp_path, 0)
        first = asyncio.create_task(one.acquire("a", build))
        while not built:
            await asyncio.sleep(0)
        second = asyncio.create_task(two.acquire("a", build))
        await asyncio.sleep(0.02)
        go.set()
        await asyncio.gather(first, second)
        await asyncio.gather(one.close(), two.close())

    asyncio.run(main())
    assert len(built) == 1


def test_a_waiter_for_another_builder_can_be_cancelled_and_leaves_no_lock(tmp_path):
    async def main():
        lock = os.open(tmp_path / "a.build", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        cache = FolderCache(tmp_path, 0)
        waiting = asyncio.create_task(cache.acquire("a", fill))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        os.close(lock)
        # Whoever comes next gets the lock, so the one who left did not keep it.
        await asyncio.wait_for(cache.acquire("a", fill), 10)
        await cache.close()

    asyncio.run(main())


def test_a_lock_that_cannot_be_had_is_an_error_of_who_waits(tmp_path):
    async def main():
        cache = FolderCache(tmp_path, 0)
        (tmp_path / "a.build").mkdir()
        with pytest.raises(IsADirectoryError):
            await asyncio.wait_for(cache.acquire("a", fill), 10)
        await cache.close()

    asyncio.run(main())


def test_a_collector_leaves_no_file_of_a_folder_that_another_process_builds_or_removes(tmp_path):
    (tmp_path / "a").mkdir()
    lock = os.open(tmp_path / "a.build", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    collect(tmp_path, 0)
    os.close(lock)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.build"]


def test_what_a_killed_builder_left_is_collected(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "half").touch()
    collect(tmp_path, 10**6)
    assert list(tmp_path.iterdir()) == []


# --- pip ----------------------------------------------------------------------------------


def test_a_rebuilt_local_wheel_is_another_virtual_environment(tmp_path):
    entry = pip_entry(tiny_wheel(tmp_path))["pip"]
    first = venv_key(entry, {})
    assert venv_key(entry, {}) == first
    assert venv_key(entry, {"A": "1"}) == first
    assert venv_key(entry, {"PIP_INDEX_URL": "x"}) != first
    tiny_wheel(tmp_path, value=1000)
    assert venv_key(entry, {}) != first
