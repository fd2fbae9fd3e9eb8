"""The line that says what is done while a plan is made: where it is shown, and what it says."""

import io
import logging
import os
import pty
import subprocess
import sys
import textwrap
import threading
import types

import jax
import pytest

import jdelta
from jdelta._src.api import progress
from tests import small

INNER = logging.getLogger("jdelta._src.search.history")


class Lines:
    """What was shown on one line after the other."""

    def __init__(self):
        self.texts = []
        self.opened = self.closed = 0

    def open(self):
        self.opened += 1
        return self

    def show(self, text):
        self.texts.append(text)

    def close(self):
        self.closed += 1


@pytest.fixture
def lines(monkeypatch):
    shown = Lines()
    monkeypatch.setattr(progress, "_line", shown.open)
    return shown


def test_the_line_says_what_is_traced_and_compiled_and_what_is_best(lines):
    plan = jdelta.plan(small.step, 0.5, *small.make_args(512), donate_argnums=0)
    assert lines.texts[0] == "jdelta: tracing the step"
    assert "jdelta: compile 1 for cpu as it is: " in "\n".join(lines.texts)
    assert any(" of at most " in text for text in lines.texts)
    assert any("; best so far " in text and " %" in text for text in lines.texts)
    compiled = [text for text in lines.texts if text.endswith("predicted") or "predicted;" in text]
    assert len(compiled) == plan.compiles
    assert (lines.opened, lines.closed) == (1, 1)


def test_the_last_compile_that_is_promised_is_not_exceeded(lines):
    jdelta.plan(small.step, 0.6, *small.make_args(512))
    for text in lines.texts:
        if " of at most " in text:
            count, most = (text.split()[place] for place in (2, 6))
            assert int(count) <= int(most)


def test_progress_may_be_switched_off(lines):
    jdelta.plan(small.step, 1.0, *small.make_args(512), progress=False)
    jdelta.frontier(small.step, *small.make_args(512), budgets=(1.0,), progress=False)
    jdelta.jit(lambda x: x, progress=False)(1.0)
    jdelta.largest(lambda x: x, lambda n: (jax.numpy.ones(n),), 1 << 10, progress=False)
    assert lines.opened == 0
    with pytest.raises(jdelta.ArgumentError, match="progress"):
        jdelta.plan(small.step, 1.0, *small.make_args(512), progress="no")


def test_several_plans_have_one_line_that_says_which_is_made(lines):
    jdelta.frontier(small.step, *small.make_args(512), budgets=(1.0, 0.9))
    assert (lines.opened, lines.closed) == (1, 1)
    assert lines.texts[0] == "jdelta: budget 1.0 (1 of at most 2): starting"
    assert lines.texts[-1].startswith("jdelta: budget 0.9 (2 of at most 2): compile")
    jdelta.largest(lambda x: x, lambda n: (jax.numpy.ones(n),), 1 << 10)
    assert (lines.opened, lines.closed) == (2, 2)
    assert any(text.startswith("jdelta: size 1 (number 1): ") for text in lines.texts)


def test_the_line_ends_with_an_error_too(lines):
    with pytest.raises(jdelta.BudgetError), progress.showing():
        jdelta.plan(small.step, 1 << 11, *small.make_args(512))
    assert (lines.opened, lines.closed) == (1, 1)


def test_threads_share_the_line_until_the_last_is_done(lines):
    both = threading.Barrier(2)

    def work(number):
        with progress.showing():
            both.wait()
            INNER.info("thread %d", number)
            both.wait()
        INNER.info("nobody is told")

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {"jdelta: thread 1", "jdelta: thread 2"} <= set(lines.texts)
    assert (lines.opened, lines.closed) == (1, 1)


def test_only_the_first_process_of_a_job_shows_it(lines, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with progress.showing():
        INNER.info("tracing")
    assert lines.texts == []


def test_a_line_that_cannot_be_written_stops_nothing(lines, monkeypatch):
    monkeypatch.setattr(lines, "show", lambda _: 1 / 0)
    monkeypatch.setattr(lines, "close", lambda: 1 / 0)
    with progress.showing():
        INNER.info("tracing")


def test_the_users_own_handlers_get_what_they_would_get_without_the_line(lines):
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    outer = logging.getLogger("jdelta")
    outer.addHandler(handler)
    try:
        with progress.showing():
            INNER.info("unasked")
            INNER.warning("warned")
            outer.setLevel(logging.INFO)
            INNER.info("asked")
        INNER.info("asked after it")
    finally:
        outer.setLevel(logging.NOTSET)
        outer.removeHandler(handler)
    assert heard.getvalue().splitlines() == ["warned", "asked", "asked after it"]
    assert lines.texts == ["jdelta: unasked", "jdelta: warned", "jdelta: asked"]


def test_the_log_says_the_same_without_a_line(caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("JDELTA_CACHE_DIR", str(tmp_path))  # else it may be known from there
    with caplog.at_level(logging.INFO, "jdelta"):
        jdelta.plan(small.step, 1.0, *small.make_args(512))
    first, spread, then = caplog.messages[:3]
    assert (first, then) == ("measuring how fast cpu is", "tracing the step")
    assert spread.startswith("repeats of one rate lie up to ")
    assert caplog.messages[-2].startswith("compile 1 for cpu as it is: ")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal(monkeypatch):
    """Makes standard error a terminal, and forgets that this is a test; not in a fixture."""
    monkeypatch.setattr(progress, "_TEST_RUN", ("IS_A_TEST",))
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def test_it_is_shown_on_a_terminal_and_not_in_a_pipe_nor_in_tests(monkeypatch):
    on_terminal(monkeypatch)
    assert isinstance(progress._line(), progress._TerminalLine)
    monkeypatch.setenv("IS_A_TEST", "this one")
    assert progress._line() is None
    monkeypatch.delenv("IS_A_TEST")
    for stream in (io.StringIO(), None, object()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert progress._line() is None


def test_it_is_not_shown_where_the_same_is_logged_on_the_terminal(monkeypatch):
    handler = logging.StreamHandler(on_terminal(monkeypatch))
    outer = logging.getLogger("jdelta")
    outer.addHandler(handler)
    try:
        assert progress._line() is not None
        outer.setLevel(logging.INFO)
        assert progress._line() is None
        handler.setLevel(logging.ERROR)
        assert progress._line() is not None
    finally:
        outer.setLevel(logging.NOTSET)
        outer.removeHandler(handler)


def test_a_notebook_has_one_output_that_is_empty_at_the_end(monkeypatch):
    on_terminal(monkeypatch)
    shown = []

    class Handle:
        def update(self, data, *, raw):
            assert raw
            shown[-1] = data["text/plain"]

    def display(data, *, raw, display_id):
        assert raw
        assert display_id
        shown.append(data["text/plain"])
        return Handle()

    module = types.SimpleNamespace(
        get_ipython=lambda: types.SimpleNamespace(kernel=object()),
        display=types.SimpleNamespace(display=display),
    )
    monkeypatch.setitem(sys.modules, "IPython", module)
    with progress.showing():
        INNER.info("tracing")
        assert shown == ["jdelta: tracing"]
        INNER.info("compile %d", 2)
        assert shown == ["jdelta: compile 2"]
    assert shown == [""]


def on_a_terminal(script):
    """What a script writes there."""
    reads, writes = pty.openpty()
    unset = set(progress._TEST_RUN)
    env = {name: value for name, value in os.environ.items() if name not in unset}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=writes,
        stderr=writes,
        env={**env, "TERM": "xterm", "COLUMNS": "60"},
    )
    os.close(writes)
    text = b""
    while True:
        try:
            part = os.read(reads, 1 << 16)
        except OSError:  # Linux says so at the end
            break
        if not part:
            break
        text += part
    os.close(reads)
    assert process.wait() == 0
    return text.decode()


def test_it_leaves_no_trace_on_the_terminal():
    text = on_a_terminal("""
        import logging
        from jdelta._src.api.progress import showing
        print("before")
        with showing():
            logging.getLogger("jdelta._src.somewhere").info("compile [1] %s", "x" * 80)
            print("printed by the step")
        print("after")
    """)
    assert "jdelta: compile [1] xxx" in text
    assert "x" * 60 not in text  # one line, however long the message
    assert [line for line in screen(text) if line] == ["before", "printed by the step", "after"]


def screen(text):
    """The lines that are left: of the control sequences only those that rich writes are known."""
    left, row = [""], 0
    text = text.replace("\x1b[?25l", "").replace("\x1b[?25h", "")
    while text:
        if text.startswith("\x1b[") and text[2:3] != "":
            end = next(i for i in range(2, len(text)) if text[i].isalpha())
            number, kind = text[2:end], text[end]
            assert kind in "AKm", kind
            row -= int(number or 1) if kind == "A" else 0
            left[row] = "" if kind == "K" else left[row]
            text = text[end + 1 :]
            continue
        char, text = text[0], text[1:]
        if char == "\n":
            row += 1
            left += [""] * (row == len(left))
        elif char != "\r":
            left[row] += char
    return left


def test_rich_is_loaded_for_a_terminal_only():
    script = "import sys, jdelta; jdelta.plan; print('rich' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout == "False\n"
