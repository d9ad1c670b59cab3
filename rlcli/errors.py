"""The three ways a command ends other than well; `app.py` turns each into one line and its exit code."""


class MsrlError(Exception):
    """Base of every error that is meant for the user's eyes: its text is one clear line, or a few."""

    exit_code = 1


class UserError(MsrlError):
    """The user's input is wrong (file, row, key, arithmetic): says what, where, and what to do. Exit code 2."""

    exit_code = 2


class RunError(MsrlError):
    """Something failed at run time: names the worker and the step, and what is left to resume from. Exit code 1."""

    exit_code = 1


class WorkerLost(RunError):
    """A worker is dead, silent or late beyond its deadline: the run cannot go on without it."""


class StoppedEarly(MsrlError):
    """The run ended before its last step, by a signal, a time budget or a policy, and can be resumed. Exit code 3."""

    exit_code = 3
