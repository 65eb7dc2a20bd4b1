"""Modules with names of ``miniray.train.torch``."""
