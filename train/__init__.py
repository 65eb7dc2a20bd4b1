"""The train layer."""
