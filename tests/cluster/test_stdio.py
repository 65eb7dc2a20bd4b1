import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from miniray.node.log_lines import LineSplitter

REPOSITORY = Path(__file__).parents[2]
PREAMBLE = "import os, sys\nfrom miniray.worker import stdio\nstdio.install()\n"


def run(code, *options, **kwargs):
    """Run a program with a worker's streams; returns the lines of both and the process."""
    process = subprocess.run(
        [sys.executable, *options, "-c", PREAMBLE + textwrap.dedent(code)],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=30,
        **kwargs,
    )
    return lines(process.stdout), lines(process.stderr), process


def lines(data):
    splitter = LineSplitter()
    return [tuple(line) for line in [*splitter.feed(data), *splitter.close()]]


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


def test_a_mark_is_written_once_and_only_when_there_is_output():
    _, _, process = run(
        """
        for name in "abab": stdio.set_name(name)
        print("x"); print("y")
        stdio.set_name("c")
        """
    )
    assert process.stdout == b"\0miniray:name=b\0x\ny\n"
    assert process.stderr == b""


def test_an_unfinished_line_belongs_to_the_name_before():
    out, _, _ = run('stdio.set_name("f"); print("a", end=""); stdio.set_name("g"); print("b")')
    assert out == [("f", "a"), ("g", "b")]


def test_a_line_is_passed_on_at_once_and_as_one_write():
    program = PREAMBLE + "print('a', 'b', 3); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as process:
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
    _, _, process = run("sys.stdout.close(); sys.stderr = None; stdio.flush_all(); os._exit(7)")
    assert process.returncode == 7


def test_closing_a_stream_leaves_the_descriptor_to_others():
    _, _, process = run("sys.stdout.close(); os.write(1, b'still here')")
    assert process.stdout == b"still here"


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
    out, err, process = run(
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
    assert process.returncode == 0
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
    _, _, process = run(
        """
        import threading
        def chatter():
            while True: print("x" * 1000)
        threading.Thread(target=chatter, daemon=True).start()
        print("end")
        """
    )
    assert process.returncode == 0


def test_a_crash_is_told_by_faulthandler():
    _, err, process = run("import faulthandler; faulthandler.enable(); faulthandler._sigabrt()")
    assert process.returncode < 0
    assert err[0] == ("", "Fatal Python error: Aborted")


def test_text_that_utf8_can_not_hold_is_written_with_backslashes():
    out, _, _ = run(r"print('a\udc80b', 'é')", "-X", "utf8=0")
    assert out == [("", "a\\udc80b é")]


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_a_pipe_that_a_child_made_non_blocking_loses_nothing(size):
    out, err, _ = run(f"os.set_blocking(1, False); print('x' * {size})")
    assert err == []
    assert sum(len(text) for _, text in out) == size
