"""Server of OpenEnv with a text game that a tiny model of random weights can learn; runs in OpenEnv's environment.

    python digit_game.py --turns 2 --width 2 --digits 10

In each turn the observation is one of the first digits and "=", such as `7=`, and the right message is this digit
`width` times. Its reward is the share of right places, divided by the number of turns, so an episode has a reward from
0 to 1. `reset` takes `seed`, which determines the digits. The first line of the output is the server's URL.
"""

import argparse
import random
import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Message(Action):
    message: str


class Digit(Observation):
    text: str


class DigitGame(Environment[Message, Digit, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    turns, width, count = 2, 2, 10

    def __init__(self) -> None:
        super().__init__()
        self.digits: list[int] = []
        self.step_count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: object) -> Digit:
        self.digits = random.Random(seed).choices(range(self.count), k=self.turns)
        self.step_count = 0
        return Digit(text=f"{self.digits[0]}=")

    def step(self, action: Message, timeout_s: float | None = None, **_: object) -> Digit:
        right = sum(written == str(self.digits[self.step_count]) for written in action.message[: self.width])
        self.step_count += 1
        done = self.step_count == self.turns
        text = "" if done else f"{self.digits[self.step_count]}="
        return Digit(text=text, done=done, reward=right / self.width / self.turns)

    @property
    def state(self) -> State:
        return State(step_count=self.step_count)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--width", type=int, default=2)
    parser.add_argument("--digits", type=int, default=10)
    parser.add_argument("--sessions", type=int, default=64)
    arguments = parser.parse_args()
    DigitGame.turns, DigitGame.width, DigitGame.count = arguments.turns, arguments.width, arguments.digits
    app = create_fastapi_app(DigitGame, Message, Digit, max_concurrent_envs=arguments.sessions)
    with socket.create_server(("127.0.0.1", 0)) as server_socket:
        print(f"http://127.0.0.1:{server_socket.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[server_socket])


if __name__ == "__main__":
    main()
