"""Generate a long clip window by window: the pages of both branches stop growing at their bound.

    python examples/rolling_video.py --windows 40

Weights are random; what it shows is the memory: after the first windows the live pages equal what
`StreamLayout.pages` promised, and stay there however long the clip gets.
"""

from __future__ import annotations

import argparse

import torch
from window_video import PagedStreams, RollingVideo, VideoConfig, VideoModel

from mstar_plugin.video import WindowSchedule

PAGE_SIZE = 16
WINDOW_UNITS = 4
CONTEXT_UNITS = 7
PROMPTS = {"main": [3, 14, 15, 9, 26, 5, 35, 8, 9], "uncond": [0, 1, 2, 3, 4]}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--windows", type=int, default=40)
    return parser.parse_args()


def main() -> None:
    num_windows = parse_arguments().windows
    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    config = VideoConfig()
    schedule = WindowSchedule(num_windows * WINDOW_UNITS, WINDOW_UNITS, CONTEXT_UNITS)
    streams = PagedStreams(config, page_size=PAGE_SIZE, num_pages=64)
    video = RollingVideo(VideoModel(config), streams, schedule, PROMPTS)
    caps = {"window": schedule.num_windows}
    bounds = {label: layout.pages(caps, PAGE_SIZE) for label, layout in video.layouts.items()}
    print(f"pages promised: {bounds}, together {sum(bounds.values())}")
    print("window  units      tokens committed  pages at the peak")
    for index, _ in enumerate(video.windows()):
        units = schedule.units(index)
        tokens = 2 * units.stop * config.unit_tokens + sum(map(len, PROMPTS.values()))
        span = f"{units.start}..{units.stop - 1}"
        print(f"{index:6}  {span:9}  {tokens:16}  {streams.peak_pages:17}")
        streams.peak_pages = 0


if __name__ == "__main__":
    main()
