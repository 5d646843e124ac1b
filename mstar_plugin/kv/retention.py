"""Retention arithmetic: which pages a query still sees, as a pure function of its position.

Letters: `S` page size, `P` protected prefix, `B` context budget, `n` tokens stored before a query
(so the query sits at position `n`), `F = ceil(P / S)` pages that are never released. All counts are
tokens unless a name says pages. Integers only: the same functions serve the scheduler, the worker
and the tests.
"""

from __future__ import annotations


def protected_pages(protected_prefix: int, page_size: int) -> int:
    """Pages that are never released: `F = ceil(P / S)`. Example: P=7, S=8 -> 1."""
    return -(-protected_prefix // page_size)


def dense_tokens(context_budget: int, protected_prefix: int, page_size: int) -> int:
    """Tokens that may be stored before the release clock starts: `D = max(P + B, F * S)`.

    The first page is released once `n` reaches `D + S`; positions below that see everything.
    Example: B=24, P=7, S=8 -> 31.
    """
    return max(
        protected_prefix + context_budget,
        protected_pages(protected_prefix, page_size) * page_size,
    )


def released_pages(
    num_stored: int, context_budget: int, protected_prefix: int, page_size: int
) -> int:
    """Pages behind the protected ones that a query at position `num_stored` no longer sees.

    `max(0, min((n - P - B) // S, n // S - F))`, which equals `max(0, (n - D) // S)` with `D` from
    `dense_tokens`: the commit rule of `RetentionPolicy` in closed form, so the answer does not
    depend on how the tokens were cut into steps. Grows by at most one page per token.
    Example: B=24, P=7, S=8 -> 0 for n=38, 1 for n=39, 2 for n=47.
    """
    dense = dense_tokens(context_budget, protected_prefix, page_size)
    return max(0, (num_stored - dense) // page_size)


def first_release(context_budget: int, protected_prefix: int, page_size: int) -> int:
    """Smallest `n` at which a page is released; a query at an earlier one sees everything."""
    return dense_tokens(context_budget, protected_prefix, page_size) + page_size


def resident_tokens(
    num_stored: int, context_budget: int, protected_prefix: int, page_size: int
) -> int:
    """Stored tokens a query at position `num_stored` sees, itself not counted."""
    released = released_pages(num_stored, context_budget, protected_prefix, page_size)
    return num_stored - released * page_size


def max_resident_pages(
    context_budget: int, protected_prefix: int, page_size: int, in_flight_tokens: int
) -> int:
    """Most pages a stream holds while `in_flight_tokens` are being computed behind the processed
    ones.

    `ceil((D + S + q) / S)`: fewer than `D + S` tokens stay resident (`D` from `dense_tokens`) and
    `q` more are written before the next release. Example: B=128, P=32, S=32, q=64 -> 8.
    """
    dense = dense_tokens(context_budget, protected_prefix, page_size)
    return -(-(dense + page_size + in_flight_tokens) // page_size)


def copy_page(num_stored: int, context_budget: int, protected_prefix: int, page_size: int) -> int:
    """First page index that no query of the same release as that at `num_stored` fills.

    `(D - 1) // S + r + 2` with `r` from `released_pages`: where a stream keeps the copies of its
    protected pages that are turned for this release. Grows by one with each release.
    Example: B=24, P=7, S=8 -> 6 for n=39 to 46, whose queries end in page 5.
    """
    dense = dense_tokens(context_budget, protected_prefix, page_size)
    released = released_pages(num_stored, context_budget, protected_prefix, page_size)
    return (dense - 1) // page_size + released + 2


def visible_positions(
    num_stored: int, context_budget: int, protected_prefix: int, page_size: int
) -> list[range]:
    """Positions a query at `num_stored` sees, itself included, as ascending disjoint ranges.

    Example: B=24, P=7, S=8, n=40 -> [range(0, 8), range(16, 41)].
    """
    released = released_pages(num_stored, context_budget, protected_prefix, page_size)
    if released == 0:
        return [range(num_stored + 1)]
    head = protected_pages(protected_prefix, page_size) * page_size
    tail = range(head + released * page_size, num_stored + 1)
    return [range(head), tail] if head else [tail]
