from __future__ import annotations

import dataclasses
import json
import math
import socket
from typing import Any

import pytest

from miniray.security.token import JoinToken
from miniray.system import machine
from miniray.system.boot_options import (
    BootOptions,
    BootResult,
    advertised_host,
    bind_host,
)
from miniray.system.machine import not_found

TOKEN = str(JoinToken(b"f" * 32, b"s" * 32))


def joining(**changes: Any) -> BootOptions:
    return BootOptions(**{"head": False, "address": "127.0.0.1:6379", "token": TOKEN, **changes})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"num_cpus": -1}, "num_cpus must be a finite number of at least 0, not -1"),
        ({"num_cpus": math.nan}, "num_cpus must be a finite number of at least 0, not nan"),
        ({"num_cpus": math.inf}, "num_cpus must be a finite number of at least 0, not inf"),
        ({"num_cpus": True}, "num_cpus must be a number, not True"),
        ({"num_cpus": 0.00001}, "num_cpus can't be finer than 0.0001"),
        ({"num_gpus": -2}, "num_gpus must be a finite number of at least 0, not -2"),
        ({"num_gpus": 0.5}, "num_gpus must be a whole number, not 0.5"),
        ({"num_gpus": 10**9}, "num_gpus must be at most 10000 devices, not 1000000000"),
        ({"resources": {"NPU": 10_001}}, r"resources\['NPU'\] must be at most 10000 devices"),
        ({"resources": {"FPGA": {"count": 10**9}}}, "must be at most 10000 devices"),
        ({"resources": {"TPU": {"count": 2}}}, r"must be a number.* miniray knows these devices"),
        ({"gpu_family": "voodoo"}, "nvidia, amd, intel"),
        ({"object_store_memory": 10}, r"at least 1048576 bytes \(1 MiB\), not 10"),
        ({"object_store_memory": 1 << 60}, r"this machine, or its container, has \d+ of memory"),
        ({"memory": 1.5}, "memory must be a whole number"),
        (
            {"resources": {"a": -1}},
            r"resources\['a'\] must be a finite number of at least 0, not -1",
        ),
        ({"resources": {"a": "many"}}, r"resources\['a'\] must be a number, not 'many'"),
        ({"resources": {"a": None}}, r"resources\['a'\] must be a number, not None"),
        ({"resources": {"": 1}}, "needs a name"),
        ({"resources": {"GPU": 1}}, "'GPU'; use num_gpus"),
        ({"resources": {"CPU": 1}}, "'CPU'; use num_cpus"),
        ({"resources": {"node:1.2.3.4": 1}}, "by itself"),
        ({"resources": {"TPU": 0.5}}, r"resources\['TPU'\] must be a whole number"),
        ({"resources": {"FPGA": {"number": 2}}}, "FPGA_VISIBLE_DEVICES"),
        ({"resources": {"FPGA": {"count": 1.5}}}, "must be a whole number, not 1.5"),
        ({"labels": {"a b": "c"}}, "'a b'"),
        ({"labels": {"a": "b c"}}, r"labels\['a'\] .*'b c'"),
        ({"labels": {"a": 1}}, r"labels\['a'\] must be a string"),
        ({"labels": {"ray.io/node-id": "x"}}, "set by the node itself"),
        ({"port": 65536}, "port must be from 0 .* to 65535, not 65536"),
        ({"port": -1}, "port must be from 0"),
        ({"host": ""}, "host must name an address"),
        ({"address": "h:1"}, "either head or address"),
        ({"token": TOKEN}, "leave token out"),
        ({"embedded": True}, "needs parent_pid"),
        ({"head": False}, "address of its head as HOST:PORT"),
        ({"head": False, "address": "h:1"}, "give its token"),
        ({"head": False, "address": "h:1", "token": "mr1.x"}, "join token has 3 parts"),
        ({"head": False, "address": "h:x", "token": TOKEN}, "form HOST:PORT"),
    ],
)
def test_what_is_impossible_is_refused_with_the_reason(
    given: dict[str, Any], complaint: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=complaint):
        BootOptions(**given)


def test_what_is_possible_is_accepted() -> None:
    BootOptions()
    BootOptions(
        num_cpus=0.5,
        num_gpus=0,
        gpu_family="amd",
        resources={"a": 0.5, "TPU": 4, "FPGA": {"count": 2, "env": "FPGA_VISIBLE_DEVICES"}},
        labels={"zone": "eu-1", "example.com/disk": "ssd", "empty": ""},
        object_store_memory=2**30,
    )
    BootOptions(embedded=True, parent_pid=1)
    joining()


def test_options_travel_as_json_with_their_checks() -> None:
    options = joining(resources={"a": 1, "F": {"count": 2}}, labels={"b": "c"}, num_cpus=2)
    assert BootOptions(**json.loads(json.dumps(dataclasses.asdict(options)))) == options
    with pytest.raises(ValueError, match="num_cpus"):
        BootOptions(**json.loads('{"num_cpus": -1}'))


def test_no_representation_shows_the_token() -> None:
    result = BootResult("h:1", "ab", TOKEN, "/s", "/d", {"boot": 1}, {"CPU": 2})
    assert TOKEN not in repr(result) + repr(joining())
    assert BootResult(**json.loads(json.dumps(dataclasses.asdict(result)))) == result


def test_an_address_without_a_port_has_the_default_one() -> None:
    assert joining(address="10.0.0.1").address == "10.0.0.1:6379"


def test_a_head_listens_on_loopback_unless_told_otherwise() -> None:
    assert bind_host(BootOptions()) == "127.0.0.1"
    assert advertised_host(BootOptions()) == "127.0.0.1"
    assert bind_host(BootOptions(host="0.0.0.0")) == "0.0.0.0"


def test_a_node_joins_by_its_address_towards_the_head() -> None:
    assert bind_host(joining(address="127.0.0.7:1")) == "127.0.0.1"
    assert advertised_host(joining(address="127.0.0.7:1", host="0.0.0.0")) == "127.0.0.1"


def test_what_others_are_told_can_be_given() -> None:
    options = BootOptions(host="0.0.0.0", node_ip_address="10.1.2.3")
    assert (bind_host(options), advertised_host(options)) == ("0.0.0.0", "10.1.2.3")


@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost"])
def test_a_head_on_loopback_tells_others_no_other_address(host: str | None) -> None:
    complaint = r"203\.0\.113\.7: this machine has no such address; it has .*127\.0\.0\.1"
    with pytest.raises(ValueError, match=complaint):
        BootOptions(host=host, node_ip_address="203.0.113.7")
    BootOptions(host=host, node_ip_address="127.0.0.2")
    BootOptions(host=host, node_ip_address="a.name.of.this.machine")
    joining(host="127.0.0.1", node_ip_address="203.0.113.7")  # a router may translate it


def test_an_address_of_this_machine_where_the_head_does_not_listen_is_told_as_such() -> None:
    assert "127.0.0.2: it listens on 127.0.0.1. Give" in not_found("127.0.0.1", "127.0.0.2")


def test_a_head_on_all_addresses_never_tells_others_the_wildcard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Stands for the outside, so that the test needs no route to it.
    monkeypatch.setitem(machine._ELSEWHERE, 4, "127.0.0.9")
    assert advertised_host(BootOptions(host="0.0.0.0")) == "127.0.0.1"


def test_a_head_whose_name_is_unknown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_args: object, **_options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OSError, match=r"way to nowhere is not known .Name or service"):
        bind_host(joining(address="nowhere:1"))
