"""What the page of train runs shows, from folders and from what a controller tells."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import types

import pytest

from miniray.train.base.states import RunState
from miniray.train.controller.run_spec import MAX_ATTEMPTS, RunFacts
from miniray.train.run.page import RunPage, ended, listed
from miniray.train.storage.metrics_log import MAX_SHOWN, History, shown_row
from miniray.train.storage.storage import RunStorage
from miniray.train.worker.worker import _device_memory

NODE, PROCESS = "aa" * 8, "bb" * 8


def row_of(storage, facts, state="RUNNING", *, alive=False, **others):
    """A run in the head's listing."""
    return {
        "run_id": facts.run_id,
        "name": facts.name,
        "started": facts.started,
        "state": state,
        "written": facts.started + 60,
        "path": storage.url,
        "error": "",
        "node_id": NODE,
        "worker_id": PROCESS,
        "alive": alive,
        **others,
    }


@pytest.fixture
def storage(tmp_path):
    return RunStorage(tmp_path / "runs", "run")


@pytest.fixture
def facts():
    return RunFacts("run", "0123", "0123-secret")


def report(storage, *numbers):
    rows = [{"number": n, "time": 1.0, "checkpoint": None, "metrics": {"n": n}} for n in numbers]
    storage.files.append("metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_run_that_has_ended_is_told_by_its_folder(storage, facts):
    facts.begin_attempt(2)
    facts.end_attempt("FAILED", "rank 1 failed", "logs/attempt_001")
    facts.begin_attempt(2)
    facts.end_attempt("FINISHED", "", "logs/attempt_002")  # its ranks have printed nothing
    storage.files.write("logs/attempt_001/rank_0.out", "words")
    storage.write_run_facts(facts.as_json(RunState.FINISHED, ""))
    report(storage, 0, 1, 2)
    page = ended(row_of(storage, facts, "FINISHED"))
    run = page["run"]
    assert (run["state"], run["reports"]) == ("FINISHED", 3)
    assert page["series"] == {"step": [0, 1, 2], "n": [0, 1, 2]}
    assert run["ended"] >= run["started"]
    ends = [(each["state"], each["reason"]) for each in page["attempts"]]
    assert ends == [("FAILED", "rank 1 failed"), ("FINISHED", "")]
    assert page["logs"] == [f"{storage.path}/logs/attempt_001"]
    assert "secret" not in json.dumps(page)
    assert page["run"]["problem"] == ""


def test_a_run_that_has_failed_says_why(storage, facts):
    storage.write_run_facts(facts.as_json(RunState.ERRORED, "rank 0: boom"))
    page = ended(row_of(storage, facts, "ERRORED"))
    assert (page["run"]["state"], page["run"]["error"]) == ("ERRORED", "rank 0: boom")
    assert page["series"] == {"step": []}


def test_a_run_whose_controller_was_killed_is_lost_unless_its_folder_says_how_it_ended(
    storage, facts
):
    row = row_of(storage, facts)
    assert listed([row])[0]["state"] == "LOST"
    storage.write_run_facts(facts.as_json(RunState.RUNNING, ""))
    assert ended(row)["run"]["state"] == "LOST"
    storage.write_run_facts(facts.as_json(RunState.FINISHED, ""))
    assert ended(row)["run"]["state"] == "FINISHED"


def test_a_torn_last_line_is_left_out(storage, facts):
    storage.write_run_facts(facts.as_json(RunState.ABORTED, ""))
    report(storage, 0, 1)
    storage.files.append("metrics.jsonl", '{"number": 2, "time": 1.0, "metr')
    assert ended(row_of(storage, facts))["series"]["step"] == [0, 1]


def test_a_checkpoint_has_its_size_duration_and_place(storage, facts, tmp_path):
    from miniray.train import Checkpoint

    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model").write_text("weights")
    upload = storage.upload(Checkpoint(tmp_path / "files"), "epoch_1")
    storage.commit(7, [upload], {"loss": 0.5}, seconds=1.5)
    storage.write_run_facts(facts.as_json(RunState.FINISHED, ""))
    [checkpoint] = ended(row_of(storage, facts))["checkpoints"]
    assert (checkpoint["size"], checkpoint["seconds"], checkpoint["number"]) == (7, 1.5, 7)
    assert checkpoint["path"] == f"{storage.path}/epoch_1"
    assert checkpoint["metrics"] == {"loss": 0.5}


def test_a_folder_that_is_gone_is_said_to_be(storage, facts):
    storage.write_run_facts(facts.as_json(RunState.FINISHED, ""))
    shutil.rmtree(storage.path)
    page = ended(row_of(storage, facts, "FINISHED"))
    assert page["run"]["problem"].startswith(f"There is no run in {storage.path}")
    assert (page["run"]["state"], page["series"]["step"]) == ("FINISHED", [])
    assert page["checkpoints"] == page["attempts"] == []


def test_of_two_runs_in_one_folder_the_newer_one_is_listed_and_the_older_says_so(storage, facts):
    newer = RunFacts("run", "4567", "t", started=facts.started + 100)
    storage.write_run_facts(newer.as_json(RunState.RUNNING, ""))
    old, new = row_of(storage, facts, "FINISHED"), row_of(storage, newer, alive=True)
    assert [row["run_id"] for row in listed([old, new])] == ["4567"]
    assert "went on in the folder" in ended(old)["run"]["problem"]
    assert ended(new)["run"]["state"] == "RUNNING"


def test_two_runs_of_one_name_in_different_folders_are_both_listed(storage, facts, tmp_path):
    elsewhere = RunStorage(tmp_path / "others", "run")
    other = RunFacts("run", "4567", "t", started=facts.started + 100)
    rows = listed([row_of(storage, facts, alive=True), row_of(elsewhere, other, alive=True)])
    assert [row["run_id"] for row in rows] == ["4567", "0123"]


def test_many_reports_are_few_rows_evenly_over_the_run():
    history = History()
    for number in range(100_000):
        history.add({"number": number, "metrics": {"n": number}})
    numbers = [row["number"] for row in history.shown()]
    assert len(numbers) <= MAX_SHOWN + 1
    assert (numbers[0], numbers[-1], history.reports) == (0, 99_999, 100_000)
    assert len({b - a for a, b in itertools.pairwise(numbers[:-1])}) == 1


def test_the_newest_of_many_reports_is_found_behind_a_torn_line(storage, facts):
    storage.write_run_facts(facts.as_json(RunState.RUNNING, ""))
    report(storage, *range(5000))
    storage.files.append("metrics.jsonl", '{"number": 5000, "time": 1.0, "metr')
    storage.files.write(".metrics/000000000100.jsonl", '{"number": 103, "metrics": {}}\n')
    history = History()
    history.read(storage)
    assert history.reports == 5000
    assert history.newest["metrics"] == {"n": 4999}
    assert history.shown()[-1]["number"] == 4999


def test_what_is_no_number_or_very_long_is_cut():
    metrics = {"a": {"b": float("nan")}, "text": "x" * 5000, "flag": True}
    shown = shown_row({"number": 0, "metrics": metrics})["metrics"]
    assert (shown["a/b"], len(shown["text"]), shown["flag"]) == (None, 200, True)
    many = {str(n): n for n in range(5000)}
    assert len(shown_row({"number": 0, "metrics": many})["metrics"]) == 200


def test_only_the_newest_attempts_are_kept(facts):
    for _ in range(100):
        facts.begin_attempt(1)
        facts.end_attempt("FAILED", "x" * 100_000)
    assert [each.number for each in facts.history][-1] == 100
    assert len(facts.history) == MAX_ATTEMPTS
    assert len(json.dumps(facts.as_json(RunState.RUNNING, ""))) < 100_000


class Cluster:
    """Lists a run, and answers what is asked of its controller and of its rank."""

    def __init__(self, *runs):
        self.runs = runs
        self.asked = []
        #: What the node tells of the controller: what processes answer, and why it tells nothing.
        self.told = []
        self.missing = ""
        self.rank = {"datasets": {"d": {"waited": 1.0}}, "memory": {}}

    def listing(self, _what):
        return self.runs

    def ask_nodes(self, what, about, seconds, nodes):
        self.asked.append((what, about, nodes))
        if not nodes:
            return []
        question, _, ids = about
        if question == "train_rank":
            return [(nodes[0], [(ids[0], 1, "worker", b"", self.rank, "")], "")]
        answers = [(ids[0], 1, "worker", b"", *each) for each in self.told]
        return [(nodes[0], None if self.missing else answers, self.missing)]


@pytest.fixture
def cluster(storage, facts):
    return Cluster(row_of(storage, facts, alive=True))


def test_a_page_collects_what_a_controller_tells(cluster, facts):
    page = RunPage(facts.run_id)
    rows = [{"number": n, "metrics": {"n": n}} for n in range(3)]
    rank = {"rank": 0, "worker_id": "cc" * 8, "node_id": NODE}
    news = {"version": 3, "rows": rows, "reports": 3, "notes": ["hello"], "ranks": [rank]}
    cluster.told = [(json.dumps({**news, "state": "RUNNING"}), "")]
    page.look(cluster)
    first, second = cluster.asked
    ids = [bytes.fromhex(PROCESS)]
    of_node = [bytes.fromhex(NODE)]
    assert first == ("processes", ("train_run 0123", (-1,), ids), of_node)
    assert second == ("processes", ("train_rank", (), [bytes.fromhex("cc" * 8)]), of_node)
    cluster.told = [(json.dumps({"state": "RUNNING", "ranks": [rank]}), "")]  # no news
    shown = page.look(cluster)
    assert cluster.asked[2][1][1] == (3,)
    assert shown["series"] == {"step": [0, 1, 2], "n": [0, 1, 2]}
    assert (shown["notes"], shown["run"]["problem"]) == (["hello"], "")
    assert (shown["run"]["state"], shown["run"]["reports"]) == ("RUNNING", 3)
    assert shown["ranks"][0]["datasets"] == {"d": {"waited": 1.0}}


def test_a_page_says_why_a_controller_does_not_answer(cluster, facts):
    page = RunPage(facts.run_id)
    cluster.told = [(None, "it did not answer in time")]
    assert page.look(cluster)["run"]["problem"] == "it did not answer in time"
    cluster.missing = "there is no way to it"
    assert page.look(cluster)["run"]["problem"] == "there is no way to it"


def test_the_folder_tells_of_a_run_whose_controller_is_gone(cluster, facts, storage):
    page = RunPage(facts.run_id)
    storage.write_run_facts(facts.as_json(RunState.RUNNING, ""))
    report(storage, 0, 1)
    assert page.look(cluster)["series"]["step"] == [0, 1]


def test_a_run_that_is_not_listed_is_named():
    with pytest.raises(ValueError, match="There is no run 0123"):
        RunPage("0123").look(Cluster())


def test_a_rank_tells_what_pytorch_holds_on_its_gpus(monkeypatch):
    held = {0: 100, 1: 20}
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True, device_count=lambda: 2, memory_reserved=held.get
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert _device_memory() == 120
    monkeypatch.setattr(cuda, "is_initialized", lambda: False)
    assert _device_memory() is None
    monkeypatch.setitem(sys.modules, "torch", None)
    assert _device_memory() is None
