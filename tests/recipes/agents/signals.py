"""A signalling game of two agents that share a policy, each with its own reward: a function, or a command.

    rollout: {agent: tests/recipes/agents/signals.py:run, agent_names: [caller, guesser]}
    rollout: {agent_command: python3 signals.py, agent_options: {folder: tests/recipes/agents}, agent_names: ...}

The caller sees `ab=` and sends two characters; the guesser sees only these and "=", and writes three. The digit b is
right: the caller has the share of right places in its message, the guesser that in its guess, times 10 and minus 5.
The guesser can be right only once the caller says b.
"""

import asyncio
import json
import os
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

SIGNAL, GUESS = 2, 3


async def play(say: Callable[[str, str, int], Awaitable[str]], prompt: str) -> dict[str, Any]:
    """Plays a game, in which `say` is the reply of an agent to a text, with a number of characters."""
    signal = await say("caller", prompt, SIGNAL)
    guess = await say("guesser", f"{signal}=", GUESS)
    rewards = {"caller": share(signal, prompt[1], SIGNAL), "guesser": 10 * share(guess, prompt[1], GUESS) - 5}
    return {"reward": rewards, "right": float(guess == prompt[1] * GUESS)}


def share(written: str, digit: str, width: int) -> float:
    return sum(character == digit for character in written[:width]) / width


async def run(session: Any, sample: Any) -> dict[str, Any]:
    import httpx  # which the command does without

    async with httpx.AsyncClient(timeout=None, verify=False) as client:

        async def say(name: str, text: str, width: int) -> str:
            player = session.agent(name)
            response = await client.post(
                f"{player.base_url}/chat/completions",
                headers={"Authorization": f"Bearer {player.api_key}"},
                json={"model": player.model, "messages": [{"role": "user", "content": text}], "max_tokens": width},
            )
            response.raise_for_status()
            return response.json()["choices"][0]["message"]["content"] or ""

        return await play(say, sample.record["prompt"])


async def say_by_environment(name: str, text: str, width: int) -> str:
    body = {"model": name, "messages": [{"role": "user", "content": text}], "max_tokens": width}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


if __name__ == "__main__":
    with open(os.environ["VERL_MG_SAMPLE"], encoding="utf-8") as file:
        given = json.load(file)["record"]["prompt"]
    with open(os.environ["VERL_MG_REWARD"], "w", encoding="utf-8") as file:
        json.dump(asyncio.run(play(say_by_environment, given)), file)
