"""What tilewise raises and warns with."""


class ArgumentError(ValueError, RuntimeError):
    """An argument is wrong: the message names it, its shape or value, and the remedy.

    It is a ValueError and a RuntimeError, because callers of flash-attn catch the one and callers
    of torch the other.
    """


class PerformanceWarning(UserWarning):
    """A slower GPU backend serves this call; the message says why. Given once per reason."""
