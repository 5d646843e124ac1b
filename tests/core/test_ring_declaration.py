from typing import Any

import pytest

from mstar_plugin.kv.config import RingKVLayerConfig
from mstar_plugin.ring.declaration import ring_declaration

NEAR = RingKVLayerConfig(ring_frames=16, ring_buckets=16, pinned_dilation=1)
FAR = RingKVLayerConfig(ring_frames=4, ring_buckets=4, pinned_dilation=8)


def test_one_geometry_holds_for_all_layers() -> None:
    ring = ring_declaration({"tokens_per_frame": 16, "layers": {"ring_buckets": 16}}, "ring", 3)
    assert ring.tokens_per_frame == 16
    assert ring.layers == (NEAR, NEAR, NEAR)


def test_a_list_gives_each_layer_its_own() -> None:
    layers = [{"ring_buckets": 16}, {"ring_buckets": 4, "pinned_dilation": 8}]
    ring = ring_declaration({"tokens_per_frame": 256, "layers": layers}, "ring", 2)
    assert ring.layers == (NEAR, FAR)


def table(**changes: Any) -> dict[str, Any]:
    return {"tokens_per_frame": 16, "layers": {"ring_buckets": 4}, **changes}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (None, "ring must be a table"),
        ([16, 4], "ring must be a table"),
        ({"layers": {}}, "ring needs 'tokens_per_frame'"),
        ({"tokens_per_frame": 16}, "ring needs 'layers'"),
        (table(sessions=2), "ring knows tokens_per_frame, layers, got sessions"),
        (table(tokens_per_frame=0), "ring['tokens_per_frame']"),
        (table(tokens_per_frame=True), "ring['tokens_per_frame']"),
        (table(tokens_per_frame=16.0), "ring['tokens_per_frame']"),
        (table(tokens_per_frame=float("nan")), "ring['tokens_per_frame']"),
        (table(tokens_per_frame="16"), "ring['tokens_per_frame']"),
        (table(tokens_per_frame=2**40), "ring['tokens_per_frame']"),
        (table(layers="16"), "ring['layers'] must be a geometry or a list"),
        (table(layers=16), "ring['layers'] must be a geometry or a list"),
        (table(layers=[]), "one geometry per layer (2), got 0"),
        (table(layers=[{"ring_buckets": 4}] * 3), "one geometry per layer (2), got 3"),
        (table(layers=[{"ring_buckets": 4}, 4]), "ring['layers'][1] must be a table"),
        (table(layers=[{"ring_buckets": 4}, {}]), "ring['layers'][1] needs 'ring_buckets'"),
        (table(layers={"ring_buckets": -1}), "ring['layers']['ring_buckets']"),
        (table(layers={"buckets": 4}), "ring['layers'] knows ring_buckets, pinned_dilation"),
        (
            table(layers={"ring_buckets": 4, "pinned_dilation": 0}),
            "ring['layers']['pinned_dilation']",
        ),
    ],
)
def test_a_wrong_table_is_refused_by_name(values: Any, named: str) -> None:
    with pytest.raises(ValueError, match="got") as refused:
        ring_declaration(values, "ring", 2)
    assert named in str(refused.value)


def test_the_message_does_not_repeat_a_huge_value() -> None:
    for values in (table(tokens_per_frame="9" * 100_000), table(**{"x" * 100_000: 1})):
        with pytest.raises(ValueError) as refused:
            ring_declaration(values, "ring", 2)
        assert len(str(refused.value)) < 300
