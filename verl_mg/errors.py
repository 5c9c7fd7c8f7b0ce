"""Exception for invalid input that the user can fix, and other exceptions in one line."""

from traceback import extract_tb

EXIT_CODE = 2  # exit code of every rank after a `UserError`


class UserError(Exception):
    """Invalid configuration, layout, data or model directory.

    The message is one line, `<key, file or line>: <what is wrong>. <How to fix it>.` The command line prints it on one
    rank, without a traceback, and every rank exits with code 2.
    """

    def __str__(self) -> str:
        return " ".join(line.strip() for line in super().__str__().splitlines())  # quoted text may have several lines


def one_line(error: BaseException, limit: int = 200) -> str:
    """Returns the type of an exception and the first characters of its message, without a full stop."""
    # Some assertions have no message, but all have a condition.
    place = extract_tb(error.__traceback__)[-1:]
    text = " ".join(str(error).split()) or "".join(frame.line or "" for frame in place)
    return f"{type(error).__name__}: {text[:limit].removesuffix('.')}"
