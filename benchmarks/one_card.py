"""Engines whose ranks share a card, where a machine has only one.

NCCL lets them from version 2.30 on, where the environment has `NCCL_MULTI_RANK_GPU_ENABLE=1`.
"""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

ENGINE = {
    "worker_cls": "one_card.OneCardWorker",
    "distributed_executor_backend": "mp",
    # It is for cards that reach each other's memory.
    "disable_custom_all_reduce": True,
}


class OneCardWorker(Worker):
    """A rank of any number on the first card."""

    def init_device(self) -> None:
        parallel = self.parallel_config
        rank = parallel.data_parallel_rank_local
        if rank is None:
            rank = parallel.data_parallel_index
        # The parent adds the ranks before its own.
        self.local_rank = -rank * parallel.world_size
        super().init_device()
