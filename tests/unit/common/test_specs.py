"""The way of an option from the user to the worker: it is written down once."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import miniray
from miniray.common.specs import (
    ActorOptions,
    ActorSpec,
    Allocation,
    BundleAffinity,
    GrantedLease,
    JobSpec,
    LeaseSpec,
    NodeAffinity,
    Placement,
    Spread,
)
from miniray.messages import plain
from miniray.node.workers.worker import NodeLease
from miniray.options import actor_options, check_actor

ROOT = Path(miniray.__file__).parent
HELD = Allocation("ab", (("CPU", 5_000),), (("GPU", (("1", 10_000), ("3", 5_000))),), (b"g", 2))


def actor_spec(options: ActorOptions, **others: Any) -> ActorSpec:
    unsaid: dict[str, Any] = {
        "class_key": b"key",
        "class_name": "A",
        "info": b"info",
        "method_groups": {"read": "io"},
        "is_async": True,
        "namespace": "space",
        "detached": True,
        "owner_node": b"node",
        "runtime_env": "{}",
    }
    return ActorSpec.of(options, **unsaid | others)


def sent(data: tuple[Any, ...]) -> Any:
    return plain.loads(plain.dumps(data))


def granted(spec: LeaseSpec | ActorSpec, **others: Any) -> GrantedLease:
    job = JobSpec(namespace="space", driver_node=b"node", sys_path=["/a"])
    return GrantedLease(
        number=1, epoch=2, owner=b"o", job_id=b"j", job=job, spec=spec, allocation=HELD, **others
    )


@pytest.mark.parametrize(
    "placement",
    [None, NodeAffinity("ab", soft=True), BundleAffinity(b"g", 1), Spread()],
    ids=["none", "node", "bundle", "spread"],
)
def test_what_is_asked_for_an_actor_arrives_at_its_worker_as_it_was(placement: Placement) -> None:
    given = {
        "num_cpus": 2,
        "name": "one",
        "max_restarts": 3,
        "max_concurrency": 4,
        "concurrency_groups": {"io": 2},
        "label_selector": {"zone": "a"},
        "fallback_strategy": [{"label_selector": {"zone": "b"}}],
        "_preload": ["json"],
        "_preload_later": ["csv"],
    }
    spec = actor_spec(actor_options(check_actor(given)), placement=placement)
    at_head = ActorSpec.from_wire(sent(spec.to_wire()))
    assert at_head == spec
    lease = granted(at_head, actor_id=b"a", arguments=b"x", restarts=1)
    at_node = NodeLease.from_wire(sent(lease.to_wire()))
    at_worker = GrantedLease.from_wire(sent(at_node.to_wire()))
    assert at_worker == lease
    assert at_worker.actor == spec
    assert (spec.max_concurrency, spec.preload_later) == (4, ("csv",))
    assert at_worker.devices == {"GPU": ["1", "3"]}


def test_a_lease_of_tasks_arrives_at_its_worker_as_it_was() -> None:
    lease = granted(LeaseSpec(name="f", resources={"GPU": 1.5}, max_calls=3), max_calls=3)
    arrived = GrantedLease.from_wire(sent(NodeLease.from_wire(sent(lease.to_wire())).to_wire()))
    assert arrived == lease
    assert arrived.actor is None


@pytest.mark.parametrize("data", [(), (1,) * 40, 5, None, {}, [("nowhere",)] * 19])
def test_what_is_no_spec_is_refused_with_one_of_three_errors(data: Any) -> None:
    with pytest.raises((TypeError, ValueError, KeyError)):
        ActorSpec.from_wire(data)


@pytest.mark.parametrize(
    ("option", "used_in"),
    [("max_concurrency", "worker/actor_modes.py"), ("_preload_later", "node/workers/worker.py")],
)
def test_an_option_is_named_by_the_check_the_spec_and_what_uses_it(
    option: str, used_in: str
) -> None:
    """Nothing on its way from the options to there names it: a new one touches three files."""
    naming = _files_that_name({option, option.lstrip("_")})
    naming.discard("system/option_checks.py")  # how single values are checked
    assert naming == {"options.py", "common/specs.py", used_in}


def _files_that_name(names: set[str]) -> set[str]:
    """Find the files of the package with one of these names."""
    found = set()
    for path in ROOT.rglob("*.py"):
        if "engines" in path.parts:  # another engine has names of its own for options
            continue
        text = path.read_text()
        if not any(name in text for name in names):  # to parse all files takes seconds
            continue
        if any(_name(node) in names for node in ast.walk(ast.parse(text))):
            found.add(str(path.relative_to(ROOT)))
    return found


def _name(node: ast.AST) -> object:
    """What a field, an attribute, an option by its name in quotes, or an argument is called."""
    if isinstance(node, ast.AnnAssign):
        return getattr(node.target, "id", None)
    if isinstance(node, ast.Constant):
        return node.value
    return getattr(node, "attr", None) or (node.arg if isinstance(node, ast.keyword) else None)
