"""Any sequence of operations on the manager against streams that are plain lists of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from mstar_plugin.kv.chain import prompt_keys
from mstar_plugin.kv.config import KVLayout, RetentionPolicy
from mstar_plugin.step import AdmitRuntimeError, AllocationFailed, RequestOffloading, StepContext

REQUESTS = ("a", "b", "c", "d")
LABELS = ("main", "x", "y")
Name = tuple[str, str]


class Choice:
    """Draws of one step, each from what the machine's state allows."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw

    def subset(self, options: Sequence[Any], least: int = 0) -> list[Any]:
        if not options:
            return []
        some = st.lists(st.sampled_from(options), min_size=least, max_size=3, unique=True)
        return list(self._draw(some))

    def number(self, least: int, most: int) -> int:
        return self._draw(st.integers(least, max(least, most)))

    def one_in(self, chances: int) -> bool:
        return self._draw(st.integers(1, chances)) == chances


class Streams(RuleBasedStateMachine):
    """Requests over a pool of 12 pages that is nearly always full."""

    driver_class: Any
    options: dict[str, Any] = {}

    @initialize()
    def start(self) -> None:
        self.driver = self.driver_class(
            max_num_pages=13, page_size=4, cpu_offload_pages=18, **self.options
        )
        self.manager = self.driver.manager
        self.prefixes: dict[Name, int] = {}
        self.prompts: dict[str, list[int]] = {}

    def known(self) -> list[str]:
        return sorted(self.driver.known())

    @rule(request_id=st.sampled_from(REQUESTS), data=st.data())
    def ingest(self, request_id: str, data: st.DataObject) -> None:
        if request_id in self.driver.known():
            return
        choice = Choice(data)
        ids = [1000 + i for i in range(choice.number(1, 21))]
        if self.driver.tokens and choice.one_in(3):
            ids = [*max(self.driver.tokens.values(), key=len)[:18], 7]
        if choice.one_in(4):
            ids[choice.number(0, len(ids) - 1)] = 8
        keys, tail, _ = prompt_keys(ids, 4)
        self.driver.ingest(
            request_id,
            prefix_keys={"main": keys},
            prefix_tail={"main": tail},
            prefix_decode={"main": "sampled"},
        )
        self.prompts[request_id] = ids
        self._start_over(request_id, choice)

    def _start_over(self, request_id: str, choice: Choice) -> None:
        name, ids = (request_id, "main"), self.prompts[request_id]
        self.driver.scripts[name] = ids
        if choice.one_in(2):
            return
        cached = self.manager.resolve_cached_prefix(request_id)
        assert cached < len(ids)
        self.driver.tokens[name], self.driver.scripts[name] = ids[:cached], ids[cached:]
        if cached:
            self.driver.run((*name, 0))

    @precondition(lambda self: self.driver.tokens)
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        """The rest of a prompt in one plain step, so that there is something to share."""
        name = (Choice(data).subset(self.known(), 1)[0], "main")
        step, ctx = self.driver.declare([(*name, len(self.driver.scripts.get(name, ())))])
        if self._admit(step, ctx):
            self.driver.finish_unchecked(step, ctx, self.manager.plan(step, ctx))

    @precondition(lambda self: self.driver.tokens)
    @rule(data=st.data())
    def small_step(self, data: st.DataObject) -> None:
        self._step(Choice(data), most_tokens=2)

    @precondition(lambda self: self.driver.tokens)
    @rule(data=st.data())
    def large_step(self, data: st.DataObject) -> None:
        self._step(Choice(data), most_tokens=9)

    def _step(self, choice: Choice, most_tokens: int) -> None:
        step, ctx = self._declare(choice, most_tokens)
        if choice.one_in(4):
            self._plan_ahead(step, ctx, choice)
        if not self._admit(step, ctx):
            return
        if choice.one_in(6):
            self.manager.rollback_admit(step, ctx)
            return
        outputs = self.manager.plan(step, ctx)
        self._name_sampled(step)
        if choice.one_in(8):
            self._remove(choice.subset(list(ctx.request_ids), 1)[0])
        self.driver.finish_unchecked(step, ctx, outputs)
        self._follow(step, ctx)

    def _declare(self, choice: Choice, most_tokens: int) -> tuple[Any, StepContext]:
        names = [
            (request_id, label)
            for request_id in choice.subset(self.known(), 1)
            for label in choice.subset(LABELS, 1)
        ]
        segments = [(*name, choice.number(0, most_tokens)) for name in names]
        options: dict[str, Any] = {"commit": not choice.one_in(5)}
        if choice.one_in(5):
            options["sink"] = frozenset(choice.subset(names))
        for moment in ("pre_forks", "post_forks"):
            if choice.one_in(4):
                source = "main" if choice.one_in(2) else choice.subset(LABELS, 1)[0]
                target = choice.subset([label for label in LABELS if label != source], 1)[0]
                options[moment] = ((source, target),)
        if choice.one_in(3):
            options["fork_rids"] = frozenset(choice.subset(self.known()))
        if choice.one_in(3):
            options["retention"] = dict(self._policies(segments, options, choice))
        present = {label for _, label in names}
        if choice.one_in(3) and {"main", "x"} <= present:
            options["combined_labels"] = {("main", "x"): "_both"}
        declared: tuple[Any, StepContext] = self.driver.declare(segments, **options)
        return declared

    def _policies(
        self, segments: Sequence[tuple[str, str, int]], options: dict[str, Any], choice: Choice
    ) -> Iterator[tuple[Name, RetentionPolicy]]:
        targets = {target for _, target in options.get("pre_forks", ())}
        for request_id, label, span in segments:
            name = (request_id, label)
            stored = len(self.driver.tokens.get(name, ())) + span
            prefix = self.prefixes.get(name) or choice.number(0, min(stored, 9))
            if label not in targets and prefix <= stored:
                yield name, RetentionPolicy(choice.number(1, 12), prefix)

    def _plan_ahead(self, step: Any, ctx: StepContext, choice: Choice) -> None:
        early = StepContext(request_ids=ctx.request_ids, node=ctx.node, is_preplan=True)
        if self.manager.admit(step, early).ok:
            if not choice.one_in(3):
                self.manager.plan(step, early)
            if choice.one_in(3):
                self.manager.clear_preplan()
        self.manager.assert_pages_conserved()

    def _admit(self, step: Any, ctx: StepContext) -> bool:
        outcome = self.manager.admit(step, ctx)
        away = [r for r in ctx.request_ids if self.manager.is_offloaded(r)]
        if isinstance(outcome.reason, RequestOffloading):
            assert outcome.reason.request_id in away
        elif isinstance(outcome.reason, AllocationFailed):
            assert outcome.reason.pages_short > 0
        elif isinstance(outcome.reason, AdmitRuntimeError):
            assert "pages at once" in outcome.reason.message or "fork" in outcome.reason.message
        return bool(outcome.ok)

    def _name_sampled(self, step: Any) -> None:
        for request_id, label, span in step.segments:
            written = len(self.driver.scripts.get((request_id, label), []))
            if label == "main" and step.commit and span > written:
                first = self.driver._next_token
                if len(step.segments) == 1 and (request_id, label) not in step.sink:
                    ids = list(range(first, first + span - written))
                    self.manager.extend_prefix(request_id, label, ids)

    def _follow(self, step: Any, ctx: StepContext) -> None:
        """What the commit did to protected prefixes; forks copy them."""
        known = self.driver.known()

        def fork(forks: Sequence[Name]) -> None:
            for rid in ctx.request_ids:
                chosen = step.fork_rids is None or rid in step.fork_rids
                for source, target in forks if chosen and rid in known else ():
                    if not {(rid, source), (rid, target)} & step.sink:
                        self.prefixes[rid, target] = self.prefixes.get((rid, source), 0)

        fork(step.pre_forks)
        if step.commit:
            for segment in step.segments:
                policy = step.retention.get(segment[:2])
                if policy and segment.span and segment[:2] not in step.sink:
                    self.prefixes[segment[:2]] = policy.protected_prefix
            fork(step.post_forks)
        self.prefixes = {name: p for name, p in self.prefixes.items() if name[0] in known}

    @precondition(lambda self: self.driver.tokens)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        request_id = Choice(data).subset(self.known(), 1)[0]
        if self.manager.is_offloaded(request_id):
            back = self.manager.reload(request_id)
            assert self.manager.is_offloaded(request_id) is not back
            return
        wanted, free = self.manager.get_offload_priority(request_id), self.manager.num_free_pages
        freed = self.manager.offload(request_id)
        assert freed == wanted == self.manager.num_free_pages - free
        assert self.manager.is_offloaded(request_id) is (freed > 0)

    @precondition(lambda self: self.driver.tokens)
    @rule(data=st.data(), free=st.booleans())
    def reset(self, data: st.DataObject, free: bool) -> None:
        choice = Choice(data)
        request_id = choice.subset(self.known(), 1)[0]
        self.manager.reset_request(request_id, free=free)
        for name in [name for name in self.driver.tokens if name[0] == request_id]:
            self.driver.tokens[name] = []
            self.prefixes.pop(name, None)
        self._start_over(request_id, choice)

    @precondition(lambda self: self.driver.tokens)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self._remove(Choice(data).subset(self.known(), 1)[0])

    def _remove(self, request_id: str) -> None:
        self.manager.remove_request(request_id)
        self.driver.forget(request_id)
        self.prefixes = {n: p for n, p in self.prefixes.items() if n[0] != request_id}

    @precondition(lambda self: self.driver.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        choice = Choice(data)
        name = choice.subset(sorted(self.driver.tokens), 1)[0]
        tokens = self.driver.tokens[name]
        if self.manager.is_offloaded(name[0]):
            return
        prefix = self.prefixes.get(name) or choice.number(0, len(tokens) // 2)
        count = self.manager.release(*name, choice.number(0, 20), protected_prefix=prefix)
        self.prefixes[name] = prefix
        first = -(-prefix // 4) * 4
        del tokens[first : first + count]

    @invariant()
    def every_stream_shows_its_tokens_and_no_page_is_lost(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()


class LatentStreams(Streams):
    options = {"layout": KVLayout.MLA, "kv_lora_rank": 1, "qk_rope_head_dim": 1}


def run(machine: type[Streams], driver_class: type, examples: int, steps: int) -> None:
    machine.driver_class = driver_class
    run_machine(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(("machine", "examples"), [(Streams, 30), (LatentStreams, 6)])
def test_streams_show_their_tokens_after_any_short_sequence_of_operations(
    make_driver: type, machine: type[Streams], examples: int
) -> None:
    run(machine, make_driver, examples, 25)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Streams, LatentStreams])
def test_streams_show_their_tokens_after_any_long_sequence_of_operations(
    make_driver: type, machine: type[Streams]
) -> None:
    run(machine, make_driver, 150, 60)
