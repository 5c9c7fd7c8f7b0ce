"""Prints the violations in some paths, or in the repository."""

import sys
from pathlib import Path

from tests.language import CHECKED, REPOSITORY, RULES, check


def main(arguments: list[str]) -> int:
    violations = check([Path(path) for path in arguments or [str(REPOSITORY / path) for path in CHECKED]])
    for violation in violations:
        print(violation)
    counts = {rule: sum(violation.rule == rule for violation in violations) for rule in RULES}
    print(f"{len(violations)} violations: " + ", ".join(f"{rule} {count}" for rule, count in counts.items() if count))
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
