"""Generate without a server, unbounded and bounded, with the model that `make model` brings.

python examples/offline_generation.py [MODEL]
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams

PROMPT = "Once upon a time, a lighthouse keeper"
POLICIES: dict[str, dict[str, int | str] | None] = {
    "unbounded": None,
    "bounded": {"mstar_context_budget": 64, "mstar_protected_prefix": "prompt"},
}


def main(model: str) -> None:
    llm = LLM(
        model=model,
        attention_backend="mstar",
        max_model_len=2048,
        block_size=16,
        enforce_eager=True,
    )
    params = [
        SamplingParams(temperature=0, max_tokens=200, extra_args=policy)
        for policy in POLICIES.values()
    ]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    for name, output in zip(POLICIES, outputs, strict=True):
        note = (output.kv_transfer_params or {}).get("mstar", "nothing released")
        print(f"--- {name} ({note})\n{PROMPT}{output.outputs[0].text}\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".models/SmolLM2-135M-Instruct")
