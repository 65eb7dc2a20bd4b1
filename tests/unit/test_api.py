"""``init``, ``get``, ``wait`` and friends: their arguments, and what they pass on."""

from __future__ import annotations

import marshal
import math
import os
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fake_runtime import Call, FakeRuntime, fake_runtime

import miniray
from miniray.client.init_options import InitOptions
from miniray.common.runtime import set_runtime

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    with fake_runtime() as fake:
        yield fake


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[InitOptions]]:
    """What ``init`` asked the bootstrap for; it gets a fake runtime."""
    wanted: list[InitOptions] = []

    def connect(options: InitOptions) -> tuple[FakeRuntime, dict[str, Any]]:
        wanted.append(options)
        return FakeRuntime(), {"address": "127.0.0.1:1", "node_id": "0a"}

    module = types.ModuleType("miniray.client.bootstrap")
    module.connect = connect  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "miniray.client.bootstrap", module)
    yield wanted
    miniray.shutdown()
    set_runtime(None)


def test_init_passes_on_what_it_was_given(asked: list[InitOptions]) -> None:
    context = miniray.init(
        num_cpus=2,
        num_gpus=1,
        gpu_family="amd",
        resources={"x": 1, "TPU": 4},
        namespace="n",
        _temp_dir="/tmp/x",
    )

    assert asked == [
        InitOptions(
            node={
                "num_cpus": 2,
                "num_gpus": 1,
                "gpu_family": "amd",
                "resources": {"x": 1, "TPU": 4},
                "temp_dir": "/tmp/x",
            },
            namespace="n",
        )
    ]
    assert context.address_info["address"] == "127.0.0.1:1"
    assert miniray.is_initialized()


def test_init_passes_on_plain_texts(asked: list[InitOptions]) -> None:
    miniray.init(np.str_("local"), namespace=np.str_("n"), labels={np.str_("zone"): np.str_("a")})

    (options,) = asked
    told = (options.address, options.namespace, options.node["labels"])
    assert marshal.loads(marshal.dumps(told)) == ("local", "n", {"zone": "a"})


def test_the_context_is_a_mapping_too(asked: list[InitOptions]) -> None:
    context = miniray.init()

    assert dict(context) == dict(**context) == context.address_info
    assert len(context) == len(context.address_info)
    assert context["node_id"] == "0a"
    assert context.get("webui_url") is None


def test_a_forked_child_does_not_end_its_parent_s_cluster(
    asked: list[InitOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    miniray.init()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        miniray.shutdown()
    assert miniray.is_initialized()


def test_the_address_may_come_from_the_environment(
    asked: list[InitOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    miniray.init()
    miniray.shutdown()
    miniray.init("local")

    assert [options.address for options in asked] == ["10.0.0.1:6379", "local"]


@pytest.mark.parametrize("given", [None, "auto", "unix:/tmp/mr-0/head.sock"])
def test_a_program_of_a_run_may_name_the_cluster_of_that_as_it_likes(
    asked: list[InitOptions], monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.setenv("MINIRAY_ADDRESS", "unix:/tmp/mr-0/head.sock")
    miniray.init(given)
    assert [options.address for options in asked] == ["unix:/tmp/mr-0/head.sock"]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"num_cpu": 1}, TypeError, "no argument 'num_cpu'. Did you mean 'num_cpus'"),
        ({"gpu_family": "voodoo"}, ValueError, "use one of nvidia, amd, intel"),
        ({"gpu_family": "tpu"}, ValueError, "use one of nvidia, amd, intel"),
        ({"gpu_family": 1}, TypeError, "gpu_family must be a string"),
        ({"resources": {"TPU": 0.5}}, ValueError, "resources['TPU'] must be a whole number"),
        ({"address": "auto", "gpu_family": "amd"}, ValueError, "gpu_family can't be given"),
        ({"num_cpus": -1}, ValueError, "num_cpus must be a whole number of at least 0"),
        ({"num_cpus": 1.5}, TypeError, "num_cpus must be a whole number"),
        ({"resources": {"CPU": 1}}, ValueError, "use num_cpus"),
        ({"labels": {"zone": "-"}}, ValueError, "labels"),
        ({"namespace": ""}, ValueError, "namespace"),
        ({"address": "some where"}, ValueError, "HOST:PORT"),
        ({"address": "host:99999"}, ValueError, "HOST:PORT"),
        ({"address": "unix:/tmp/mr-0/head.sock"}, ValueError, "belongs to a program"),
        ({"address": "host:1", "num_cpus": 2}, ValueError, "num_cpus can't be given"),
        ({"address": "auto", "labels": {"a": "b"}}, ValueError, "labels can't be given"),
        ({"local_mode": True}, TypeError, "does not support local_mode"),
        ({"log_to_driver": "yes"}, TypeError, "True or False"),
        ({"object_store_memory": 0}, ValueError, "bytes"),
        ({"object_store_memory": float("inf")}, TypeError, "bytes"),
        ({"_memory": -1}, ValueError, "bytes"),
    ],
)
def test_init_refuses(
    asked: list[InitOptions], given: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        miniray.init(**given)

    assert words in str(caught.value)
    assert asked == []


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (3, ValueError, "not 3 (int)"),
        (None, ValueError, "not None (NoneType)"),
        ([3], TypeError, "item 0 is 3 (int)"),
    ],
)
def test_get_names_what_is_not_a_ref(
    runtime: FakeRuntime, given: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        miniray.get(given)
    assert words in str(caught.value)


def test_the_timeout_of_get_is_in_seconds(runtime: FakeRuntime) -> None:
    ref = runtime.ref(ready=False)

    with pytest.raises(miniray.exceptions.GetTimeoutError):
        miniray.get(ref, timeout=0)
    with pytest.raises(ValueError, match="at least 0 seconds, not -2"):
        miniray.get(ref, timeout=-2)
    with pytest.raises(TypeError, match=r"timeout of get must be a number .* not '1' \(str\)"):
        miniray.get(ref, timeout="1")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"timeout of wait must be a number .* not '1' \(str\)"):
        miniray.wait([ref], timeout="1")  # type: ignore[arg-type]
    for ask in (miniray.get, miniray.wait):
        with pytest.raises(ValueError, match="at least 0 seconds, not nan"):
            ask([ref], timeout=math.nan)  # type: ignore[operator]
    miniray.get([], timeout=math.inf)
    assert runtime.last.options is None


def test_arguments_have_ray_s_names(runtime: FakeRuntime) -> None:
    ref = runtime.ref(1)
    assert miniray.get(object_refs=ref) == 1
    assert miniray.wait(ray_waitables=[ref]) == ([ref], [])
    miniray.cancel(ray_waitable=ref)
    assert runtime.last.kind == "cancel"
    miniray.shutdown(wait_for_processes=True)


def test_wait_checks_its_arguments(runtime: FakeRuntime) -> None:
    ref = runtime.ref()

    with pytest.raises(TypeError, match="a list of refs, not a single one"):
        miniray.wait(ref)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not 3"):
        miniray.wait(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="item 0 is 3"):
        miniray.wait([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="unique"):
        miniray.wait([ref, ref])
    with pytest.raises(ValueError, match="num_returns of wait must be from 1 to 1"):
        miniray.wait([ref], num_returns=2)
    with pytest.raises(ValueError, match="not 0"):
        miniray.wait([ref], num_returns=0)
    for wrong in ("1", 1.0):
        with pytest.raises(
            TypeError, match=f"num_returns of wait must be a whole number, not {wrong!r}"
        ):
            miniray.wait([ref], num_returns=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout of wait must be at least 0"):
        miniray.wait([ref], timeout=-1)


def test_kill_and_cancel_take_what_they_are_for(runtime: FakeRuntime) -> None:
    @miniray.remote
    class Actor: ...

    handle, ref = Actor.remote(), runtime.ref()
    miniray.kill(handle, no_restart=False)
    assert runtime.last == Call("kill", handle._actor_id.hex(), options=False)
    miniray.cancel(ref, force=True)
    assert runtime.last == Call("cancel", ref.hex(), options=(True, True))

    miniray.kill(handle, no_restart=np.bool_(False))  # type: ignore[arg-type]
    assert runtime.last.options is False

    with pytest.raises(ValueError, match=r"use miniray\.cancel"):
        miniray.kill(ref)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"use miniray\.kill"):
        miniray.cancel(handle)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "namespace"), [("", None), (3, None), ("n", ""), ("n", 3)])
def test_get_actor_checks_its_arguments(runtime: FakeRuntime, name: Any, namespace: Any) -> None:
    wrong = TypeError if 3 in (name, namespace) else ValueError
    with pytest.raises(wrong, match=r"must be a string, not 3|must not be an empty string"):
        miniray.get_actor(name, namespace)
