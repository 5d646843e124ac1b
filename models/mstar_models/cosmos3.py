"""Cosmos3, rolling video: sizes in latent units and tokens, windows, and what each branch holds.

A clip is denoised window by window behind a protected text prompt; `main` is the branch with the
prompt, `uncond` the one for classifier-free guidance, each with a prompt length of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from mstar_models.qwen2 import QwenAdapter
from mstar_plugin.kv.config import PrefixSpan, StreamLayout
from mstar_plugin.kv.layout import require_count
from mstar_plugin.video import WindowSchedule

LABELS = ("main", "uncond")
COMBINED_LABELS: dict[tuple[str, ...], str] = {LABELS: "_cfg_batched"}

FRAMES_PER_UNIT = 4
PIXELS_PER_TOKEN = 32
WINDOW_FRAMES = 29
CONTEXT_FRAMES = 61
MAX_WINDOWS = 64

REFERENCE_FPS = 24
PROMPT_TO_VIDEO_GAP = 15000


def latent_units(pixel_frames: int) -> int:
    """Latent units of a clip: one for the first frame, one for every four more.

    Example: 29 frames -> 8, 61 -> 16, 189 -> 48. ValueError unless `4 * n + 1` frames.
    """
    require_count("pixel_frames", pixel_frames, 1)
    if (pixel_frames - 1) % FRAMES_PER_UNIT:
        raise ValueError(
            f"pixel_frames must be a multiple of {FRAMES_PER_UNIT} plus 1, got {pixel_frames}"
        )
    return 1 + (pixel_frames - 1) // FRAMES_PER_UNIT


def tokens_per_unit(width: int, height: int) -> int:
    """Tokens of one latent unit: 16 pixels a latent, 2 latents a patch, each way.

    Example: 832 x 480 -> 390, 256 x 256 -> 64. ValueError unless both are multiples of 32.
    """
    for name, pixels in (("width", width), ("height", height)):
        require_count(name, pixels, 1)
        if pixels % PIXELS_PER_TOKEN:
            raise ValueError(f"{name} must be a multiple of {PIXELS_PER_TOKEN}, got {pixels}")
    return (width // PIXELS_PER_TOKEN) * (height // PIXELS_PER_TOKEN)


def rolling_schedule(
    pixel_frames: int, *, window_frames: int = WINDOW_FRAMES, context_frames: int = CONTEXT_FRAMES
) -> WindowSchedule:
    """Windows of a clip whose context lives in the cache; `context_frames=0` keeps all of it.

    Example: 189 frames -> 6 windows of 8 units with 16 units of context. ValueError for more than
    64 windows.
    """
    schedule = WindowSchedule(
        total=latent_units(pixel_frames),
        window=latent_units(window_frames),
        context=latent_units(context_frames) if context_frames else 0,
    )
    if schedule.num_windows > MAX_WINDOWS:
        raise ValueError(
            f"a clip must fit in {MAX_WINDOWS} windows, got {schedule.num_windows} "
            f"of {window_frames} frames"
        )
    return schedule


def rolling_layouts(
    prompt_tokens: Mapping[str, int], schedule: WindowSchedule, unit_tokens: int
) -> dict[str, StreamLayout]:
    """What each branch holds: its prompt, then the windows that retention keeps bounded.

    `prompt_tokens` by label. Denoising needs no scratch: it uses the slots its commit will keep.
    Example: prompt 180 at 832 x 480 -> 76 pages of 128 tokens, however long the clip.
    """
    return {
        label: StreamLayout(
            spans=(PrefixSpan(length=tokens, advance=tokens, walk="prefill"),),
            growth=(("window", schedule.window * unit_tokens),),
            retention=schedule.retention(unit_tokens, protected_prefix=tokens),
        )
        for label, tokens in prompt_tokens.items()
    }


def unit_position(unit: int, prompt_tokens: int, fps: float) -> float:
    """Temporal rotary position of an absolute latent unit, in units of a 24 fps clip.

    `unit / (fps / 4) * (24 / 4) + prompt + 15000`. Computed anew in each forward and cached with
    the key, so releasing pages moves nothing.
    Example: unit 6 of a 12 fps clip behind a prompt of 180 -> 15192.
    """
    if not fps > 0:
        raise ValueError(f"fps must be positive, got {fps}")
    scale = (REFERENCE_FPS / FRAMES_PER_UNIT) / (fps / FRAMES_PER_UNIT)
    return unit * scale + prompt_tokens + PROMPT_TO_VIDEO_GAP


# Servers run the reasoning model alone, a decoder of the Qwen3-VL form.
ADAPTER = QwenAdapter(
    name="cosmos3",
    architectures=("Cosmos3ForConditionalGeneration",),
    defaults={"head_dim": 128},
    theta=5_000_000.0,
)
