"""A Hugging Face model whose attention is ours, over pages, against the model as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from mstar_plugin.attention import AttentionParams, PlannedAttention, plan_attention
from mstar_plugin.kv.config import KVStep, PagedKVConfig, RetentionPolicy
from mstar_plugin.kv.manager import KVManager
from mstar_plugin.step import Segment, StepContext

VOCABULARY = 97
PAGE_SIZE = 8


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    manager: KVManager,
    planned: PlannedAttention,
    **_: Any,
) -> tuple[Tensor, None]:
    """One layer: write the packed K and V `[1, heads, T, D]` of the step, attend over the pages."""
    manager.write_kv(*(side[0].transpose(0, 1) for side in (key, value)), layer=module.layer_idx)
    result = planned.run(query[0].transpose(0, 1), manager.layer_view(module.layer_idx))
    return result.output[None], None


AttentionInterface.register("paged_pages", paged_attention)


class PagedModel:
    """The model over a `KVManager`: each step packs the tokens of its streams into one forward."""

    def __init__(self, model: Any, manager: KVManager, path: str) -> None:
        self.model = model
        self.manager = manager
        self.params = AttentionParams.from_config(manager.config)
        self.path = path

    def step(
        self, tokens: Mapping[tuple[str, str], Sequence[int]], **declared: Any
    ) -> dict[tuple[str, str], Tensor]:
        """Run one step; returns each stream's logits `[its tokens, vocabulary]`."""
        segments = tuple(Segment(*stream, len(ids)) for stream, ids in tokens.items())
        step = KVStep(segments, **declared)
        ctx = StepContext(request_ids=list(dict.fromkeys(stream[0] for stream in tokens)))
        assert self.manager.admit(step, ctx).ok
        logits: dict[tuple[str, str], Tensor] = {}
        for label, output in self.manager.plan(step, ctx).items():
            streams = [(view.request_id, view.label) for view in output.views]
            self.manager.set_label(label)
            planned = plan_attention(output, self.params, self.path)
            packed = self._forward([(stream, tokens[stream]) for stream in streams], planned)
            parts = torch.split(packed, [view.to_compute for view in output.views])
            logits |= dict(zip(streams, parts, strict=True))
        self.manager.commit(step, ctx)
        self.manager.assert_pages_conserved()
        return logits

    def _forward(
        self, rows: list[tuple[tuple[str, str], Sequence[int]]], planned: PlannedAttention
    ) -> Tensor:
        ids = [token for _, row in rows for token in row]
        positions: list[int] = []
        for stream, row in rows:
            first = self.manager.stored_tokens(*stream) + self.manager.released_tokens(*stream)
            positions += range(first, first + len(row))
        with torch.inference_mode():
            logits: Tensor = self.model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor([positions]),
                use_cache=False,
                manager=self.manager,
                planned=planned,
            ).logits
        return logits[0]


class Setup:
    """One set of weights behind two models: as Hugging Face runs it, and over pages."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
        )
        config._attn_implementation = "eager"
        model_class: Any = LlamaForCausalLM
        self.whole = model_class(config).eval()
        over_pages = copy.deepcopy(config)
        over_pages._attn_implementation = "paged_pages"
        self.paged = model_class(over_pages).eval()
        self.paged.load_state_dict(self.whole.state_dict())

    def over_pages(self, *requests: str, path: str = "cpu", **changes: Any) -> PagedModel:
        values = {"max_num_pages": 40, "page_size": PAGE_SIZE, "max_seq_len": 512}
        values |= {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "num_qo_heads": 6}
        config = PagedKVConfig(**(values | changes))
        manager = KVManager(config)
        manager.cache.data.fill_(float("nan"))
        for request in requests:
            manager.ingest_request(request)
        return PagedModel(self.paged, manager, path)

    def expected(self, ids: Sequence[int], mask: Tensor | None = None) -> Tensor:
        """Logits `[len(ids), vocabulary]` of the model itself, with `mask` bool where given."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor([list(ids)]), "use_cache": False}
        if mask is not None:
            lowest = torch.finfo(torch.float32).min
            additive = torch.zeros(mask.shape).masked_fill(~mask, lowest)
            inputs["attention_mask"] = additive[None, None]
        with torch.inference_mode():
            logits: Tensor = self.whole(**inputs).logits
        return logits[0]


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup()


def ids_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


def chunks(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (ids[start : start + size] for start in range(0, len(ids), size))


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("path", ["cpu", "reference"])
@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_chunked_prefill_and_decode_give_the_models_logits(
    setup: Setup, chunk: int, path: str
) -> None:
    ids = ids_of(1, 40)
    run = setup.over_pages("a", path=path)
    parts = [run.step({("a", "main"): part})["a", "main"] for part in chunks(ids[:35], chunk)]
    parts += [run.step({("a", "main"): [token]})["a", "main"] for token in ids[35:]]
    assert_same(torch.cat(parts), setup.expected(ids))


def test_rows_of_one_step_do_not_see_each_other(setup: Setup) -> None:
    """Prefill chunks and decode rows of three requests share every step."""
    ids = {request: ids_of(seed, 30 + 7 * seed) for seed, request in enumerate("abc")}
    run = setup.over_pages(*ids)
    sizes = {"a": [19, 1, 1, 9], "b": [5, 11, 20, 1], "c": [1, 30, 12, 1]}
    got: dict[str, list[Tensor]] = {request: [] for request in ids}
    done = dict.fromkeys(ids, 0)
    for place in range(4):
        tokens = {}
        for request, spans in sizes.items():
            first = done[request]
            tokens[request, "main"] = ids[request][first : first + spans[place]]
            done[request] += spans[place]
        for (request, _), logits in run.step(tokens).items():
            got[request].append(logits)
    for request, parts in got.items():
        assert_same(torch.cat(parts), setup.expected(ids[request])[: done[request]])


def test_an_uncommitted_step_leaves_no_trace(setup: Setup) -> None:
    ids = ids_of(2, 30)
    run = setup.over_pages("a")
    run.step({("a", "main"): ids[:20]})
    draft = run.step({("a", "main"): ids_of(9, 6)}, commit=False)["a", "main"]
    again = run.step({("a", "main"): ids[20:]})["a", "main"]
    assert_same(draft, setup.expected(ids[:20] + ids_of(9, 6))[20:])
    assert_same(again, setup.expected(ids)[20:])


def test_both_sides_of_a_fork_go_on_by_themselves(setup: Setup) -> None:
    prompt, left, right = ids_of(3, 21), ids_of(4, 12), ids_of(5, 12)
    run = setup.over_pages("a")
    run.step({("a", "main"): prompt}, post_forks=(("main", "branch"),))
    streams = (("a", "main"), left), (("a", "branch"), right)
    for first in range(0, 12, 4):
        logits = run.step({stream: ids[first : first + 4] for stream, ids in streams})
        for stream, ids in streams:
            expected = setup.expected(prompt + ids[: first + 4])[-4:]
            assert_same(logits[stream], expected)


def test_a_fork_before_the_forward_is_seen_by_it(setup: Setup) -> None:
    prompt, rest = ids_of(3, 21), ids_of(4, 5)
    run = setup.over_pages("a")
    run.step({("a", "main"): prompt})
    logits = run.step({("a", "branch"): rest}, pre_forks=(("main", "branch"),))
    assert_same(logits["a", "branch"], setup.expected(prompt + rest)[21:])


def test_two_labels_of_a_request_share_a_forward(setup: Setup) -> None:
    """Guidance: the conditional and the unconditional stream of two requests, label by label."""
    prompts = {
        (request, label): ids_of(10 + seed, 9 + 5 * seed)
        for seed, (label, request) in enumerate((n, r) for n in ("main", "uncond") for r in "ab")
    }
    run = setup.over_pages("a", "b")
    combined = {("main", "uncond"): "cfg"}
    logits = run.step(prompts, combined_labels=combined)
    for stream, ids in prompts.items():
        assert_same(logits[stream], setup.expected(ids))
    decoded = run.step({stream: [7] for stream in prompts}, combined_labels=combined)
    for stream, ids in prompts.items():
        assert_same(decoded[stream], setup.expected([*ids, 7])[-1:])


def test_generation_goes_on_after_offload_and_reload(setup: Setup) -> None:
    ids, other = ids_of(6, 50), ids_of(7, 60)
    run = setup.over_pages("a", "b", cpu_offload_pages=16, max_num_pages=12)
    run.step({("a", "main"): ids[:33]}, post_forks=(("main", "branch"),))
    assert run.manager.offload("a") > 0
    run.step({("b", "main"): other})
    assert not run.manager.reload("a")
    run.manager.remove_request("b")
    run.manager.ingest_request("b")
    run.step({("b", "main"): other[:9]})
    run.manager.remove_request("b")
    assert run.manager.reload("a")
    main = run.step({("a", "main"): ids[33:35]})["a", "main"]
    assert_same(main, setup.expected(ids[:35])[33:])
    branch = run.step({("a", "branch"): ids[40:]})["a", "branch"]
    assert_same(branch, setup.expected(ids[:33] + ids[40:])[33:])


def retained_mask(spans: Sequence[int], policy: RetentionPolicy) -> Tensor:
    """bool `[tokens, tokens]`: what each token sees when each step ends in a commit."""
    total = sum(spans)
    mask = torch.zeros(total, total, dtype=torch.bool)
    resident: list[int] = []
    done = 0
    first_page = -(-policy.protected_prefix // PAGE_SIZE)
    for span in spans:
        for position in range(done, done + span):
            mask[position, resident] = True
            mask[position, done : position + 1] = True
        resident += range(done, done + span)
        done += span
        excess = len(resident) - policy.protected_prefix - policy.context_budget
        pages = max(0, min(excess // PAGE_SIZE, len(resident) // PAGE_SIZE - first_page))
        del resident[first_page * PAGE_SIZE : (first_page + pages) * PAGE_SIZE]
    return mask


@pytest.mark.parametrize(
    ("spans", "policy"),
    [
        ([7, *[3] * 20], RetentionPolicy(24, 7)),
        ([24, *[8] * 9], RetentionPolicy(32, 24)),
        ([40, *[1] * 30], RetentionPolicy(9)),
        ([5, 30, *[2] * 12], RetentionPolicy(1, 5)),
    ],
)
def test_retention_is_the_explicit_mask(
    setup: Setup, spans: Sequence[int], policy: RetentionPolicy
) -> None:
    ids = ids_of(8, sum(spans))
    run = setup.over_pages("a")
    logits, first = [], 0
    for span in spans:
        part = {("a", "main"): ids[first : first + span]}
        logits.append(run.step(part, retention={("a", "main"): policy})["a", "main"])
        first += span
    assert run.manager.released_tokens("a") > 0
    assert_same(torch.cat(logits), setup.expected(ids, retained_mask(spans, policy)))


def test_the_comparison_notices_one_page_more(setup: Setup) -> None:
    """The mask of a slightly larger budget gives other logits: the test above can fail."""
    spans, ids = [7, *[3] * 20], ids_of(8, 67)
    exact = setup.expected(ids, retained_mask(spans, RetentionPolicy(24, 7)))
    larger = setup.expected(ids, retained_mask(spans, RetentionPolicy(32, 7)))
    assert (exact - larger).abs().max() > 1e-3


def test_endless_generation_fits_a_pool_it_outgrows(setup: Setup) -> None:
    policy = RetentionPolicy(16, 8)
    run = setup.over_pages("a", max_num_pages=8)
    run.step({("a", "main"): ids_of(999, 8)})
    for start in range(0, 400, 5):
        part = {("a", "main"): ids_of(start, 5)}
        logits = run.step(part, retention={("a", "main"): policy})["a", "main"]
        assert logits.isfinite().all()
    assert run.manager.released_tokens("a") > 8 * PAGE_SIZE * 4
