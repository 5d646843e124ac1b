import pytest

from mstar_models.cosmos3 import (
    LABELS,
    latent_units,
    rolling_layouts,
    rolling_schedule,
    tokens_per_unit,
    unit_position,
)
from mstar_plugin.kv.layout import RetentionPolicy

PAGE_SIZE = 128


@pytest.mark.parametrize(("frames", "units"), [(1, 1), (29, 8), (61, 16), (189, 48)])
def test_pixel_frames_become_latent_units(frames: int, units: int) -> None:
    assert latent_units(frames) == units


@pytest.mark.parametrize(
    ("width", "height", "tokens"), [(832, 480, 390), (256, 256, 64), (64, 64, 4)]
)
def test_a_latent_unit_has_the_worked_number_of_tokens(
    width: int, height: int, tokens: int
) -> None:
    assert tokens_per_unit(width, height) == tokens


def test_a_clip_of_189_frames_takes_six_windows() -> None:
    schedule = rolling_schedule(189)
    assert (schedule.total, schedule.window, schedule.context) == (48, 8, 16)
    assert (schedule.num_windows, schedule.overlap) == (6, 0)


def test_480p_takes_76_pages_a_branch_however_long_the_clip() -> None:
    schedule, unit_tokens = rolling_schedule(189), tokens_per_unit(832, 480)
    layout = rolling_layouts({"main": 180}, schedule, unit_tokens)["main"]
    assert layout.growth == (("window", 3120),)
    assert layout.retention == RetentionPolicy(6240, 180)
    assert layout.pages({"window": 6}, PAGE_SIZE) == 76
    assert layout.pages({"window": 1000}, PAGE_SIZE) == 76


def test_480p_without_retention_takes_148_pages_for_six_windows() -> None:
    schedule = rolling_schedule(189, context_frames=0)
    layout = rolling_layouts({"main": 180}, schedule, 390)["main"]
    assert layout.retention is None
    assert layout.pages({"window": 6}, PAGE_SIZE) == 148


def test_guidance_takes_152_pages_instead_of_296() -> None:
    def pages(context_frames: int) -> int:
        schedule = rolling_schedule(189, context_frames=context_frames)
        layouts = rolling_layouts(dict.fromkeys(LABELS, 180), schedule, 390)
        return sum(layout.pages({"window": 6}, PAGE_SIZE) for layout in layouts.values())

    assert (pages(61), pages(0)) == (152, 296)


def test_each_branch_protects_its_own_prompt() -> None:
    layouts = rolling_layouts({"main": 180, "uncond": 7}, rolling_schedule(189), 390)
    assert layouts["main"].retention == RetentionPolicy(6240, 180)
    assert layouts["uncond"].retention == RetentionPolicy(6240, 7)


def test_256p_with_a_short_context_takes_seven_pages() -> None:
    schedule = rolling_schedule(189, window_frames=13, context_frames=21)
    layout = rolling_layouts({"main": 7}, schedule, tokens_per_unit(256, 256))["main"]
    assert (layout.growth, layout.retention) == ((("window", 256),), RetentionPolicy(384, 7))
    assert layout.pages({}, PAGE_SIZE) == 7


@pytest.mark.parametrize(
    ("unit", "prompt", "fps", "position"),
    [(0, 180, 24, 15180), (6, 180, 24, 15186), (6, 180, 12, 15192), (1000, 7, 16, 16507)],
)
def test_positions_are_absolute_and_scaled_to_24_frames_a_second(
    unit: int, prompt: int, fps: float, position: float
) -> None:
    assert unit_position(unit, prompt, fps) == position


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="pixel_frames must be a multiple of 4 plus 1, got 30"):
        latent_units(30)
    with pytest.raises(ValueError, match="height must be a multiple of 32, got 720"):
        tokens_per_unit(1280, 720)
    with pytest.raises(ValueError, match="a clip must fit in 64 windows, got 65 of 29 frames"):
        rolling_schedule(4 * 519 + 1)
    with pytest.raises(ValueError, match="fps must be positive, got 0"):
        unit_position(0, 0, 0)
