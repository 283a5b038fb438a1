"""Numbers: which buckets of rows are recorded, given what recording costs and which steps are left."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fastpack_trl.capture.decision import IdleRule
from fastpack_trl.packing.buckets import Bucket, Buckets

SIZES = [Bucket(512 * 2**power, 4, 256) for power in range(8)]  # no row fits into the bucket of a shorter one


def decided(
    idle: float, seconds: float, sizes: Sequence[Bucket], left: int, share: float = 1.0
) -> tuple[IdleRule, Buckets, str]:
    """A rule that has watched steps with rows of these sizes."""
    state, buckets = SimpleNamespace(global_step=0), Buckets()
    run: Any = SimpleNamespace(trainer=SimpleNamespace(state=state), is_warmed_up=True)
    run.steps_left = lambda: left
    device: Any = SimpleNamespace(watch_idle=lambda: SimpleNamespace(stop=lambda: (idle, seconds)))
    rule, reason = IdleRule(run, device, buckets, pays=False, share=share), ""
    for size in sizes:
        buckets.find(size)
    assert not rule.steps_done
    for state.global_step in range(2, 14):
        rule.begins_step()
        reason = reason or rule.end_step()
    return rule, buckets, reason


@pytest.mark.parametrize(
    ("idle", "seconds", "sizes", "left", "pays"),
    [
        (0.13, 0.363, 8, 86, False),  # Qwen3-8B, 4,096 tokens, on an H200: 18 graphs in a run of 100 steps
        (0.13, 0.363, 8, 5000, True),
        (0.13, 0.363, 1, 86, True),
        (0.75, 0.048, 5, 55, True),  # Qwen3-0.6B, 2,048 tokens
        (0.75, 0.048, 5, 15, False),
        (0.09, 0.363, 1, 5000, False),
    ],
)
def test_every_size_of_rows_that_was_seen_has_to_be_recorded(
    idle: float, seconds: float, sizes: int, left: int, pays: bool
) -> None:
    rule, _, reason = decided(idle, seconds, SIZES[:sizes], left)
    assert (rule.pays, not reason) == (pays, pays), reason
    assert pays or idle < 0.1 or f"{left} steps of {seconds * 1e3:.0f} ms are left: recording {sizes} sizes" in reason


def test_of_a_model_with_a_tower_the_share_of_the_decoder_is_saved() -> None:
    """Gemma 3 4B, batches of four examples with images, on an H200: 34 of 61 layers."""
    of_all, of_decoder = (decided(0.5, 0.45, SIZES[:6], 20, share)[0].pays for share in (1.0, 34 / 61))
    assert (of_all, of_decoder) == (True, False)


def test_only_buckets_that_get_enough_rows_are_recorded() -> None:
    rare, often = SIZES[1], SIZES[0]
    rule, buckets, _ = decided(0.75, 0.048, [rare, *[often] * 15], 40)
    rows, few = (bucket for size in (often, rare) if (bucket := buckets.find(size)))
    assert (buckets.share(rows), buckets.share(few)) == (16 / 18, 2 / 18)
    assert [rule.pays_for(bucket) for bucket in (rows, few)] == [True, False]
    assert rule.declined == {few}
    assert not rule.pays_for(rows, recordings=12), "those that are recorded again for it count"
    for _ in range(20):
        buckets.find(rare)
    assert rule.pays_for(few), "it is frequent by now"
    assert rule.declined == {rows}
    rule._seconds += [20.0]
    assert not rule.pays_for(few), "recording has taken longer than assumed"


def test_asked_for_by_name_nothing_is_weighed() -> None:
    rule = IdleRule(SimpleNamespace(steps_left=None), None, Buckets(), pays=True)  # type: ignore[arg-type]
    assert rule.pays_for(SIZES[0], recordings=100)
