"""Roll a world out for 300 frames in constant memory, and fork it into two futures on the way.

    python examples/world_rollout.py --frames 300 --fork-at 200 --out world.gif

The frames of both futures stand side by side: left the world that keeps its course, right its twin
under other actions. A `.png` instead of a `.gif` gives a sheet of every tenth frame. The model is
the one `train_frame_world.py` trains: a ball that the actions push across a checkered plane.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from ball_scene import random_scenes
from frame_world import FrameWorld, FrameWorldConfig, WorldEngine, to_pixels, to_tokens
from PIL import Image
from torch import Tensor

WEIGHTS = Path(__file__).with_name("frame_world.pt")
ZOOM = 5
SHEET_COLUMNS = 6


def course(frame: int) -> Tensor:
    """A circle, one round in 40 frames."""
    angle = 2 * math.pi * frame / 40
    return torch.tensor([math.cos(angle), math.sin(angle)])


def trained_model(weights: Path) -> FrameWorld:
    model = FrameWorld(FrameWorldConfig())
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model


def first_picture(config: FrameWorldConfig) -> Tensor:
    """The scene a world starts from, `[T, C]`."""
    scene = random_scenes(1, torch.Generator().manual_seed(2))
    return to_tokens(scene.pictures(config.grid * config.patch), config)[0]


def roll_out(engine: WorldEngine, num_frames: int, fork_at: int) -> list[Tensor]:
    """Both futures side by side, uint8 `[H, 2 * W, 3]` a frame."""
    config = engine.model.config
    engine.spawn("world", seed=7)
    start = first_picture(config)
    engine.prime({"world": start})
    pictures = [to_pixels(start, config).repeat(1, 2, 1)]
    for frame in range(1, num_frames):
        if frame == fork_at:
            engine.fork("world", "twin")
        actions = {"world": course(frame)}
        if frame >= fork_at:
            actions["twin"] = -course(frame)
        frames = engine.advance(actions)
        left = to_pixels(frames["world"], config)
        right = to_pixels(frames["twin"], config) if "twin" in frames else left
        pictures.append(torch.cat([left, right], dim=1))
    return pictures


def save(pictures: list[Tensor], path: Path) -> None:
    if path.suffix == ".png":
        save_sheet(pictures[::10], path)
        return
    images = [enlarged(picture).quantize(64, dither=Image.Dither.NONE) for picture in pictures]
    images[0].save(path, save_all=True, append_images=images[1:], duration=50, loop=0)


def save_sheet(pictures: list[Tensor], path: Path) -> None:
    height, width, _ = pictures[0].shape
    rows = -(-len(pictures) // SHEET_COLUMNS)
    sheet = torch.zeros(rows * height, SHEET_COLUMNS * width, 3, dtype=torch.uint8)
    for index, picture in enumerate(pictures):
        top, left = index // SHEET_COLUMNS * height, index % SHEET_COLUMNS * width
        sheet[top : top + height, left : left + width] = picture
    enlarged(sheet).save(path)


def enlarged(picture: Tensor) -> Image.Image:
    """RGB, each pixel of uint8 `[H, W, 3]` a square."""
    height, width, _ = picture.shape
    image = Image.fromarray(picture.numpy())
    return image.resize((width * ZOOM, height * ZOOM), Image.Resampling.NEAREST)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--fork-at", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("world.gif"))
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--path", choices=("gather", "flex"), default="gather")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    model = trained_model(arguments.weights)
    engine = WorldEngine(model, num_sessions=2, path=arguments.path)
    before = engine.cache_bytes
    print(f"ring caches: {engine.manager.memory_report()}")
    started = time.perf_counter()
    pictures = roll_out(engine, arguments.frames, arguments.fork_at)
    seconds = time.perf_counter() - started
    assert engine.cache_bytes == before, "the rings are allocated once"
    save(pictures, arguments.out)
    print(f"{len(pictures)} frames in {seconds:.1f} s, caches still {before} bytes")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
