"""``InputNode``, where Ray has it."""

from miniray.dag.nodes import InputAttributeNode, InputNode

__all__ = ["InputAttributeNode", "InputNode"]
