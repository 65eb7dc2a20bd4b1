"""Names of what runs, as the runtime context tells them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from miniray.calls.context import Execution
from miniray.common.names import call_site, describe, module_of, printable, without_passwords

PROGRAM = """
import functools

def plain(): ...

wrapped = functools.wraps(plain)(library_decorator)

class WithMethods:
    limit = 3
    def run(self): ...

class Empty: ...
"""


def of_program(file: str) -> dict[str, Any]:
    """What a program defines."""
    found: dict[str, Any] = {"__name__": "__main__", "library_decorator": lambda: None}
    exec(compile(PROGRAM, file, "exec"), found)
    return found


@pytest.mark.parametrize("name", ["plain", "wrapped", "WithMethods"])
def test_what_a_program_defines_is_of_the_module_that_its_file_would_be(name: str) -> None:
    assert module_of(of_program("/somewhere/train.py")[name]) == "train"


@pytest.mark.parametrize("name", ["plain", "WithMethods"])
def test_what_is_typed_in_is_of_main(name: str) -> None:
    assert module_of(of_program("<stdin>")[name]) == "__main__"


def test_a_class_of_a_program_without_functions_is_of_main() -> None:
    assert module_of(of_program("/somewhere/train.py")["Empty"]) == "__main__"


def test_other_code_is_of_its_module() -> None:
    assert module_of(of_program) == __name__
    assert module_of(Execution) == "miniray.calls.context"
    assert module_of(len) == "builtins"
    assert module_of(functools.partial(len)) == "functools"


def test_the_functions_around_what_runs_are_left_out() -> None:
    def inner() -> None: ...

    running = Execution(b"", "given", "outer.<locals>.Actor.run")
    assert running.function_name(None) == "Actor.run"  # its class is still being loaded
    assert running.function_name(Execution) == "miniray.calls.context.Actor.run"
    running.function = inner
    assert running.function_name(None) == f"{__name__}.inner"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x @ https://me:hunter2@host/x", "x @ https://me:***@host/x"),
        (
            "git+https://TOKEN@host/x and https://me:a@b@host",
            "git+https://***@host/x and https://me:***@host",
        ),
        ("https://:hunter2@host", "https://:***@host"),
        ("https://host/a@b:c me:you@host", "https://host/a@b:c me:you@host"),
    ],
)
def test_passwords_of_addresses_are_left_out(text: str, shown: str) -> None:
    assert without_passwords(text) == shown
    assert without_passwords(shown) == shown


def test_what_could_steer_a_terminal_or_forge_a_line_is_escaped() -> None:
    assert printable("evil\x1b]0;owned\x1b[2J\nNodes: fake") == (
        r"evil\x1b]0;owned\x1b[2J\nNodes: fake"
    )
    assert printable("\x9b2J\u202e\r") == r"\x9b2J\u202e\r"
    assert printable("Zähler 数 · 1") == "Zähler 数 · 1"


def test_the_call_site_is_the_innermost_frame_of_user_code() -> None:
    namespace: dict[str, Any] = {"__name__": "miniray.train.loop", "call_site": call_site}
    exec("def inside():\n    return call_site()", namespace)
    file, line, function = namespace["inside"]()
    assert (file, line > 0) == (__file__, True)
    assert function.endswith("test_the_call_site_is_the_innermost_frame_of_user_code")
    assert describe(("a.py", 3, "main")) == "a.py:3 in main"
    assert (describe("square"), describe(None)) == ("square", "")
