"""What the engine lacks or does otherwise: refusals, and the table of ``docs/ray_engine.md``."""

from __future__ import annotations

from typing import NoReturn

from miniray.exceptions import EngineError

#: Features that are refused at the call, and what to do instead.
REFUSED = {
    "util.state": "miniray.util.state looks at miniray's head; use `ray.util.state` or "
    "`ray list actors`",
    "util.memory": "the memory report looks at miniray's store; use `ray memory`",
    "util.metrics": "metrics are sent to miniray's nodes; use `ray.util.metrics`",
    "timeline": "it is asked of miniray's workers; use `ray.timeline`",
    "util.tpu": "slices are reserved by miniray's head; use `ray.util.tpu`",
    "commands": "those of miniray are for its own clusters; use `ray status`, `ray list`, "
    "`ray logs`, `ray memory`, `ray stack` and `ray job submit`, or leave out MINIRAY_ENGINE=ray",
    "cluster_utils": "it starts nodes of miniray; use `ray.cluster_utils.Cluster`",
    "generators over ray://": "Ray Client has no streaming; run the driver inside the cluster, "
    'with address="auto" or as a Ray job',
}

#: What works otherwise than on miniray's own engine, since Ray decides it.
DIFFERENT = {
    "exceptions of workers": "ends of processes are described in Ray's words; an exception whose "
    "attributes can't be read ends its worker",
    "refs": "they are Ray's own, of 28 bytes, and pass to its functions too; so are the ids of "
    "placement groups. `as_future()` warns as Ray does: use `await`",
    "errors over ray://": "of what did not run, such as calls of a dead actor, futures and `await` "
    "raise Ray's; `get` raises miniray's",
    "names of calls": "errors have those of the process's last 10,000 calls",
    "ends of actors": "`__miniray_shutdown__` is not called: name the method `__ray_shutdown__`",
    "drivers": "what only tasks have, as `get_task_id()`, is None there, with a warning of Ray",
    "preloaded modules": "the option _preload has no effect",
    "fractions of devices": "Ray counts totals per node, not shares per device",
    "reasons for waiting": "`ray status` shows them",
    "ranks that hang": "their error does not show where they hang; `ray stack` does",
    "encryption": "as the Ray cluster is configured; miniray's TLS is that of its own clusters",
    "code of your own modules": "workers of a cluster need them: give "
    'runtime_env={"working_dir": "."}; on the driver\'s machine they look in the folder of the '
    "program, too, and in the current one",
}


def refuse(capability: str) -> NoReturn:
    """Raise EngineError for features that the engine lacks."""
    raise EngineError(f"The engine 'ray' does not have this: {REFUSED[capability]}.")


def table() -> str:
    """Return both lists as a table in Markdown."""
    rows = [f"| {name} | refused | {why} |" for name, why in REFUSED.items()]
    rows += [f"| {name} | different | {why} |" for name, why in DIFFERENT.items()]
    return "\n".join(["| what | | |", "|---|---|---|", *rows])
