"""What a program says when it fails: one line on stderr and a status; the traceback with ``VLA_TRACEBACK=1``.

It imports the standard library alone, because it is the first import of programs that take seconds to import others.
"""

import argparse
import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

TRACEBACK = "VLA_TRACEBACK"
WRONG_USE, FAILED, INTERRUPTED, UNREAD = 2, 1, 130, 141  # exit status; the last two as of the signals
_LONGEST = 1000  # characters of a line
_SAID = (ValueError, OSError, RuntimeError, ImportError)  # kinds whose message was written for the user


def begin_program(module: str, checks: str = "") -> None:
    """Prepare the imports of a recipe, before torch; sets hooks if ``module`` is ``"__main__"``.

    Then ``check_typed()`` of the module ``checks`` is called, which may end the program.
    """
    # A thread that waits must sleep, because the simulators need the cores meanwhile.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # TorchRL says of each buffer that it is there
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "10")  # seconds: a log gets no more of a progress bar
    if module == "__main__":
        warnings.showwarning = _warn
        sys.excepthook = _while_importing
        signal.signal(signal.SIGINT, _leave)
        if checks:
            importlib.import_module(checks).check_typed()


def end_imports() -> None:
    """Let Ctrl-C raise again: everything is imported."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _leave(*_: object) -> NoReturn:
    os._exit(report(KeyboardInterrupt()))  # half of an import turns it into errors of its own, and has threads


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run a command's ``main``; end the program with the status that it returns, or with one line that says why not."""
    try:
        status = main()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        status = report(error)
    sys.exit(status)


def has_begun(error: BaseException) -> bool:
    """Tell whether an error came after work had begun: then a note with the folder of the run was added to it."""
    return bool(getattr(error, "__notes__", None))


def report(error: BaseException) -> int:
    """Print what went wrong: one line, or a traceback if it was asked for or tells more.

    Once work has begun a mistake of the user is unlikely: then all but our own errors and those of the operating system
    have their traceback. Returns the exit status: 2 for what was wrong before work began, 1 for a failure, 130 for
    Ctrl-C, 141 for a closed pipe.
    """
    if isinstance(error, BrokenPipeError) and error.filename is None:  # ppo.py --cfg job | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return UNREAD
    begun = has_begun(error)
    ours = type(error).__module__.startswith("vla_") or isinstance(error, (OSError, KeyboardInterrupt))
    if os.environ.get(TRACEBACK) == "1" or (begun and not ours):
        traceback.print_exception(error)
    if ours or not begun:
        print(f"error: {printable(_explained(error))}", file=sys.stderr, flush=True)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return FAILED if begun else WRONG_USE


def printable(text: str) -> str:
    """Return a text in which is nothing that a terminal obeys."""
    return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in text)


def one_line(text: str) -> str:
    """Join the lines of a message, and shorten one that is too long to read."""
    text, _, of_worker = text.partition("Traceback (most recent call last):\n")  # its last line is the error
    if of_worker:
        text += of_worker.strip().rpartition("\n")[2]
    joined = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        joined += ("" if not joined else " " if joined[-1] in ".,:;(" else "; ") + line
    if len(joined) <= _LONGEST:
        return joined
    return f"{joined[:_LONGEST]} ... ({TRACEBACK}=1 shows all)"


def _explained(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; type the same command to start again"
    text = one_line(str(error))
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.strerror}: {error.filename}"
    if isinstance(error, _SAID) and text:
        return text
    return f"{type(error).__name__}: {text}; {TRACEBACK}=1 shows where"


def _while_importing(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    if not isinstance(error, ModuleNotFoundError):
        sys.__excepthook__(kind, error, where)
        return
    error.msg += f" in {sys.executable}; type the Python that vla-torchrl is installed in (docs/install.md)"
    os._exit(report(error))  # threads of half an import must not be waited for


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        """Print the line and end the program."""
        print(f"error: {one_line(message)}; type: {self.prog} --help", file=sys.stderr)
        sys.exit(WRONG_USE)
