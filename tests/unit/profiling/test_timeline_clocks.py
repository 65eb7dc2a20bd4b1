"""Nodes whose clocks differ, in one timeline."""

from __future__ import annotations

from typing import Any

from miniray.profiling.timeline import record

HERE, FAR, SILENT = (bytes([number]) * 8 for number in (1, 3, 4))
#: Seconds that the other machine's clock is ahead.
AHEAD = 5.0


class Cluster:
    """Nodes with a call each that ran at the same moment."""

    #: Why the first one does not compare clocks.
    why = ""

    def ask_nodes(self, what: str, _arguments: Any, _seconds: float, nodes: Any = None) -> Any:
        if what == "clocks":
            assert nodes == [HERE]
            if self.why:
                return [(HERE, None, self.why)]
            return [(HERE, {HERE: (0.0, 0.0), FAR: (AHEAD, 0.001), SILENT: None}, "")]
        process = {"pid": 1, "worker_id": "", "name": "f", "note": "", "left_out": 0}
        process["spans"] = [("call", "f", 100.0, 1.0, True, None)]
        ahead = {HERE: 1000.0, FAR: 1000.0 + AHEAD, SILENT: 1000.0}
        return [(node, [process | {"ahead": value}], "") for node, value in ahead.items()]


def test_a_node_whose_clock_is_ahead_is_moved_back_and_that_is_said() -> None:
    events, notes = record(Cluster(), 0.0)
    assert {event["ts"] for event in events if event["ph"] == "X"} == {1100.0 * 1e6}
    assert "is +5.000000 s from that of node 01010101, within 0.001000 s" in notes[0]
    assert notes[1] == "Node 04040404: its clock is not known, and taken as it is."


def test_it_is_said_if_nobody_has_compared_the_clocks() -> None:
    cluster = Cluster()
    cluster.why = "it has not answered in time"
    _, notes = record(cluster, 0.0)
    [note] = notes
    assert note == (
        "Node 01010101, which is to compare the nodes' clocks: it has not answered in time. "
        "They are taken as they are."
    )
