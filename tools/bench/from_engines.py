"""`python -m verl_mg` that takes weights back from engines also where files are faster, for comparisons and tests."""

from verl_mg.cli import main
from verl_mg.weight_sync import kept_weights

if __name__ == "__main__":
    kept_weights.files_are_faster = lambda: False
    main()
