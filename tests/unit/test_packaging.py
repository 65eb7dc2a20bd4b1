"""What an installation that is not editable has in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``setup.py`` as a module that sets up nothing and generates nothing."""
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    spec = importlib.util.spec_from_file_location("setup_of_miniray", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "generate", lambda: None)
    return module


def test_a_wheel_has_the_generated_code_also_if_it_was_not_there_before_the_build(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from setuptools import Distribution
    from setuptools.command.build_py import build_py

    built: list[str] = []
    monkeypatch.setattr(build_py, "run", lambda self: built.extend(self.packages))
    build = setup_py.BuildWithProto(Distribution({"packages": ["miniray"]}))
    build.finalize_options()
    build.run()
    assert built == ["miniray", "miniray._proto"]
