"""Exception for invalid input that the user can fix."""

EXIT_CODE = 2  # exit code of every rank after a `UserError`


class UserError(Exception):
    """Invalid configuration, layout, data or model directory.

    The message is one line, `<key, file or line>: <what is wrong>. <How to fix it>.` The command line prints it on one
    rank, without a traceback, and every rank exits with code 2.
    """

    def __str__(self) -> str:
        return " ".join(line.strip() for line in super().__str__().splitlines())  # quoted text may have several lines
