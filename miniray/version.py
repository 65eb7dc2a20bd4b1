"""The version of the package; nodes of one cluster must agree on it."""

VERSION = "0.1.0"
