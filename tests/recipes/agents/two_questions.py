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
    right = sum(written == sample.record["answer"][0] for reply in replies for written in reply)
    return {"reward": right / 6, "characters": sum(map(len, replies))}
