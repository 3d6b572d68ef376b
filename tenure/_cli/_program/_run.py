"""A program that runs in this process, and the recorder around it."""

from __future__ import annotations

from ._errors_of_theirs import tell_without_us
from ._main_module import Program
from ._recorder import Recorder, Settings


def run_recorded(program: Program, settings: Settings) -> int:
    """Run a program in this process, and record it.

    Returns:
        The exit code of a program that came to its end.

    Raises:
        BaseException: whatever the program raises, so that the interpreter tells it and ends with
            the code that it has for it.
    """
    recorder = Recorder(program, settings)
    program.become_main()
    recorder.begin()
    try:
        program.execute(recorder.on_code)
    except BaseException as error:
        recorder.ended(error)
        tell_without_us(error, program.after)
        raise
    recorder.ended(None)
    program.after()
    return 0
