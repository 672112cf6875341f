"""Interrupts held back: none breaks the host's books, none is lost, and the process's handler is as before."""

import asyncio
import signal
import threading

import pytest
from helpers.async_play import AsyncPlay, ask, until
from helpers.fake_engine import MATE, Play, expected, result
from helpers.interrupts import interrupt_at

from photon_jax.client.interrupts import HeldInterrupts


@pytest.fixture(autouse=True)
def usual_handler():
    """A process that a shell starts in the background ignores SIGINT, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def alarms():
    """An alarm raises TimeoutError, as what limits the time of a test or of a notebook's cell has it."""

    def end(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    yield
    assert signal.getsignal(signal.SIGALRM) is end
    signal.signal(signal.SIGALRM, before)


def test_interrupts_are_raised_once_when_the_outermost_section_is_left():
    reached = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupts():
        with HeldInterrupts():
            signal.raise_signal(signal.SIGINT)
            reached.append("inner")
        signal.raise_signal(signal.SIGINT)
        reached.append("outer")
    assert reached == ["inner", "outer"]
    with HeldInterrupts():
        pass


def test_an_interrupt_is_not_lost_when_the_section_raises():
    with pytest.raises(KeyboardInterrupt) as caught, HeldInterrupts():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("also")
    assert isinstance(caught.value.__context__, ValueError)


def test_the_handler_of_the_caller_is_what_gets_the_interrupt():
    seen = []
    handler = lambda number, frame: seen.append(number)  # noqa: E731
    signal.signal(signal.SIGINT, handler)
    with HeldInterrupts():
        signal.raise_signal(signal.SIGINT)
        assert not seen
    assert seen == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with HeldInterrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.usefixtures("alarms")
def test_signals_of_several_kinds_are_each_handled_and_none_keeps_another_from_it():
    with pytest.raises((KeyboardInterrupt, TimeoutError)) as caught, HeldInterrupts():
        for number in (signal.SIGALRM, signal.SIGINT, signal.SIGALRM):
            signal.raise_signal(number)
    assert {caught.type, type(caught.value.__context__)} == {KeyboardInterrupt, TimeoutError}


@pytest.mark.usefixtures("alarms")
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, TimeoutError)])
def test_a_signal_at_any_line_of_a_section_leaves_every_handler_as_it_was(number, error):
    handlers = {each: signal.getsignal(each) for each in signal.valid_signals()}
    line, is_over = 0, False

    def section():
        with HeldInterrupts():
            pass

    while not is_over:
        line += 1
        is_over = interrupt_at(line, section, number=number, error=error) is not None
        assert {each: signal.getsignal(each) for each in signal.valid_signals()} == handlers, line
    assert line > 10, "each line had its turn"


def test_other_threads_leave_the_handler_alone():
    seen = []

    def work():
        with HeldInterrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


@pytest.mark.usefixtures("alarms")
@pytest.mark.parametrize(
    ("number", "error", "stride"), [(signal.SIGINT, KeyboardInterrupt, 1), (signal.SIGALRM, TimeoutError, 13)]
)
def test_an_interrupt_at_any_line_aborts_the_callers_requests_and_no_others(number, error, stride):
    line, is_over = 0, False
    while not is_over:
        line += stride
        play = Play(steps_ahead=1)
        stream = play.stream(MATE, max_tokens=2)
        submissions = play.submit(MATE, max_tokens=2, n=2)
        done = interrupt_at(line, lambda: play.client.run(submissions), number=number, error=error)  # noqa: B023
        is_over = done is not None
        if not is_over:
            play.client.abort_all(submissions)  # as LLM does: it may have come before run() had begun
        assert result([*stream][-1]) == expected(MATE, 2), line
        play.check_idle()
    assert line > 300, "each line had its turn"
    assert result(submissions[0].output(), 1) == expected(MATE, 2)


def test_an_interrupt_at_any_line_of_a_submission_in_an_event_loop_leaves_nothing_behind():
    play = AsyncPlay()

    async def main():
        engine = play.open()
        line, is_over = 0, False
        while not is_over:
            line += 1
            is_over = interrupt_at(line, lambda: engine.stream(*ask(MATE, 2)).close()) is not None
            await until(lambda: not engine._live)
        assert line > 50, "each line had its turn"
        assert result(await engine.generate(*ask(MATE, 2))) == expected(MATE, 2)
        engine.close()

    loop = asyncio.new_event_loop()  # asyncio.run would have a handler of its own
    loop.run_until_complete(main())
    loop.close()
    play.check_idle()
