"""A run that is killed at any moment: what is complete can be read, and the next run works."""

from __future__ import annotations

import pytest
from faulty_filesystem import Clock, Killed, TearingFileSystem, kill_on_disk

from miniray.train import Checkpoint, CheckpointConfig, Result
from miniray.train.base.reports import Report, Step
from miniray.train.callbacks import CallbackRunner, RunContext
from miniray.train.controller.recorder import RunRecorder
from miniray.train.storage.metrics_log import MetricsLog, read_rows
from miniray.train.storage.storage import RunStorage

#: The names of the checkpoints of the run that is killed; only the newest of them stays.
NAMES = ["epoch=0", "checkpoint_000001", "epoch=2"]
RANKS = 2


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with a file per rank."""
    root = tmp_path_factory.mktemp("sources")
    for rank in range(RANKS):
        folder = root / str(rank) / "shards"
        folder.mkdir(parents=True)
        (folder / f"rank{rank}").write_text(f"weights of {rank}")
    return root


def live(storage, sources, names):
    """A run with a report for each name; returns the checkpoint from which it began."""
    context = RunContext(storage.name, storage.path, None, None, storage.filesystem)
    callbacks = CallbackRunner([], context)
    recorder = RunRecorder(storage, CheckpointConfig(num_to_keep=1), callbacks, "token")
    storage.write_run_facts({"token": "token", "state": "RUNNING"})
    recorder.open()
    first, begun = recorder.next_number, recorder.latest_checkpoint
    for index, name in enumerate(names):
        folders = [Checkpoint(sources / str(rank)) for rank in range(RANKS)]
        uploads = [storage.upload(folder, name) for folder in folders]
        reports = {rank: Report({"name": name}, upload) for rank, upload in enumerate(uploads)}
        recorder.record(first, [Step(index, reports, RANKS)])
    recorder.close()
    storage.write_run_facts({"token": "token", "state": "FINISHED"})
    return begun


def newest(storage):
    """The name of the newest checkpoint; None if none is. Of all, everything must be there."""
    records = storage.records()
    for record in records:
        assert record.metrics == {"name": record.name}
        for rank in range(RANKS):
            file = f"{storage.path}/{record.name}/shards/rank{rank}"
            assert storage.filesystem.cat_file(file) == f"weights of {rank}".encode()
    return records[-1].name if records else None


def check(storage, sources, committed):
    """What must hold after a kill, and after the next run of the same name.

    Args:
        storage: The storage, as another process sees it.
        sources: What ranks upload.
        committed: How many manifests had been written whole.
    """
    found = newest(storage)
    assert found == (NAMES[committed - 1] if committed else None)
    if storage.run_facts():
        result = Result.from_path(storage.path, storage.filesystem)
        assert (result.checkpoint and result.checkpoint.path.rpartition("/")[2]) == found
    # What was not completed can be reported under the same name again.
    names = [name for name in NAMES[committed:] if name.startswith("epoch")] or ["epoch=3"]
    begun = live(storage, sources, names)
    assert (begun and begun.path.rpartition("/")[2]) == found
    assert newest(storage) == names[-1]
    numbers = [row["number"] for row in read_rows(storage)]
    assert numbers == sorted(set(numbers))
    # Only what is listed is left; one of before may be, if its delete had not begun.
    files = {"run.json", "metrics.jsonl", "metrics.csv", ".manifests", ".metrics"}
    kept = {record.name for record in storage.records()}
    assert storage.files.names() - files == kept
    assert storage.files.names(".manifests") == {f"{name}.json" for name in kept}


def test_a_store_without_rename_survives_a_kill_at_every_write_and_every_byte_of_a_manifest(
    sources,
):
    whole = Clock()
    live(RunStorage("runs", "run", TearingFileSystem({}, whole)), sources, NAMES)
    of_others = [f"of runs/run/.manifests/{name}.json" for name in (NAMES[0], NAMES[2])]
    moments = [n for n, name in enumerate(whole.names) if not name.endswith((*of_others,))]
    manifest_bytes = [n for n in moments if "of runs/run/.manifests/" in whole.names[n]]
    assert len(manifest_bytes) > 100
    for fatal in moments:
        content = {}
        clock = Clock(fatal)
        with pytest.raises(Killed):
            live(RunStorage("runs", "run", TearingFileSystem(content, clock)), sources, NAMES)
        committed = sum(
            name.startswith("write runs/run/.manifests/") and name.endswith(".json")
            for name in clock.names
        )
        after = RunStorage("runs", "run", TearingFileSystem(content, Clock()))
        check(after, sources, committed)


def test_the_machines_own_filesystem_survives_a_kill_at_every_change(sources, tmp_path):
    whole = Clock()
    folder = tmp_path / "whole"

    def run(storage):
        live(storage, sources, NAMES)

    kill_on_disk(str(folder), whole, lambda: run(RunStorage(folder, "run")))
    assert whole.moments > 50
    for fatal in range(whole.moments):
        folder = tmp_path / str(fatal)
        storage = RunStorage(folder, "run")
        clock = Clock(fatal)
        with pytest.raises(Killed):
            kill_on_disk(str(folder), clock, lambda s=storage: run(s))
        committed = sum(
            name.startswith("os.rename") and name.endswith(".json')") and "/.manifests/" in name
            for name in clock.names
        )
        check(storage, sources, committed)


def live_again(storage, sources, version, names):
    """A run whose checkpoints take the names that an earlier one has used."""
    context = RunContext(storage.name, storage.path, None, None, storage.filesystem)
    callbacks = CallbackRunner([], context)
    recorder = RunRecorder(storage, CheckpointConfig(), callbacks, "token")
    storage.write_run_facts({"token": "token"})
    recorder.open()
    for index, name in enumerate(names):
        recorder.make_way(name, in_place=False)
        uploads = [
            storage.upload(Checkpoint(sources / version / str(rank)), name) for rank in range(RANKS)
        ]
        reports = {rank: Report({"is": version}, upload) for rank, upload in enumerate(uploads)}
        recorder.record(recorder.next_number - index, [Step(index, reports, RANKS)])
    kept = [record.name for record in recorder.checkpoints]
    assert len(set(kept)) == len(kept)
    recorder.close()


def check_unmixed(storage, sources, newest):
    """No checkpoint has files of two runs, and this one is the newest."""
    assert storage.records()[-1].name == newest
    storage.delete_incomplete()
    for record in storage.records():
        version = sources / record.metrics["is"]
        expected = {file.name: file.read_bytes() for file in version.glob("*/*")}
        folder = f"{storage.path}/{record.name}"
        files = storage.files.sizes(record.name)
        assert {file: storage.filesystem.cat_file(f"{folder}/{file}") for file in files} == expected
    live_again(storage, sources, "new", ["a", "b"])
    assert [record.metrics for record in storage.records()] == [{"is": "new"}] * 2


@pytest.mark.parametrize("kind", ["store", "disk"])
def test_a_checkpoint_is_replaced_whole_or_is_gone_wherever_the_run_is_killed(tmp_path, kind):
    sources = tmp_path / "sources"
    for version, more in (("old", "_old"), ("new", "")):
        for rank in range(RANKS):
            (sources / version / str(rank)).mkdir(parents=True)
            for file in (f"rank{rank}", f"rank{rank}{more}"):
                (sources / version / str(rank) / file).write_text(version)

    def killed_at(fatal):
        """The storage as another process sees it, and what the one that was killed had done."""
        content, clock, folder = {}, Clock(fatal), tmp_path / str(fatal)
        if kind == "disk":
            first = second = after = RunStorage(folder, "run")
        else:
            first, second, after = (
                RunStorage("runs", "run", TearingFileSystem(content, each))
                for each in (Clock(), clock, Clock())
            )
        live_again(first, sources, "old", ["a", "b"])
        try:
            kill_on_disk(str(folder), clock, lambda: live_again(second, sources, "new", ["a", "b"]))
        except Killed:
            assert fatal is not None
        return after, clock

    moments = killed_at(None)[1].moments
    assert moments > 30
    for fatal in range(moments):
        after, clock = killed_at(fatal)
        written = [each for each in clock.names if each.startswith(("write runs", "os.rename"))]
        committed = [
            name for name in "ab" if any(f"/.manifests/{name}.json" in each for each in written)
        ]
        check_unmixed(after, sources, committed[-1] if committed else "b")


def test_no_row_of_metrics_is_lost_when_a_later_run_is_killed_while_it_writes():
    first, whole = {}, Clock()
    log_rows(RunStorage("runs", "run", TearingFileSystem(first, Clock())), range(3))
    log_rows(RunStorage("runs", "run", TearingFileSystem(dict(first), whole)), range(3, 5))
    for fatal in range(whole.moments):
        content = dict(first)
        storage = RunStorage("runs", "run", TearingFileSystem(content, Clock(fatal)))
        with pytest.raises(Killed):
            log_rows(storage, range(3, 5))
        after = RunStorage("runs", "run", TearingFileSystem(content, Clock()))
        numbers = [row["number"] for row in read_rows(after)]
        assert numbers[:3] == [0, 1, 2], whole.names[fatal]
        log_rows(after, range(5, 6))
        assert [row["number"] for row in read_rows(after)] == [*numbers, 5]


def log_rows(storage, numbers):
    log = MetricsLog(storage)
    for number in numbers:
        log.append([{"number": number, "metrics": {"loss": number}}])
    log.close()
