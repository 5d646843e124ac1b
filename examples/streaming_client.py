"""Stream an answer from a running server (`make serve`) with the openai client.

python examples/streaming_client.py [QUESTION]
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI

URL = os.environ.get("MSTAR_URL", "http://127.0.0.1:8000/v1")


def main(question: str) -> None:
    client = OpenAI(base_url=URL, api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={
            "vllm_xargs": {"mstar_context_budget": 256, "mstar_protected_prefix": "prompt"}
        },
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n[{chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "Tell me about lighthouses.")
