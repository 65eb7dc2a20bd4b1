"""``python -m miniray``: the ``miniray`` command of this interpreter, wherever scripts went."""

from miniray.cli.main import main

main()
