"""Runtime environments: packages of user code, virtual environments, variables."""
