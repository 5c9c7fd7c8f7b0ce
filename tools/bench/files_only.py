"""`python -m verl_mg` that takes no weights back from engines, for comparisons."""

from verl_mg.cli import main
from verl_mg.rollout.engine_group import ProcessEngineGroup

if __name__ == "__main__":
    ProcessEngineGroup.take_back = lambda *_: "they are compared"  # type: ignore[method-assign]
    main()
