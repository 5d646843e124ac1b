"""The kernels compile for cards that are not here, within their memory."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("vllm", reason="needs vLLM")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mstar_vllm.device_head import keys_at_once, power_of_two, queries_at_once  # noqa: E402
from mstar_vllm.device_head_kernel import add_protected, join_parts  # noqa: E402
from mstar_vllm.device_kernels import COLUMNS_AT_ONCE, compact_rows  # noqa: E402
from mstar_vllm.device_ring_kernel import frame_rows  # noqa: E402
from mstar_vllm.kernel_launch import OneForm  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

# The least that a block may use: GeForce and L4 cards of compute capability 8.6 and 8.9.
SHARED_BYTES = 99 * 1024
POINTERS = {
    **dict.fromkeys(("queries", "keys", "values", "output"), "*bf16"),
    **dict.fromkeys(("tables", "head_lens", "turns", "query_start"), "*i32"),
    **dict.fromkeys(("seq_lens", "limits", "plan", "out_tables", "out_numbers"), "*i32"),
    **dict.fromkeys(("out_head_tables",), "*i32"),
    "slots": "*i64",
    **dict.fromkeys(("log_sums", "parts", "part_sums"), "*fp32"),
    "revolutions": "*fp64",
    "scale": "fp32",
    "soft_cap": "fp32",
}


def shared_bytes(kernel: object, capability: int, **constants: object) -> int:
    names = kernel.arg_names  # type: ignore[attr-defined]
    signature = {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return int(made.metadata.shared)


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("head_size", [80, 256])
@pytest.mark.parametrize(("most_queries", "parts"), [(1, 1), (1, 8), (64, 1)])
def test_a_block_fits_into_a_small_cards_shared_memory(
    capability: int, head_size: int, most_queries: int, parts: int
) -> None:
    queries = queries_at_once(most_queries, 4)
    sizes = {"HEAD_SIZE": head_size, "DIMS": power_of_two(head_size)}
    used = shared_bytes(
        add_protected,
        capability,
        BLOCK_TOKENS=16,
        GROUP=4,
        PAIRS=head_size // 2,
        INTERLEAVED=False,
        HAS_CAP=True,
        QUERIES=queries,
        KEYS=keys_at_once(4096, queries),
        HAS_PARTS=parts > 1,
        **sizes,
    )
    assert 0 < used <= SHARED_BYTES
    if parts > 1:
        assert shared_bytes(join_parts, capability, PARTS=parts, **sizes) <= SHARED_BYTES


@pytest.mark.parametrize("transform", [compact_rows, frame_rows])
def test_no_argument_makes_a_form_that_the_start_did_not_compile(transform: OneForm) -> None:
    for parameter in transform.kernel.params:
        assert parameter.is_constexpr or parameter.do_not_specialize, parameter.name


def test_constants_are_in_the_order_they_are_launched_in() -> None:
    with pytest.raises(TypeError, match=r"got \['BLOCK_TOKENS', 'PAGE_TOKENS'\]"):
        compact_rows.launch(1, torch.zeros(1), BLOCK_TOKENS=16, PAGE_TOKENS=16)


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("split", [False, True])
def test_the_transforms_compile(capability: int, split: bool) -> None:
    tokens = {"BLOCK_TOKENS": 16, "SPLIT": split, "COLUMNS": COLUMNS_AT_ONCE}
    frames = {"DILATION": 4, "BUCKETS": 4, "FRAME_TOKENS": 64}
    assert shared_bytes(frame_rows.kernel, capability, **tokens, **frames) <= SHARED_BYTES
    pages = {"PAGE_TOKENS": 64, "PER_ROW": False, "BY_SLOT": split, "TURNS": True}
    assert shared_bytes(compact_rows.kernel, capability, **tokens, **pages) <= SHARED_BYTES
