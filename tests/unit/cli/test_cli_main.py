from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests_cli_support import one_line

from miniray.cli.options import JSON, LABELS, SIZE
from miniray.system.session import create_session
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result


def test_the_version_is_the_packages(miniray: Callable[..., Result]) -> None:
    assert miniray("--version").stdout == f"miniray {VERSION}\n"


def test_without_a_command_the_help_names_them(miniray: Callable[..., Result]) -> None:
    result = miniray()
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("start", "stop", "status"))


def test_a_group_without_a_command_shows_its_help_line_by_line(
    miniray: Callable[..., Result],
) -> None:
    lines = miniray("job").output.splitlines()
    assert lines[0].startswith("Usage: ")
    assert any(line.split()[:1] == ["submit"] for line in lines)


def test_the_help_has_whole_sentences_of_all_commands(miniray: Callable[..., Result]) -> None:
    shown = " ".join(miniray("--help").stdout.partition("Commands:")[2].split())
    assert "..." not in shown
    assert "start Start a node on this machine: a new cluster (--head), or one more node" in shown


def test_what_was_probably_meant_is_told_in_a_sentence(miniray: Callable[..., Result]) -> None:
    line = one_line(miniray("stat"))
    assert "No such command 'stat'. Did you mean one of: 'stack', 'start', 'status'? See '" in line
    assert "'--force'? See '" in one_line(miniray("stop", "--frob"))


def test_a_folder_that_cannot_be_made_is_told_with_its_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(OSError, match=r"No folder can be made in /proc/x .*--temp-dir"):
        create_session("/proc/x")
    monkeypatch.setenv("MINIRAY_TMPDIR", "/proc/y")
    with pytest.raises(OSError, match=r"No folder can be made in /proc/y .*MINIRAY_TMPDIR"):
        create_session()


def test_unknown_commands_and_options_are_one_line(miniray: Callable[..., Result]) -> None:
    assert "No such command 'begin'" in one_line(miniray("begin"))
    assert "no command 'submit': use `miniray job submit`." in one_line(miniray("submit", "a.py"))
    assert "--wrong" in one_line(miniray("--wrong"))
    assert "--wrong" in one_line(miniray("stop", "--wrong"))


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("100", 100), ("1k", 1024), ("1.5 GiB", 3 * 2**29), ("2MB", 2**21), ("7B", 7)],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert SIZE.convert(text, None, None) == size


def test_labels_come_as_pairs_or_as_json() -> None:
    expected = {"zone": "a", "disk": ""}
    assert LABELS.convert("zone=a, disk=", None, None) == expected
    assert LABELS.convert('{"zone": "a", "disk": ""}', None, None) == expected
    assert JSON.convert("{}", None, None) == {}


def test_an_environment_that_is_no_json_is_told_with_an_environment(
    miniray: Callable[..., Result],
) -> None:
    result = miniray("job", "submit", "--runtime-env-json", "{pip", "--", "true")
    assert result.exit_code == 2
    assert """Write it as '{"pip": ["emoji"]}'.""" in result.output
