"""Real vLLM servers in tests, started as users start them: OpenAI's protocol, with the weights of the model."""

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.helpers.sglang_servers import START_SECONDS, answers, free_port
from tests.helpers.warm_start import VLLM_PYTHON
from verl_mg.engines.vllm.arguments import ON_CPU


class RunningVllmServer:
    """A server of a model in float32, which serves it as `teacher`."""

    def __init__(self, model: Path, log: Path) -> None:
        """Starts the server; its output goes to the log."""
        self._log, port = log, free_port()
        self.url = f"http://127.0.0.1:{port}"
        served = ["--model", str(model), "--served-model-name", "teacher", "--host", "127.0.0.1", "--port", str(port)]
        chosen = ["--dtype", "float32", "--enforce-eager"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", *served, *chosen],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | ON_CPU | {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
            )

    def wait_until_ready(self) -> None:
        until = time.monotonic() + START_SECONDS
        while not answers(f"{self.url}/health"):
            assert self._process.poll() is None and time.monotonic() < until, self._log.read_text()[-3000:]
            time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
