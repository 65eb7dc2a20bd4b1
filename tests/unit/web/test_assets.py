"""The page's files: where they come from, how large they are, and that they need no network."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

STATIC = Path(__file__).parents[3] / "miniray/web/static"
#: Files of other projects.
VENDOR = STATIC / "vendor"
#: Lines of JavaScript that the page may have.
MOST_LINES = 2500


def own_files() -> list[Path]:
    return [path for path in STATIC.rglob("*.*") if VENDOR not in path.parents]


def test_files_of_other_projects_are_those_that_are_named() -> None:
    named = {each["file"]: each for each in json.loads((VENDOR / "versions.json").read_text())}
    there = {path.name for path in VENDOR.iterdir()} - {"versions.json", "LICENSES.txt"}
    assert there == set(named)
    for name, each in named.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == each["sha256"], name
        assert each["package"].endswith(each["version"])
        assert each["licence"]


def test_licences_of_other_projects_come_with_their_files() -> None:
    text = (VENDOR / "LICENSES.txt").read_text()
    assert text.count("The above copyright notice and this permission notice") == 2
    for author in ("Google Inc.", "Jason Miller", "Leon Sorokin"):
        assert author in text


def test_all_of_it_is_in_the_package() -> None:
    project = (STATIC.parents[2] / "pyproject.toml").read_text()
    assert 'miniray = ["py.typed", "web/static/**"' in project


def test_the_page_stays_small() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in own_files() if path.suffix == ".js")
    assert lines <= MOST_LINES


def test_files_name_no_other_host() -> None:
    for path in own_files():
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]{2,}", text), path


def test_links_work_behind_a_prefix() -> None:
    """A leading slash would lead past the prefix of a proxy."""
    for path in own_files():
        link = r"""(?:href|src|fetch\(|from)\s*[=(]?\s*["'`]/[^"'`]*"""
        assert not re.findall(link, path.read_text()), path


def test_nothing_is_written_inline_that_a_strict_policy_forbids() -> None:
    text = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|style=|\son[a-z]+=|<script(?![^>]*\bsrc=)", text)


def test_every_module_is_fetched_at_once() -> None:
    """One that only another one names would be fetched after that one."""
    index = (STATIC / "index.html").read_text()
    for path in own_files():
        if path.suffix == ".js":
            assert f'"static/{path.relative_to(STATIC)}"' in index, path
