import asyncio
import os
import subprocess
import sys
import tempfile
import textwrap
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from miniray.node.workers.worker import OutputPipe
from miniray.worker import stdio

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


class Ran(NamedTuple):
    out: list[tuple[str, str]]
    err: list[tuple[str, str]]
    returncode: int


def program(code, file):
    """A program with a worker's streams."""
    begin = f"import os, sys\nfrom miniray.worker import stdio\nstdio.install({file})\n"
    return begin + textwrap.dedent(code)


def run(code, *options):
    """Run a program with a worker's streams, read as a daemon does."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(asyncio.wait_for(_run(code, options, Path(folder)), 30))


async def _run(code, options, folder):
    file = stdio.make({})
    names = stdio.NamePage(file)
    lines = [], []
    out, err = (OutputPipe(partial(names.read, stream), lines[stream].extend) for stream in (0, 1))
    out.begin(folder / "out", "")
    err.begin(folder / "err", "")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *options, "-c", program(code, file)),
        stdout=out.write_end,
        stderr=err.write_end,
        env=ENVIRONMENT,
        pass_fds=[file],
    )
    for fd in (out.write_end, err.write_end, file):
        os.close(fd)
    code = await process.wait()
    out.drain()
    err.drain()
    return Ran(*([tuple(line) for line in each] for each in lines), code)


def test_lines_carry_the_name_under_which_they_were_written():
    out, err, _ = run(
        """
        print("before")
        stdio.set_name("f")
        print("one"); print("two")
        print("wrong", file=sys.stderr)
        stdio.set_name("g")
        print("three")
        """
    )
    assert out == [("", "before"), ("f", "one"), ("f", "two"), ("g", "three")]
    assert err == [("f", "wrong")]


def test_what_others_write_to_the_descriptors_is_written_under_the_name_of_that_moment():
    out, err, _ = run(
        """
        import subprocess
        for number in range(500):
            stdio.set_name(f"f{number}")
            if number % 50 == 0:
                subprocess.run(f"echo {number}; echo {number} >&2", shell=True)
            elif number % 3 == 0:
                os.write(1, b"%d\\n" % number)
            elif number % 5 == 0:
                print(number, file=sys.stderr)
        """
    )
    assert len(out) == 173
    assert len(err) == 70
    assert [(f"f{text}", text) for _, text in out] == out
    assert [(f"f{text}", text) for _, text in err] == err


def test_a_change_of_the_name_is_written_to_no_file_that_user_code_has_put_in_the_way():
    out, _, _ = run(
        """
        import tempfile
        with tempfile.TemporaryFile() as mine:
            stdio.set_name("f")
            print("before")
            saved = os.dup(1)
            os.dup2(mine.fileno(), 1)
            stdio.set_name("g")
            print("redirected")
            stdio.set_name("h")
            os.dup2(saved, 1)
            mine.seek(0)
            print(mine.read())
        """
    )
    assert out == [("f", "before"), ("h", repr(b"redirected\n"))]


def test_a_line_of_c_code_is_passed_on_when_it_ends():
    out, _, _ = run(
        """
        import ctypes
        libc = ctypes.CDLL(None)
        stdio.set_name("f")
        libc.printf(b"by C\\n")
        stdio.set_name("g")
        print("by Python")
        """
    )
    assert out == [("f", "by C"), ("g", "by Python")]


def test_an_unfinished_line_belongs_to_the_name_before():
    out, _, _ = run('stdio.set_name("f"); print("a", end=""); stdio.set_name("g"); print("b")')
    assert out == [("f", "a"), ("g", "b")]


def test_a_line_is_passed_on_at_once_and_as_one_write():
    file = stdio.make({})
    with subprocess.Popen(
        [sys.executable, "-c", program("print('a', 'b', 3); sys.stdin.read()", file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        pass_fds=[file],
    ) as process:
        os.close(file)
        assert os.read(process.stdout.fileno(), 100) == b"a b 3\n"
        process.stdin.close()


def test_a_planned_exit_that_skips_the_interpreter_loses_nothing():
    out, err, _ = run(
        """
        print("a", end=""); print("b", end="", file=sys.stderr)
        stdio.flush_all()
        os._exit(0)
        """
    )
    assert (out, err) == ([("", "a")], [("", "b")])


def test_flushing_is_harmless_when_user_code_has_closed_or_removed_the_streams():
    code = "sys.stdout.close(); sys.stderr = None; stdio.flush_all(); os._exit(7)"
    assert run(code).returncode == 7


def test_closing_a_stream_leaves_the_descriptor_to_others():
    assert run("sys.stdout.close(); os.write(1, b'still here')").out == [("", "still here")]


def test_a_forked_child_does_not_repeat_what_the_parent_had_begun():
    out, _, _ = run(
        """
        print("parent", end=" ")
        if os.fork() == 0:
            print("child")
            sys.exit()
        os.wait()
        print("end")
        """
    )
    assert out == [("", "parent child"), ("", "end")]


def test_writes_to_the_descriptor_and_of_child_processes_pass_through_in_order():
    out, _, _ = run(
        """
        import subprocess
        print("python")
        os.write(1, b"c\\n")
        subprocess.run(["echo", "child"])
        sys.stdout.buffer.write(b"bytes\\n")
        """
    )
    assert [text for _, text in out] == ["python", "c", "child", "bytes"]


def test_a_signal_handler_may_print_while_a_print_is_under_way():
    out, err, code = run(
        """
        import signal
        count = 0
        def handler(*_):
            global count
            count += 1
            print("signal")
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        while count < 50:
            print("x" * 2000)
        signal.setitimer(signal.ITIMER_REAL, 0)
        """
    )
    assert err == []
    assert code == 0
    assert sum(text.count("signal") for _, text in out) >= 50


def test_threads_keep_their_lines_whole():
    out, _, _ = run(
        """
        import threading
        def work(letter):
            for _ in range(300): sys.stdout.write(letter * 100 + "\\n")
        threads = [threading.Thread(target=work, args=(letter,)) for letter in "abcd"]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """
    )
    assert sorted(text for _, text in out) == sorted(letter * 100 for letter in "abcd" * 300)


def test_objects_that_die_with_the_interpreter_may_print():
    out, err, _ = run(
        """
        import atexit
        class Last:
            def __del__(self): print("deleted")
        last = Last(); last.myself = last
        another = Last()
        atexit.register(print, "at exit")
        stdio.set_name("f")
        """
    )
    assert err == []
    assert out == [("f", "at exit"), ("f", "deleted"), ("f", "deleted")]


def test_a_thread_that_still_prints_at_exit_does_not_hold_up_the_interpreter():
    ran = run(
        """
        import threading
        def chatter():
            while True: print("x" * 1000)
        threading.Thread(target=chatter, daemon=True).start()
        print("end")
        """
    )
    assert ran.returncode == 0


def test_a_crash_is_told_by_faulthandler():
    _, err, code = run("import faulthandler; faulthandler.enable(); faulthandler._sigabrt()")
    assert code < 0
    assert err[0] == ("", "Fatal Python error: Aborted")


def test_text_that_utf8_can_not_hold_is_written_with_backslashes():
    out, _, _ = run(r"print('a\udc80b', 'é')", "-X", "utf8=0")
    assert out == [("", "a\\udc80b é")]


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_a_pipe_that_a_child_made_non_blocking_loses_nothing(size):
    out, err, _ = run(f"os.set_blocking(1, False); print('x' * {size})")
    assert err == []
    assert sum(len(text) for _, text in out) == size
