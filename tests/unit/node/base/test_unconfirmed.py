"""What is repeated to a head that comes back."""

from __future__ import annotations

import pytest

from miniray._proto import common_pb2, head_pb2
from miniray.node.base.head_client import Unconfirmed


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def requests(clock: Clock) -> Unconfirmed:
    return Unconfirmed(clock)


def request(number: int, process_id: bytes = b"one", method: str = "nodes") -> head_pb2.FromNode:
    return head_pb2.FromNode(
        request=common_pb2.ClientRequest(process_id=process_id, request=number, method=method)
    )


def test_requests_without_an_answer_are_repeated(requests: Unconfirmed, clock: Clock) -> None:
    first, second, third = request(1), request(2), request(1, b"two")
    for message in (first, second, third):
        requests.sent(message)
    requests.answered(b"one", 1)
    clock.now += 3600
    assert requests.to_repeat([]) == [second, third]


def test_nobody_waits_for_the_answers_of_a_process_that_ended(requests: Unconfirmed) -> None:
    kept = request(1, b"two")
    for message in (request(1), kept):
        requests.sent(message)
    requests.process_ended(b"one")
    assert requests.to_repeat([]) == [kept]


def test_what_made_or_ended_something_of_late_is_repeated_in_order(
    requests: Unconfirmed, clock: Clock
) -> None:
    old = request(0, method="create_actor")
    asked = request(7)
    made, ended = request(0, method="create_actor"), request(8, method="kill_actor")
    for message in (old, asked):
        requests.sent(message)
    clock.now += 3
    for message in (made, ended):
        requests.sent(message)
    requests.answered(b"one", 8)  # it may be done and yet not kept
    assert [id(message) for message in requests.to_repeat([])] == [id(made), id(ended), id(asked)]


def test_what_clients_tell_every_head_anew_is_not_repeated(requests: Unconfirmed) -> None:
    for method in ("want_leases", "subscribe_actor", "hold_leases"):
        requests.sent(request(0, method=method))
    assert requests.to_repeat([]) == []


def test_what_is_still_to_be_sent_is_not_repeated(requests: Unconfirmed) -> None:
    sent, waiting = request(1), request(2)
    requests.sent(sent)
    requests.sent(waiting)
    assert requests.to_repeat([waiting]) == [sent]


def test_answers_to_nobody_are_ignored(requests: Unconfirmed) -> None:
    requests.answered(b"one", 5)
    assert requests.to_repeat([]) == []


def test_the_time_without_a_head_does_not_count(requests: Unconfirmed, clock: Clock) -> None:
    """Nobody can have kept anything meanwhile, and a head takes some seconds to start."""
    old, ended = request(0, method="kill_actor"), request(0, method="kill_actor")
    requests.sent(old)
    clock.now += 1.9
    requests.sent(ended)
    clock.now += 1  # and stands still then
    meanwhile = request(0, method="return_lease")
    requests.sent(meanwhile)
    assert requests.to_repeat([meanwhile]) == [ended]


def test_what_was_repeated_is_repeated_to_the_next_head_if_that_follows_soon(
    requests: Unconfirmed, clock: Clock
) -> None:
    ended = request(0, method="kill_actor")
    requests.sent(ended)
    for _ in range(3):
        clock.now += 1.5
        assert requests.to_repeat([]) == [ended]
    clock.now += 3
    requests.drop_stored()
    assert requests.to_repeat([]) == []


def test_how_actors_ended_of_late_is_told_to_every_head(
    requests: Unconfirmed, clock: Clock
) -> None:
    old, new, large = (head_pb2.FromNode(ended=head_pb2.ProcessEnded(pid=n)) for n in range(3))
    large.ended.detail = "x" * (20 << 20)
    requests.reported(old)
    clock.now += 3
    requests.reported(new)
    requests.reported(large)
    assert requests.reports() == [new]
    assert requests.to_repeat([]) == []
