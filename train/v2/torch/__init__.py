"""Modules with the names of ``miniray.train.torch``, where programs written for Ray look."""
