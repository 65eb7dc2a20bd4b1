"""Stands in for the compiler's front end."""
