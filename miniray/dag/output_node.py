"""``MultiOutputNode``, where Ray has it."""

from miniray.dag.nodes import MultiOutputNode

__all__ = ["MultiOutputNode"]
