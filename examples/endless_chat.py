"""One answer that grows past the whole KV pool of the server, in constant memory.

Start a server whose pool is far smaller than max_model_len, then run this:

make serve ARGS='--max-model-len 8192 --block-size 16 --num-gpu-blocks-override 80 \
  --max-num-batched-tokens 256 --additional-config \
  {"mstar":{"retention":{"context_budget":512,"protected_prefix":32}}}'
python examples/endless_chat.py [TOKENS]       # 4,000 tokens: three minutes on two CPU cores
"""

from __future__ import annotations

import os
import re
import sys
import urllib.request

from openai import OpenAI

URL = os.environ.get("MSTAR_URL", "http://127.0.0.1:8000/v1")
PROMPT = "The diary of a lighthouse keeper.\n\nDay 1:"


def main(tokens: int) -> None:
    client = OpenAI(base_url=URL, api_key="none")
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=tokens,
        temperature=0.8,
        seed=1,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for number, chunk in enumerate(stream, start=1):
        print(chunk.choices[0].text if chunk.choices else "", end="", flush=True)
        if number % 500 == 0:
            print(f"\n[{number} chunks; {usage()}]")


def usage() -> str:
    """What `/metrics` says of the KV pool now."""
    with urllib.request.urlopen(URL.removesuffix("/v1") + "/metrics") as answer:
        text = answer.read().decode()
    names = ("kv_cache_usage_perc", "mstar_released_pages_total")
    found = [re.search(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in names]
    shares = [float(match[1]) if match else 0.0 for match in found]
    return f"pool {shares[0]:.0%} used, {shares[1]:.0f} pages released"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
