"""Server with environments of OpenEnv for the tests, below /digits, /moves and /tools; runs in OpenEnv's environment.

/digits is the game of tests/recipes/agents/digit_game.py for one session at a time, /moves wants actions of two fields,
/tools has tools. The first line of the output is the server's URL.
"""

import socket
import sys
from pathlib import Path
from typing import Literal

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "agents"))
from digit_game import Digit, DigitGame, Message


class Move(Action):
    direction: Literal["left", "right"]
    steps: int


class Place(Observation):
    x: int
    goal: int


class Moves(Environment[Move, Place, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, goal: int = 3, **_: object) -> Place:
        self.x, self.goal = 0, goal
        return Place(x=0, goal=goal)

    def step(self, action: Move, timeout_s: float | None = None, **_: object) -> Place:
        self.x += action.steps if action.direction == "right" else -action.steps
        done = self.x == self.goal
        return Place(x=self.x, goal=self.goal, done=done, reward=1.0 if done else -0.25)

    @property
    def state(self) -> State:
        return State()


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tools")

        @server.tool
        def double(number: int) -> int:
            """Doubles a number."""
            return 2 * number

        @server.tool
        def submit(answer: int) -> str:
            """Ends the episode."""
            return "submitted"

        super().__init__(server)

    def reset(self, **_: object) -> Observation:
        return Digit(text="Double 21 and submit it.")

    async def step_async(self, action: Action, timeout_s: float | None = None, **more: object) -> Observation:
        result = await super().step_async(action, timeout_s=timeout_s, **more)
        if isinstance(action, CallToolAction) and action.tool_name == "submit":
            result.done, result.reward = True, float(action.arguments.get("answer") == 42)
        return result

    def _step_impl(self, action: Action, timeout_s: float | None = None, **more: object) -> Observation:
        raise ValueError("only tools")

    @property
    def state(self) -> State:
        return State()


def main() -> None:
    app = FastAPI()
    app.mount("/digits", create_fastapi_app(DigitGame, Message, Digit, max_concurrent_envs=1))
    app.mount("/moves", create_fastapi_app(Moves, Move, Place, max_concurrent_envs=8))
    app.mount("/tools", create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=8))
    with socket.create_server(("127.0.0.1", 0)) as server_socket:
        print(f"http://127.0.0.1:{server_socket.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[server_socket])


if __name__ == "__main__":
    main()
