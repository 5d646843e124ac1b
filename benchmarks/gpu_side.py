"""One engine on the card, driven over its standard input: a side of a comparison.

Requests stay in flight between commands, so that a driver can let two sides take turns. Each line
is a JSON command; each answer is a JSON line:
{"do": "start", "batch", "context"}: prefill that many requests; answers {"prefill_s"}.
{"do": "steps", "count"}: decode; answers {"step_ms": [...], "build_us": [...]}, the seconds between
outputs and the metadata builder's host time.
{"do": "stop"}: abort the requests.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

VOCABULARY = 128256
SKIPPED_STEPS = 4


class Side:
    def __init__(self, engine: dict[str, Any]) -> None:
        from vllm import LLM

        self.engine = LLM(skip_tokenizer_init=True, load_format="dummy", **engine).llm_engine
        self.build_us: list[float] = []
        self._time_builds()
        self.names: list[str] = []
        self.started = 0

    def _time_builds(self) -> None:
        client: Any = self.engine.engine_core
        core = client.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        cls = type(runner.attn_groups[0][0].get_metadata_builder(0))
        build = cls.build

        def timed(builder: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return build(builder, *args, **kwargs)
            finally:
                self.build_us.append((time.perf_counter_ns() - begin) / 1e3)

        cls.build = timed

    def start(self, batch: int, context: int) -> dict[str, Any]:
        import numpy as np
        from vllm import SamplingParams

        random = np.random.default_rng(self.started)
        params = SamplingParams(max_tokens=4096, temperature=0.0, ignore_eos=True, detokenize=False)
        self.names = [f"{self.started}-{row}" for row in range(batch)]
        self.started += 1
        begin = time.perf_counter()
        for name in self.names:
            prompt = random.integers(10, VOCABULARY - 10, context).tolist()
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        waiting = set(self.names)
        while waiting:
            waiting -= {output.request_id for output in self.engine.step()}
        return {"prefill_s": time.perf_counter() - begin}

    def steps(self, count: int) -> dict[str, Any]:
        stamps: list[float] = []
        self.build_us.clear()
        while len(stamps) < count + SKIPPED_STEPS + 1:
            if len(self.engine.step()) == len(self.names):
                stamps.append(time.perf_counter())
        pairs = zip(stamps[SKIPPED_STEPS:], stamps[SKIPPED_STEPS + 1 :], strict=False)
        return {
            "step_ms": [(after - before) * 1e3 for before, after in pairs],
            "build_us": self.build_us[SKIPPED_STEPS:],
        }

    def stop(self) -> dict[str, Any]:
        self.engine.abort_request(self.names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        for _ in range(3):
            self.engine.step()
        return {}


def main() -> None:
    side = Side(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=ANSWERS, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(side, command.pop("do"))(**command)
        print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
