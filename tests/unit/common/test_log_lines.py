import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniray.common.log_lines import MAX_LINE, LineSplitter, bar_row, clean_name, mark
from miniray.logs.screen import BarKey, BarRegion


def split(*chunks):
    """What each chunk gives, then what the end gives."""
    splitter = LineSplitter()
    return [[tuple(line) for line in splitter.feed(chunk)] for chunk in chunks] + [
        [tuple(line) for line in splitter.close()]
    ]


def texts(*chunks):
    return [[text for _, text in part] for part in split(*chunks)]


def flat(parts):
    return [line for part in parts for line in part]


def test_lines_are_passed_on_when_they_are_complete():
    assert texts(b"one\ntw", b"o\nthr", b"ee") == [["one"], ["two"], [], ["three"]]


def test_empty_lines_and_carriage_returns_of_line_ends_are_kept_apart():
    assert texts(b"a\r\n\r\n\nb\r", b"\nc") == [["a", "", ""], ["b"], ["c"]]


def test_a_mark_names_what_follows_it():
    assert split(b"a\n" + mark(1, b"f") + b"b\nc", mark(2, b"g") + b"d\n") == [
        [("", "a"), ("f", "b")],
        [("f", "c"), ("g", "d")],
        [],
    ]


@pytest.mark.parametrize("cut", range(1, len(mark(1, b"f")) + 2))
def test_a_mark_may_arrive_in_two_parts(cut):
    data = b"a\n" + mark(1, b"f") + b"b\n"
    at = 1 + cut
    assert flat(split(data[:at], data[at:])) == [("", "a"), ("f", "b")]


def test_the_latest_name_counts_whether_a_mark_or_the_reader_tells_it():
    splitter = LineSplitter()
    lines = splitter.feed(b"a\n" + mark(2, b"g") + b"b\n", 1, "f")
    lines += splitter.feed(b"c\nunfini", 1, "f")  # the mark came after that
    lines += splitter.feed(b"d\n", 3, "h")
    assert [tuple(line) for line in lines] == [
        ("f", "a"),
        ("g", "b"),
        ("g", "c"),
        ("g", "unfini"),
        ("h", "d"),
    ]


def test_nul_characters_of_users_are_text():
    assert texts(b"a\0b\0\0c\n\0miniray:nam\n", b"\0") == [
        ["a\0b\0\0c", "\0miniray:nam"],
        [],
        ["\0"],
    ]


def test_a_mark_that_never_ends_becomes_text():
    assert "".join(flat(texts(b"\0miniray:name=" + b"x" * 5000 + b"\n"))).count("x") == 5000


def test_a_name_can_not_break_out_of_its_mark():
    assert split(mark(1, clean_name("a\0b\nc\x1b").encode()) + b"x\n")[0] == [("a b c ", "x")]


def test_a_progress_bar_gives_its_latest_state_and_then_one_line():
    assert texts(b"\r  0%|", b"\r 10%|\r 20%|", b"", b"\r100%|\n") == [
        ["  0%|\r"],
        [" 20%|\r"],
        [],
        ["100%|\r"],
        ["100%|"],
    ]


def test_a_bar_that_writes_its_return_last_is_a_bar_too():
    assert texts(b"10%\r", b"20%\r", b"30%\n") == [[], ["20%\r"], ["30%\r"], ["30%"]]


def test_a_bar_that_clears_itself_leaves_the_next_line_alone():
    assert texts(b"\r 50%|", b"\r      \r", b"done\n") == [[" 50%|\r"], ["\r"], ["done"], []]


def test_a_bar_that_is_cut_off_by_the_end_is_a_line():
    assert texts(b"\r 50%|") == [[" 50%|\r"], [" 50%|"]]


def test_nested_bars_are_states_of_two_lines_and_end_as_lines():
    outer = b"\router 0%"
    inner = [b"\n\rinner %d%%\x1b[A" % percent for percent in (0, 50, 90)]
    assert texts(outer + inner[0], inner[1], inner[2], b"\router 1%\n\ninner\n") == [
        ["outer 0%\r", "inner 0%\r\r"],
        ["inner 50%\r\r"],
        ["inner 90%\r\r"],
        ["outer 1%", "inner 90%", "inner"],
        [],
    ]
    assert [bar_row(text) for text in ("a", "a\r", "a\r\r")] == [None, 0, 1]


def test_nested_bars_may_arrive_in_as_many_parts_as_they_are_written():
    update = [b"\n", b"\rinner 50%", b"\x1b[A"]
    parts = [b"\router 0%", *update, *update, b"\router 1%", *update]
    found = flat(texts(*parts))
    assert [text for text in found if bar_row(text) is None] == ["outer 1%", "inner 50%"]
    assert found[:2] == ["outer 0%\r", "inner 50%\r\r"]


def test_a_bar_that_ended_its_line_is_finished_when_nothing_follows_for_a_while():
    splitter = LineSplitter()
    splitter.feed(b"\r 99%|")
    assert not splitter.unsettled
    assert [line.text for line in splitter.feed(b"\r100%|\n")] == ["100%|\r"]
    assert splitter.unsettled
    assert [line.text for line in splitter.settle()] == ["100%|"]
    assert not splitter.unsettled
    assert splitter.settle() == splitter.close() == []


@pytest.mark.parametrize("following", [[b"plain"], [b"\rbar", b"\rbar"], [b"\rbar\n"]])
def test_a_bar_is_finished_by_what_can_not_belong_to_bars_below_it(following):
    assert texts(b"\r100%|\n", *following)[len(following)][0] == "100%|"


def test_plain_lines_over_a_bar_that_is_gone_are_finished_at_once():
    assert texts(b"\ra\n\rb\x1b[A\n", b"plain\n")[1] == ["a", "plain"]


def test_a_cursor_movement_may_arrive_in_parts():
    whole = b"\ra\n\rb\x1b[A\rc"
    for cut in range(1, len(whole)):
        assert "c" in "".join(flat(texts(whole[:cut], whole[cut:])))
        assert "\x1b" not in "".join(flat(texts(whole[:cut], whole[cut:])))


def test_colours_pass_through():
    assert texts(b"\x1b[31mred\x1b[0m\n")[0] == ["\x1b[31mred\x1b[0m"]


def test_a_long_line_comes_in_pieces_that_do_not_cut_characters():
    text = "é" * MAX_LINE  # two bytes each
    pieces = flat(texts(b"x" + text.encode() + b"\n"))
    assert "".join(pieces) == "x" + text
    assert [len(piece.encode()) for piece in pieces] == [MAX_LINE - 1, MAX_LINE, 2]


def test_a_stream_without_line_ends_does_not_pile_up():
    splitter = LineSplitter()
    passed_on = sum(len(line.text) for _ in range(100) for line in splitter.feed(b"x" * 10_000))
    assert 1_000_000 - passed_on <= MAX_LINE


def test_bytes_that_are_no_utf8_are_replaced():
    assert texts(b"a\xffb\n")[0] == ["a\ufffdb"]


def test_a_character_may_arrive_in_two_parts():
    assert texts(b"\xc3", b"\xa9\n") == [[], ["é"], []]


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_no_bytes_can_break_the_splitter_and_cutting_them_changes_no_plain_line(chunks):
    plain = [chunk.replace(b"\r", b"").replace(b"\x1b", b"") for chunk in chunks]
    assert flat(texts(*plain)) == flat(texts(b"".join(plain)))
    texts(*chunks)


#: What tqdm writes for a bar that stands two lines below (position=2), and for its end.
DOWN, UP = b"\n\n", b"\x1b[A\x1b[A"


def position_two(state):
    return [DOWN, b"\r" + state, UP]


@pytest.mark.parametrize("together", [True, False])
def test_a_bar_below_lines_of_nobody_is_one_state_without_empty_lines(together):
    writes = [*position_two(b"x 0%"), *position_two(b"x 50%"), b"\rx 100%", b"\n"]
    *parts, ended = texts(*([b"".join(writes)] if together else writes))
    shown, finished = BarRegion(), []
    for text in [*flat(parts), *ended]:
        row = bar_row(text)
        if row is None:
            shown.finish_row("", 1, is_stderr=True)
            finished.append(text)
        else:
            shown.update(BarKey("", 1, is_stderr=True, row=row), text.strip("\r"))
    assert finished == ["x 100%"]
    assert not shown


def test_what_a_bar_below_others_leaves_when_it_ends_is_forgotten_when_nothing_follows():
    splitter = LineSplitter()
    for data in (*position_two(b"x 0%"), *position_two(b"x 93%")):
        splitter.feed(data)
    assert not splitter.unsettled
    assert [text for _, text in splitter.feed(b"\rx 100%\n")] == ["x 100%\r"]
    assert splitter.unsettled
    settled = [text for _, text in splitter.settle()]
    assert settled[-1] == "x 100%"
    assert "\r\r\r" in settled  # the third line is cleared
    assert not splitter.unsettled
    assert splitter.close() == []


def test_a_bar_that_is_drawn_below_lines_passed_on_before_moves_to_its_row():
    splitter = LineSplitter()
    assert splitter.feed(DOWN) == []
    assert [text for _, text in splitter.settle()] == ["", ""]  # nobody could know
    assert [text for _, text in splitter.feed(b"\rx 0%")] == ["x 0%\r"]
    assert [text for _, text in splitter.feed(UP)] == ["\r", "\r\r", "x 0%\r\r\r"]
    assert [text for _, text in splitter.feed(DOWN + b"\rx 50%" + UP)] == ["x 50%\r\r\r"]


def test_text_above_a_bar_in_a_lower_line_is_a_line_at_once():
    splitter = LineSplitter()
    splitter.feed(b"".join(position_two(b"x 0%")))
    assert [text for _, text in splitter.feed(b"note\n")] == ["note"]
    assert [text for _, text in splitter.feed(b"".join(position_two(b"x 9%")))][-1] == "x 9%\r\r\r"


def test_empty_lines_before_text_stay_and_so_do_those_before_a_bar_of_its_own_line():
    assert flat(texts(b"a\n\n", b"\nb\n", b"\n\n", b"c\n")) == ["a", "", "", "b", "", "", "c"]
    assert [text for text in flat(texts(b"\n\rx 0%", b"\rx 9%\n")) if bar_row(text) is None] == [
        "",
        "x 9%",
    ]
