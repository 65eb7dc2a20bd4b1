"""Modules with names of ``miniray.train``."""

from miniray.common.absent import tell_imports

_HERE = "import from miniray.train itself what is public"
_ABSENT = ("context", "preemption", "reported_checkpoint", "train_fn_utils", "validation_config")
tell_imports(__name__, dict.fromkeys(_ABSENT, _HERE))
