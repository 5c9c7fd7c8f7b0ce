"""Program in the sandbox that runs the checker of a problem on the output of a solution, whose process has ended.

stdin: `{"checker": source, "files": {name: text, ...}}`. The checker gets the names of the files as arguments, as the
programs `generated_checker` of open-r1/codeforces expect, and prints its score.
"""

import json
import sys


def main() -> None:
    """Writes the files and runs the checker."""
    request = json.load(sys.stdin)
    for name, text in request["files"].items():
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    sys.argv = ["checker.py", *request["files"]]
    exec(compile(request["checker"], "checker.py", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
