"""A signalling game of two agents that share a policy, each with its own reward.

The caller sees `ab=` and sends two characters; the guesser sees only these and "=", and writes three. The digit b is
right: the caller has the share of right places in its message, the guesser that in its guess, times 10 and minus 5.
The guesser can be right only once the caller says b.
"""

from typing import Any

import httpx

SIGNAL, GUESS = 2, 3


async def say(client: httpx.AsyncClient, player: Any, text: str, width: int) -> str:
    response = await client.post(
        f"{player.base_url}/chat/completions",
        headers={"Authorization": f"Bearer {player.api_key}"},
        json={"model": player.model, "messages": [{"role": "user", "content": text}], "max_tokens": width},
    )
    response.raise_for_status()
    return response.json()["choices"][0]["message"]["content"] or ""


def share(written: str, digit: str, width: int) -> float:
    return sum(character == digit for character in written[:width]) / width


async def run(session: Any, sample: Any) -> dict[str, Any]:
    digit = sample.record["prompt"][1]
    async with httpx.AsyncClient(timeout=None, verify=False) as client:
        signal = await say(client, session.agent("caller"), sample.record["prompt"], SIGNAL)
        guess = await say(client, session.agent("guesser"), f"{signal}=", GUESS)
    session.log(f"{signal!r}, then {guess!r}")
    rewards = {"caller": share(signal, digit, SIGNAL), "guesser": 10 * share(guess, digit, GUESS) - 5}
    return {"reward": rewards, "right": float(guess == digit * GUESS)}
