"""The `miniray` command."""
