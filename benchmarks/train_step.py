"""What training with fit costs beside torchrun and copytree: steps, starts, checkpoints, recovery.

    python benchmarks/train_step.py [--against ray] [--only ROW ...] [--repeats N] [--json FILE]

The work is a small vision transformer on synthetic images with two ranks on CPUs. What is
compared takes turns within one run, so that both see the same machine; with
``--against ray`` the same programs run on Ray Train too.
"""

from __future__ import annotations

from _cli import parser, run
from _common import load_rows
from _sizes import SIZE


def main() -> None:
    arguments = parser("Training beside torchrun and copytree, one table.")
    arguments.add_argument(
        "--tiny", action="store_true", help="do so little that figures mean nothing: to try it"
    )
    args = arguments.parse_args()
    environment = {SIZE: "tiny"} if args.tiny else {}
    run(load_rows(("_rows_steps", "_rows_checkpoints")), args, environment)


if __name__ == "__main__":
    main()
