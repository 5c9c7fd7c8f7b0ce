"""What a process that SGLang spawns has imported: `python -m tests.engines.sglang.packages_probe HOST WORK`.

The process begins as a scheduler does, with the engine's module HOST as its main module. With the WORK `import` it then
imports the scheduler and what it imports when it builds its model; `begin` imports nothing. Prints one JSON object.
"""

import json
import multiprocessing
import sys
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection


def begin(answer: Connection) -> None:
    answer.send({"packages": _packages(), "hidden": [name for name, module in sys.modules.items() if module is None]})


def imported(answer: Connection) -> None:
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler
    import sglang.srt.model_executor.model_runner  # noqa: F401
    from torch_memory_saver import torch_memory_saver

    answer.send({"packages": _packages(), "memory_saver": torch_memory_saver._impl_ctor_kwargs})


def _packages() -> list[str]:
    return sorted({name.partition(".")[0] for name, module in sys.modules.items() if module is not None})


def main() -> None:
    from tests.engines.sglang import packages_probe  # the child has another main module

    work = {"begin": packages_probe.begin, "import": packages_probe.imported}[sys.argv[2]]
    # By its name a spawned process finds its main module.
    sys.modules["__main__"].__spec__ = ModuleSpec(sys.argv[1], None)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=work, args=(sender,))
    process.start()
    sender.close()
    print(json.dumps(receiver.recv()))
    process.join()


if __name__ == "__main__":
    main()
