"""`python -m verl_mg`, which torchrun starts on every rank."""

from verl_mg.cli import main

if __name__ == "__main__":
    main()
