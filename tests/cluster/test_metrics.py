"""`miniray metrics` and ``miniray.util.metrics``: one text for Prometheus, of a cluster of two."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner
from cluster_helpers import wait_until
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from running_cluster import running_cluster

import miniray
from miniray.cli.main import main
from miniray.client.command_connection import CommandConnection, connect_for_cli
from miniray.common.config import config
from miniray.metrics.history import charts
from miniray.metrics.text import text
from miniray.util.metrics import Counter, Gauge, Histogram
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric


pytestmark = pytest.mark.engine("miniray")


STORE = 80 << 20
#: Seconds, longer than a test waits for anything.
PATIENCE = 600.0


@pytest.fixture(scope="module", autouse=True)
def cluster(session_root: Path) -> Iterator[CommandConnection]:
    far = {"num_cpus": 2, "resources": {"far": 2}, "num_gpus": 1}
    with running_cluster({"num_cpus": 4, "object_store_memory": STORE}, far):
        connection = connect_for_cli(None, "--address", None)
        yield connection
        connection.close()


@miniray.remote
class Counts:
    def __init__(self) -> None:
        self.seen = Counter("seen", 'What was "seen"\nso far', tag_keys=("kind",))
        self.seen.set_default_tags({"kind": "a"})
        self.level = Gauge("level")
        self.sizes = Histogram("sizes", boundaries=[1, 10])

    def count(self, value: float) -> int:
        self.seen.inc(value)
        self.seen.inc(1, tags={"kind": 'b"\\'})
        self.level.set(value)
        for size in (0.5, 1, 5, 100):
            self.sizes.observe(size)
        return os.getpid()

    def many(self) -> None:
        counter = Counter("many", tag_keys=("number",))
        for number in range(1500):
            counter.inc(tags={"number": str(number)})

    def given(self, counter: Counter) -> None:
        counter.inc(5)


@miniray.remote
def works(*, well: bool = True) -> None:
    if not well:
        raise ValueError("no")


@miniray.remote
class Slow:
    def __init__(self, seconds: float = 0.0) -> None:
        time.sleep(seconds)

    def quick(self) -> None:
        """Take no time."""

    def sleeps(self, seconds: float) -> None:
        time.sleep(seconds)

    def sleeps_badly(self, seconds: float) -> None:
        time.sleep(seconds)
        time.sleep(-1)

    def pid(self) -> int:
        return os.getpid()


@miniray.remote
def sleeps(seconds: float) -> None:
    time.sleep(seconds)


@miniray.remote
class Caller:
    def calls(self, times: int) -> None:
        miniray.get([works.remote() for _ in range(times)])


@miniray.remote(resources={"far": 1})
def large() -> np.ndarray:
    return np.zeros(4 << 20, np.uint8)


def families(cluster: CommandConnection) -> dict[str, Metric]:
    return {each.name: each for each in text_string_to_metric_families(text(cluster))}


def values(cluster: CommandConnection, sample: str, **labels: str) -> list[float]:
    """The values of all samples of a name that have these labels."""
    return [
        each.value
        for family in families(cluster).values()
        for each in family.samples
        if each.name == sample and labels.items() <= each.labels.items()
    ]


def test_prometheus_own_parser_reads_it_and_names_keep_the_conventions(
    cluster: CommandConnection,
) -> None:
    shown = CliRunner().invoke(main, ["metrics"])
    assert shown.exit_code == 0
    found = list(text_string_to_metric_families(shown.stdout))
    assert len({each.name for each in found}) == len(found) > 20
    for family in found:
        assert family.name.startswith("miniray_")
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        assert not family.name.endswith(("_ms", "_mb", "_percent"))
        for sample in family.samples:
            assert not {"pid", "actor_id", "worker_id"} & sample.labels.keys()
    assert values(cluster, "miniray_node_up") == [1.0, 1.0]
    assert values(cluster, "miniray_resource_total", resource="far") == [2.0]
    assert values(cluster, "miniray_device_granted_ratio", resource="GPU") == [0.0]
    assert values(cluster, "miniray_device_info", resource="GPU", device="0", uuid="") == [1.0]
    ages = values(cluster, "miniray_node_heartbeat_age_seconds")
    assert (len(ages), 0 <= min(ages) <= max(ages) < 60) == (2, True)
    assert min(values(cluster, "miniray_node_memory_used_bytes")) > 1 << 20
    assert sum(values(cluster, "miniray_processes", role="daemon")) == 2
    assert min(values(cluster, "miniray_process_open_fds", role="daemon")) > 3
    assert values(cluster, "miniray_head_info", version=VERSION) == [1.0]


def test_what_processes_of_all_nodes_count_is_there_by_node_and_stays_when_they_end(
    cluster: CommandConnection,
) -> None:
    actors = [Counts.remote(), Counts.options(resources={"far": 1}).remote()]
    miniray.get([actor.count.remote(2) for actor in actors])
    wait_until(lambda: values(cluster, "miniray_seen_total", kind="a") == [2.0, 2.0])
    assert values(cluster, "miniray_seen_total", kind='b"\\') == [1.0, 1.0]
    assert values(cluster, "miniray_level") == [2.0, 2.0]
    assert values(cluster, "miniray_sizes_bucket", le="1.0") == [2.0, 2.0]
    assert values(cluster, "miniray_sizes_bucket", le="+Inf") == [4.0, 4.0]
    assert values(cluster, "miniray_sizes_sum") == [106.5, 106.5]
    assert families(cluster)["miniray_seen"].documentation == 'What was "seen"\nso far'
    for actor in actors:
        miniray.kill(actor)
    wait_until(lambda: values(cluster, "miniray_level") == [])
    assert values(cluster, "miniray_seen_total", kind="a") == [2.0, 2.0]
    another = Counts.remote()
    miniray.get(another.count.remote(3))
    wait_until(lambda: sum(values(cluster, "miniray_seen_total", kind="a")) == 7.0)


def test_calls_are_counted_where_they_are_made_and_stay_when_the_caller_ends(
    cluster: CommandConnection,
) -> None:
    callers = [Caller.remote(), Caller.options(resources={"far": 1}).remote()]
    miniray.get([callers[0].calls.remote(2), callers[1].calls.remote(3)])
    with pytest.raises(ValueError, match="no"):
        miniray.get(works.remote(well=False))
    tasks, labels = "miniray_tasks_finished_total", {"function": "works", "outcome": "finished"}
    wait_until(lambda: values(cluster, tasks, **labels) == [2.0, 3.0])
    assert values(cluster, tasks, function="works", outcome="failed") == [1.0]
    method = {"class": "Caller", "method": "calls", "outcome": "finished"}
    assert values(cluster, "miniray_actor_calls_total", **method) == [2.0]
    for caller in callers:
        miniray.kill(caller)
    wait_until(lambda: not values(cluster, "miniray_actors", **{"class": "Caller"}, state="ALIVE"))
    assert values(cluster, tasks, **labels) == [2.0, 3.0]


def test_how_long_calls_take_is_told_by_method_and_by_function(cluster: CommandConnection) -> None:
    slow = Slow.remote()
    miniray.get([slow.quick.remote() for _ in range(3)])
    miniray.get([slow.sleeps.remote(0.02), sleeps.remote(0.02)])

    def calls(method: str, le: str) -> float:
        labels = {"class": "Slow", "method": method, "le": le}
        return sum(values(cluster, "miniray_actor_call_seconds_bucket", **labels))

    wait_until(lambda: calls("sleeps", "+Inf") == 1)
    assert (calls("sleeps", "0.01"), calls("sleeps", "1.0")) == (0, 1)
    assert calls("quick", "+Inf") == 3
    method = {"class": "Slow", "method": "sleeps"}
    assert sum(values(cluster, "miniray_actor_call_seconds_sum", **method)) >= 0.02
    assert sum(values(cluster, "miniray_task_seconds_sum", function="sleeps")) >= 0.02


def test_for_how_long_actors_were_busy_is_told_by_class(cluster: CommandConnection) -> None:
    before = sum(values(cluster, "miniray_actor_busy_seconds_total", **{"class": "Slow"}))
    slow = Slow.remote()
    miniray.get(slow.sleeps.remote(0.25))
    with pytest.raises(ValueError, match="non-negative"):
        miniray.get(slow.sleeps_badly.remote(0.25))

    def busy() -> float:
        return (
            sum(values(cluster, "miniray_actor_busy_seconds_total", **{"class": "Slow"})) - before
        )

    wait_until(lambda: busy() >= 0.5)


def test_cpu_time_is_counted_by_what_ran_and_stays_when_it_has_ended(
    cluster: CommandConnection,
) -> None:
    @miniray.remote
    class Burns:
        def burn(self, seconds: float) -> None:
            while time.process_time() < seconds:
                pass

    def burnt() -> float:
        what = {"role": "worker", "name": "Burns"}
        return sum(values(cluster, "miniray_process_cpu_seconds_total", **what))

    actor = Burns.remote()
    miniray.get(actor.burn.remote(0.3))
    used = burnt()
    assert used > 0.25
    assert values(cluster, "miniray_process_memory_bytes", role="worker", name="Burns")[0] > 1 << 20
    miniray.get(actor.burn.remote(0.6))
    miniray.kill(actor)
    wait_until(lambda: not values(cluster, "miniray_actors", **{"class": "Burns"}, state="ALIVE"))
    assert burnt() >= used
    assert min(values(cluster, "miniray_process_cpu_seconds_total", role="daemon")) > 0


def test_what_waits_for_resources_is_told_with_a_word_that_says_why(
    cluster: CommandConnection,
) -> None:
    demands = [works.options(resources={"far": amount}).remote() for amount in (3, 5)]
    demands += [works.options(resources={"nowhere": 1}).remote()]
    for reason, count in (("too_large", 2.0), ("absent", 1.0)):
        told = {"kind": "task", "infeasible": "true", "reason": reason}
        wait_until(
            lambda told=told, count=count: (
                sum(values(cluster, "miniray_pending_demands", **told)) == count
            )
        )
    assert values(cluster, "miniray_head_demands_waiting")[0] >= 3
    for ref in demands:
        miniray.cancel(ref)
    wait_until(lambda: values(cluster, "miniray_head_demands_waiting") == [0.0])


def test_starts_restarts_and_ends_of_actors_are_counted_and_timed(
    cluster: CommandConnection,
) -> None:
    actor = Slow.options(max_restarts=1, max_task_retries=1).remote(0.05)
    pid = miniray.get(actor.pid.remote())
    os.kill(pid, signal.SIGKILL)
    miniray.get(actor.quick.remote())
    miniray.kill(actor)
    of_class = {"class": "Slow"}
    wait_until(
        lambda: values(cluster, "miniray_actor_deaths_total", **of_class, cause="killed") == [1]
    )
    assert values(cluster, "miniray_actor_restarts_total", **of_class) == [1]
    starts = values(cluster, "miniray_actor_starts_total", **of_class)[0]
    for phase in ("placed", "process", "constructor"):
        labels = {**of_class, "phase": phase}
        counted = values(cluster, "miniray_actor_start_seconds_count", **labels)
        assert counted == [starts]
    labels = {**of_class, "phase": "constructor"}
    assert values(cluster, "miniray_actor_start_seconds_sum", **labels)[0] >= 0.1


def test_what_the_head_is_asked_and_how_long_it_decides_and_writes_is_counted(
    cluster: CommandConnection,
) -> None:
    asked = {"method": "kv_keys"}
    before = values(cluster, "miniray_head_requests_total", **asked)[0]
    for _ in range(3):
        cluster.ask("kv_keys", "nothing", "")
    assert values(cluster, "miniray_head_requests_total", **asked)[0] == before + 3
    miniray.get([works.remote(), large.remote()])
    assert values(cluster, "miniray_head_decision_seconds_count")[0] > 0
    assert values(cluster, "miniray_head_storage_write_seconds_count")[0] > 0
    assert values(cluster, "miniray_head_event_loop_lag_seconds")[0] >= 0
    assert max(values(cluster, "miniray_worker_fork_seconds_count")) > 0
    assert max(values(cluster, "miniray_object_transfer_seconds_count")) > 0


def test_who_leaves_tells_what_it_has_counted(cluster: CommandConnection) -> None:
    driver = """
import miniray
miniray.init(address="auto")

@miniray.remote
def inner():
    pass

@miniray.remote
class Leaves:
    def calls(self):
        miniray.get([inner.remote(), inner.remote()])
        miniray.actor.exit_actor()

@miniray.remote
def outer():
    pass

miniray.get(outer.remote())
try:
    miniray.get(Leaves.remote().calls.remote())
except miniray.exceptions.ActorDiedError:
    miniray.shutdown()
"""
    subprocess.run([sys.executable, "-c", driver], check=True, timeout=60)
    tasks = "miniray_tasks_finished_total"
    wait_until(lambda: sum(values(cluster, tasks, function="inner")) == 2.0)
    assert sum(values(cluster, tasks, function="outer")) == 1.0


def test_who_comes_back_does_not_tell_again_what_it_told_when_it_left(
    cluster: CommandConnection,
) -> None:
    driver = """
import miniray
from miniray.common.series import COUNTED

for name in ("first", "second"):
    miniray.init(address="auto")
    COUNTED.count(f"{name}_stay_total")
    miniray.shutdown()
"""
    subprocess.run([sys.executable, "-c", driver], check=True, timeout=60)
    wait_until(lambda: values(cluster, "miniray_second_stay_total") == [1.0])
    assert values(cluster, "miniray_first_stay_total") == [1.0]


def test_what_moves_between_memory_disk_and_nodes_is_counted(cluster: CommandConnection) -> None:
    assert miniray.get(large.remote()).nbytes == 4 << 20
    assert min(values(cluster, "miniray_object_transfer_bytes_total", direction="in")) == 0
    assert max(values(cluster, "miniray_object_transfer_bytes_total")) >= 4 << 20
    refs = [miniray.put(np.zeros(STORE // 3, np.uint8)) for _ in range(4)]
    wait_until(lambda: max(values(cluster, "miniray_object_spill_bytes_total")) >= STORE // 3)
    for ref in refs:
        assert miniray.get(ref).nbytes == STORE // 3
    assert max(values(cluster, "miniray_object_restore_bytes_total")) >= STORE // 3
    assert values(cluster, "miniray_object_room_waiters") == [0.0, 0.0]


def test_the_head_and_the_starts_of_workers_are_there(cluster: CommandConnection) -> None:
    assert values(cluster, "miniray_head_restarts_total") == [0.0]
    assert values(cluster, "miniray_head_sessions") == [2.0]
    assert time.time() - values(cluster, "miniray_head_start_time_seconds")[0] < 600
    miniray.get([works.remote(), large.remote()])
    assert min(values(cluster, "miniray_worker_forks_total")) > 0


def test_calls_that_wait_and_run_are_told_by_function_and_class(cluster: CommandConnection) -> None:
    slow = Slow.options(name="slow").remote()
    calls = [slow.sleeps.remote(PATIENCE) for _ in range(3)]
    tasks = [sleeps.options(resources={"far": 2}).remote(PATIENCE) for _ in range(2)]
    of_class = {"class": "Slow"}
    wait_until(lambda: values(cluster, "miniray_actor_queued_calls", **of_class) == [2.0])
    wait_until(
        lambda: 0 < sum(values(cluster, "miniray_actor_oldest_call_seconds", **of_class)) < PATIENCE
    )
    for state in ("RUNNING", "PENDING_NODE_ASSIGNMENT"):
        told = {"function": "sleeps", "state": state}
        wait_until(lambda told=told: values(cluster, "miniray_tasks", **told) == [1.0])
    wait_until(lambda: values(cluster, "miniray_leases", state="granted") == [1.0])
    miniray.kill(slow)
    for ref in tasks:
        miniray.cancel(ref)
    for ref in calls:
        with pytest.raises(miniray.exceptions.ActorDiedError):
            miniray.get(ref)
    wait_until(lambda: not values(cluster, "miniray_tasks", function="sleeps"))


def test_a_task_that_is_begun_once_more_counts_as_retried(cluster: CommandConnection) -> None:
    again = works.options(max_retries=1, retry_exceptions=True)
    with pytest.raises(ValueError, match="no"):
        miniray.get(again.remote(well=False))
    wait_until(lambda: values(cluster, "miniray_task_retries_total", function="works") == [1.0])


def test_lines_that_workers_print_are_counted(cluster: CommandConnection) -> None:
    @miniray.remote
    def prints() -> None:
        print("a\nb")

    def lines() -> float:
        return sum(values(cluster, "miniray_log_lines_total", stream="out"))

    before = lines()
    miniray.get(prints.remote())
    wait_until(lambda: lines() == before + 2)


def test_names_may_begin_as_rays_and_named_actors_be_told_apart(
    cluster: CommandConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = [Slow.options(name=name).remote() for name in ("left", "right")]
    miniray.get([each.quick.remote() for each in actors])
    changed = config()._replace(metrics_prefix="ray", metrics_per_actor=True)
    for module in ("text", "listed"):
        monkeypatch.setattr(f"miniray.metrics.{module}.config", lambda: changed)
    told = text(cluster)
    for name in ("left", "right"):
        assert f'ray_actors{{class="Slow",state="ALIVE",name="{name}"}} 1.0' in told
    assert "miniray_" not in told


def test_every_metric_is_in_the_documentation(cluster: CommandConnection) -> None:
    miniray.get([works.remote(), large.remote()])
    page = (Path(__file__).parents[2] / "docs" / "observe.md").read_text()
    documented = set(re.findall(r"`(\w+)`", page))
    own = ("seen", "level", "sizes", "many", "sent", "left", "ended", "forked", "given_up")
    users = {*own, "driver_level", "first_stay", "second_stay"}
    found = {name.removeprefix("miniray_") for name in families(cluster)} - users
    assert {name for name in found if not {name, f"{name}_total"} & documented} == set()
    assert len(found) > 40


def test_prometheus_reads_it_as_openmetrics_too(cluster: CommandConnection) -> None:
    miniray.get(Counts.remote().count.remote(1))
    wait_until(lambda: values(cluster, "miniray_sizes_sum"))

    def names() -> set[str]:
        told = text(cluster, openmetrics=True)
        return {each.name for each in openmetrics.text_string_to_metric_families(told)}

    wait_until(lambda: names() == families(cluster).keys())  # more may be counted in between


@pytest.mark.parametrize("end", ["miniray.shutdown()", ""])
def test_what_a_driver_has_counted_is_there_when_it_has_left(
    cluster: CommandConnection, end: str
) -> None:
    name = "left" if end else "ended"
    program = (
        "import miniray; from miniray.util.metrics import Counter; miniray.init(address='auto'); "
        f"Counter({name!r}).inc(3); {end}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    wait_until(lambda: values(cluster, f"miniray_{name}_total") == [3.0])


def test_a_forked_child_that_attaches_itself_counts_anew(cluster: CommandConnection) -> None:
    program = """
import os, miniray
from miniray.util.metrics import Counter
miniray.init(address="auto")
counter = Counter("forked")
counter.inc(5)
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    miniray.init(address="auto")
    counter.inc(1)
    miniray.shutdown()
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    wait_until(lambda: values(cluster, "miniray_forked_total") == [6.0])


def test_what_an_actor_has_counted_is_there_when_it_has_ended(cluster: CommandConnection) -> None:
    actor = Counts.remote()
    actor.given.remote(Counter("given_up"))
    actor.__ray_terminate__.remote()
    wait_until(lambda: values(cluster, "miniray_given_up_total") == [5.0])


def test_a_metric_keeps_its_default_tags_when_it_is_sent(cluster: CommandConnection) -> None:
    counter = Counter("sent", tag_keys=("where",)).set_default_tags({"where": "there"})
    miniray.get(Counts.remote().given.remote(counter))
    wait_until(lambda: values(cluster, "miniray_sent_total", where="there") == [5.0])


def test_more_series_than_a_metric_may_have_are_one(cluster: CommandConnection) -> None:
    actor = Counts.remote()
    miniray.get(actor.many.remote())
    wait_until(lambda: values(cluster, "miniray_many_total", overflow="true") == [500.0])
    assert len(values(cluster, "miniray_many_total")) == 1001


def test_the_drivers_own_metrics_are_there_too(cluster: CommandConnection) -> None:
    Gauge("driver_level").set(1.5)
    wait_until(lambda: values(cluster, "miniray_driver_level") == [1.5])


def test_the_last_hour_has_a_point_each_ten_seconds_of_each_node(
    cluster: CommandConnection,
) -> None:
    wait_until(lambda: charts(cluster)["times"])
    found = charts(cluster)
    assert abs(found["times"][-1] - time.time()) < 60
    by_title = {chart["title"]: chart for chart in found["charts"]}
    memory = by_title["Memory"]
    assert memory["unit"] == "ratio"
    assert len(memory["series"]) == 2
    assert all(0 < each["values"][-1] <= 1 for each in memory["series"] if each["values"][-1])
    assert {len(each["values"]) for each in memory["series"]} == {len(found["times"])}


def test_the_dashboard_for_grafana_uses_metrics_that_exist(cluster: CommandConnection) -> None:
    actor = Counts.remote()
    miniray.get(actor.count.remote(1))
    dashboard = json.loads((resources.files("miniray.metrics") / "grafana.json").read_text())
    known = families(cluster)
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            used = set(re.findall(r"miniray_\w+", target["expr"]))
            assert used
            assert {name.removesuffix("_total") for name in used} <= known.keys()
