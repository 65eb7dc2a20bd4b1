"""Modules with the names of ``miniray.train``, where programs written for Ray look."""

from __future__ import annotations

from miniray.common.absent import tell_imports

_HERE = "import from miniray.train itself what is public"
tell_imports(
    __name__,
    dict.fromkeys(
        ("context", "preemption", "reported_checkpoint", "train_fn_utils", "validation_config"),
        _HERE,
    ),
)
