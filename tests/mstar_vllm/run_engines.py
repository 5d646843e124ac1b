"""Runs engines one after the other in this process: `run_engines.py JOBS RESULTS`, both JSON files.

A job: {"model", "backend", "engine": arguments of LLM, "rounds": [[request, ...], ...]}; a request:
{"prompt": token ids, "sampling": arguments of SamplingParams, "lora": an adapter's folder, if any,
"rank": the data-parallel rank that serves it, if one must}.
A job with "async": true runs in an AsyncLLM, whose engine is a process of its own. A result: per
round and request the token ids, the chosen tokens' log-probabilities and the prompt tokens found in
the prefix cache; or {"error": text} where the engine did not start or failed. Kept apart from the
tests because an engine's import and process-wide state should be paid for once and stay out of
them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

# vLLM collects half a dozen times per engine, over all that was imported: most of its start. Here
# the end of each engine does.
collect_garbage = gc.collect
gc.collect = lambda generation=2: 0  # type: ignore[assignment]

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "distributed_executor_backend": "uni",
    "disable_log_stats": True,
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start one engine, run its rounds, end it."""
    from vllm import LLM

    if job.get("async"):
        return {"rounds": asyncio.run(run_async(job))}
    engine = {**DEFAULTS, **job["engine"]}
    try:
        llm = LLM(model=job["model"], attention_backend=job["backend"], **engine)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    try:
        return {"rounds": [one_round(llm, requests) for requests in job["rounds"]]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        end()


def one_round(llm: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The requests of a round, all in flight together."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    params = [SamplingParams(**request["sampling"]) for request in requests]
    adapters = [adapter(request) for request in requests]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return [answer(output) for output in outputs]


def adapter(request: dict[str, Any]) -> Any:
    """The request's LoRA adapter; a job knows one."""
    from vllm.lora.request import LoRARequest

    folder = request.get("lora")
    return None if folder is None else LoRARequest("adapter", 1, folder)


async def run_async(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The rounds of a job, in an AsyncLLM."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = {**DEFAULTS, **job["engine"]}
    arguments = AsyncEngineArgs(model=job["model"], attention_backend=job["backend"], **engine)
    llm = AsyncLLM.from_engine_args(arguments)
    try:
        rounds = []
        for number, requests in enumerate(job["rounds"]):
            answers = (last(llm, f"{number}-{i}", request) for i, request in enumerate(requests))
            rounds.append(list(await asyncio.gather(*answers)))
        return rounds
    finally:
        llm.shutdown()


async def last(llm: Any, name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Plain values of the last output of a request's stream."""
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": request["prompt"]}
    params = SamplingParams(**request["sampling"])
    rank = {"data_parallel_rank": request["rank"]} if "rank" in request else {}
    outputs = [output async for output in llm.generate(prompt, params, name, **rank)]
    return answer(outputs[-1])


def answer(output: Any) -> dict[str, Any]:
    """Plain values of one request's output."""
    return {
        "tokens": [list(one.token_ids) for one in output.outputs],
        "logprobs": [chosen(one.token_ids, one.logprobs) for one in output.outputs],
        "cached": output.num_cached_tokens,
    }


def chosen(tokens: Any, logprobs: Any) -> list[float]:
    """Log-probability of each chosen token; empty where none were asked for."""
    if logprobs is None:
        return []
    return [step[token].logprob for token, step in zip(tokens, logprobs, strict=True)]


def end() -> None:
    """Give the engine's memory and process groups back."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    collect_garbage()


def main(jobs_file: Path, results_file: Path) -> None:
    jobs = json.loads(jobs_file.read_text())
    results_file.write_text(json.dumps([run(job) for job in jobs]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
