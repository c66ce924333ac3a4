"""The two errors that a user can do something about."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input; the message names the cause and the remedy (command line: exit 2)."""


class GateError(RuntimeError):
    """The model does not show the capability, so nothing is claimed (command line: exit 1)."""
