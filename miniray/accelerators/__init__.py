"""Accelerator families: how devices are found, announced and shown to workers."""
