"""Which of a host's addresses is told to the others, and what is said of those that are missing."""

from __future__ import annotations

import pytest

from miniray.launch.rendezvous import HostState
from miniray.launch.run import RunOptions, describe_missing, leading_to


def test_an_address_that_this_host_has_too_leads_to_no_other_one() -> None:
    assert leading_to("127.0.0.1", ["10.0.0.1"]) == "127.0.0.1"
    assert leading_to("172.17.0.1", ["172.17.0.1"]) is None
    assert leading_to("no-such-host.invalid", []) is None


def test_each_missing_host_is_named_with_what_is_known_of_it() -> None:
    reports = {2: HostState("n2", "it has Python 3.10, the head 3.11."), 3: HostState("n3")}
    assert describe_missing(4, {1, 2, 3}, reports, 12.4) == (
        "1 of 4 hosts joined within 12 s: host 1 has not been heard of; host 2 (n2) cannot join: "
        "it has Python 3.10, the head 3.11; host 3 (n3) has started and not joined yet."
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"command": ()}, "Give the program to run"),
        ({"wait": -1}, "wait must be at least 0 s, not -1"),
        ({"node": {"labels": {"rank": "7"}}}, "The label 'rank' is set by miniray run"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RunOptions(**{"command": ("true",), **changes})  # type: ignore[arg-type]
