"""Checks on a machine with real GPUs what the tests can only check on logical ones.

    python benchmarks/gpu_check.py                      # all checks
    python benchmarks/gpu_check.py visibility nccl      # those whose names have one of these words

Detection, visibility, two workers that share a GPU, device memory that is free again after a
task and after a kill, NCCL, mixed precision, copies ahead of use, and what Ray's pages on training
assert of ``torch.cuda``. Each check is made in a process and a cluster of its own, so that one that
hangs takes no other along. Prints a line for each and exits with 1 if one failed; one that does not
end in time is a failure too. Says "no GPU" and exits with 0 on a machine without; a check that
cannot be made here (no PyTorch, only one GPU, a GPU that others fill) is told as skipped.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from _gpu_checks import CHECKS, SkippedError, ask_torch
from _gpu_checks_train import TRAIN_CHECKS

import miniray
from miniray.accelerators.host import this_host
from miniray.accelerators.node_resources import resolve_node_accelerators

if TYPE_CHECKING:
    from _gpu_checks import Check

    from miniray.accelerators.node_resources import NodeAccelerators

#: Seconds that a check may take altogether: the first import of PyTorch from a cold disk is slow,
#: and memory is freed slowly where the driver is busy.
_CHECK_LIMIT = 300.0
#: Seconds that the process of a check has to say where it hangs.
_GRACE = 10.0
#: Exit code of a check's process.
_VERDICTS = {0: "ok", 1: "FAILED", 3: "skipped"}


def main(words: list[str], checks: tuple[Check, ...] = (*CHECKS, *TRAIN_CHECKS)) -> int:
    """Make the checks whose names have one of these words, or all; the exit code."""
    found = resolve_node_accelerators(None, {}, this_host())
    if "GPU" not in found.devices:
        print("no GPU")
        return 0
    chosen = [check for check in checks if not words or any(word in _name(check) for word in words)]
    if not chosen:
        print(f"no check has such a name; there are {', '.join(map(_name, checks))}")
        return 2
    ask_torch()  # takes long, so all checks are to inherit the answer
    verdicts = [_verdict(check, found) for check in chosen]
    counts = ", ".join(f"{verdicts.count(each)} {each}" for each in _VERDICTS.values())
    print(f"{len(chosen)} checks: {counts}")
    return int("FAILED" in verdicts)


def _name(check: Check) -> str:
    return check.__name__.replace("_", " ")


def _verdict(check: Check, found: NodeAccelerators) -> str:
    """Make a check in a process of its own, whose cluster ends with it."""
    sys.stdout.flush()
    process = multiprocessing.get_context("fork").Process(target=_make, args=(check, found))
    process.start()
    process.join(_CHECK_LIMIT + _GRACE)
    if process.is_alive():
        process.kill()
        process.join()
    verdict = _VERDICTS.get(process.exitcode or 0)
    if verdict is None:
        code = process.exitcode
        print(f"FAILED   {_name(check)}: its process ended with exit code {code}", flush=True)
    return verdict or "FAILED"


def _make(check: Check, found: NodeAccelerators) -> None:
    """Make a check and print what came of it; exits with its verdict."""
    watch = threading.Timer(_CHECK_LIMIT, _give_up, (_name(check),))
    watch.daemon = True
    watch.start()
    start = time.monotonic()
    try:
        miniray.init(address="local", num_cpus=8, log_to_driver=False)
        try:
            code, text = 0, f"{check(found)} ({time.monotonic() - start:.1f} s)"
        finally:
            miniray.shutdown()
    except SkippedError as reason:
        code, text = 3, str(reason)
    except BaseException:  # noqa: BLE001 - whatever a check ends in is its result
        code, text = 1, traceback.format_exc()
    watch.cancel()
    print(f"{_VERDICTS[code]:<8} {_name(check)}: {text}", flush=True)
    sys.exit(code)


def _give_up(name: str) -> None:
    """A check does not end: say where it is, and end; the cluster ends with this process."""
    print(f"FAILED   {name}: not done within {_CHECK_LIMIT:g} s", flush=True)
    faulthandler.dump_traceback()
    os._exit(1)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Check miniray on real GPUs.")
    options.add_argument("words", nargs="*", help="only checks whose names have one of these words")
    sys.exit(main(options.parse_args().words))
