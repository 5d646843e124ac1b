"""Judges answers of families by masked Hugging Face models: `judge_families.py JOBS RESULTS`.

Both JSON files, family -> list of jobs and of results of tests/mstar_vllm/masked_model.py, whose
masks know no chunks. Layers with a window or chunks of their own keep them; the others follow the
policy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mstar_vllm"))

import torch
from masked_model import additive, load, visible

# Their `sliding_window` does not count the query itself.
WINDOW_BESIDE_QUERY = ("cohere2",)


def masks(text: Any, seen: torch.Tensor) -> Any:
    """The additive mask the model takes: one tensor, or one per kind of layer."""
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds <= {"full_attention"}:
        return additive(seen)
    index = torch.arange(len(seen))
    query, key = index[:, None], index[None, :]
    found = {"full_attention": additive(seen)}
    if "sliding_attention" in kinds:
        window = text.sliding_window + (text.model_type in WINDOW_BESIDE_QUERY)
        found["sliding_attention"] = additive((query - key < window) & (query >= key))
    if "chunked_attention" in kinds:
        same_chunk = query // text.attention_chunk_size == key // text.attention_chunk_size
        found["chunked_attention"] = additive(same_chunk & (query >= key))
    return found


@torch.no_grad()
def judge(job: dict[str, Any]) -> list[list[float]]:
    model = load(job["model"])
    tokens = torch.tensor([job["tokens"]])
    length = tokens.shape[1]
    mask = masks(model.config.get_text_config(), visible(length, job["policy"], job["page"]))
    positions = torch.arange(length)[None]
    output = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False)
    judged = []
    for place in range(job["start"] - 1, length - 1):
        scores = output.logits[0, place].log_softmax(-1)
        best = scores.topk(2)
        margin = float(best.values[0] - best.values[1])
        judged.append([int(best.indices[0]), margin, float(scores[tokens[0, place + 1]])])
    return judged


def main(jobs_file: Path, results_file: Path) -> None:
    jobs = json.loads(jobs_file.read_text())
    results = {family: [judge(job) for job in asked] for family, asked in jobs.items()}
    results_file.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
