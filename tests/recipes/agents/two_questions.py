"""Agent whose trajectory has two segments: two conversations that begin with the same question."""

from typing import Any

import httpx


async def run(session: Any, sample: Any) -> dict[str, float]:
    replies = []
    async with httpx.AsyncClient(timeout=60.0, verify=False) as client:
        for _ in range(2):
            response = await client.post(
                f"{session.base_url}/chat/completions",
                headers={"Authorization": f"Bearer {session.api_key}"},
                json={"model": session.model, "messages": session.messages, "max_tokens": 3},
            )
            response.raise_for_status()
            replies.append(response.json()["choices"][0]["message"]["content"] or "")
    session.log(f"replies {replies}")
    # A random model never answers right, and a group of equal rewards has no loss.
    total = sum(int(written) for reply in replies for written in reply if written.isdigit())
    return {"reward": total / 54, "characters": sum(map(len, replies))}
