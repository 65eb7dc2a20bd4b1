"""Accelerator families: one file each."""
