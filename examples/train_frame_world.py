"""Train the small frame world model; a GPU needs a few minutes.

    python examples/train_frame_world.py --out examples/frame_world.pt

Every frame is predicted from noise behind the true frames before it, all frames of a sequence at
once, under the mask that the ring caches realise later. The frames behind which is predicted are
blurred with a little noise, so that the model forgives its own small errors in a long roll-out.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from ball_scene import random_scenes
from frame_world import NUM_ACTIONS, FrameWorld, FrameWorldConfig, to_tokens
from torch import Tensor

from mstar_models.waypoint import ring_layers
from mstar_plugin.attention.ring_reference import frame_mask

# Frames of a sequence, sequences of a batch, share of the time.
STAGES = ((24, 32, 0.5), (144, 4, 0.5))
PAST_NOISE = 0.3


class SequenceAttention:
    """Attention of whole sequences: rows are the `n` true frames of each, then their `n` noisy
    versions.
    """

    def __init__(self, config: FrameWorldConfig, num_frames: int, device: torch.device) -> None:
        self.num_rows = 2 * num_frames
        masks = {
            geometry: sequence_mask(num_frames, geometry.pinned_dilation, geometry.ring_buckets)
            .repeat_interleave(config.tokens_per_frame, 0)
            .repeat_interleave(config.tokens_per_frame, 1)
            .to(device)
            for geometry in set(ring_layers(config.num_layers))
        }
        self.masks = [masks[geometry] for geometry in ring_layers(config.num_layers)]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        keys, values = (self._by_sequence(x).repeat_interleave(repeats, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(
            self._by_sequence(q), keys, values, attn_mask=self.masks[layer]
        ).to(q.dtype)
        by_row = out.view(*out.shape[:2], self.num_rows, -1, out.shape[-1])
        return by_row.transpose(1, 2).flatten(0, 1)

    def _by_sequence(self, x: Tensor) -> Tensor:
        rows = x.bfloat16().view(-1, self.num_rows, *x.shape[1:])
        return rows.transpose(1, 2).flatten(2, 3)


def sequence_mask(num_frames: int, dilation: int, buckets: int) -> Tensor:
    """bool `[2 * n, 2 * n]` by frame: true frames see true ones, noisy ones the true past and
    themselves.
    """
    seen = frame_mask(num_frames, dilation, buckets)
    own = torch.eye(num_frames, dtype=torch.bool)
    true_rows = torch.cat([seen, torch.zeros_like(seen)], dim=1)
    noisy_rows = torch.cat([seen & ~own, own], dim=1)
    return torch.cat([true_rows, noisy_rows])


def random_sequences(
    config: FrameWorldConfig, count: int, num_frames: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Frames `[B, n, T, C]` and the actions `[B, n, 2]` that led to them."""
    device, side = generator.device, config.grid * config.patch
    scenes = random_scenes(count, generator)
    action = torch.zeros(count, NUM_ACTIONS, device=device)
    frames, actions = [], []
    for _ in range(num_frames):
        frames.append(to_tokens(scenes.pictures(side), config))
        actions.append(action)
        fresh = 2 * torch.rand(count, NUM_ACTIONS, generator=generator, device=device) - 1
        turns = torch.rand(count, 1, generator=generator, device=device) < 0.15
        action = torch.where(turns, fresh.mul(1.6).clamp(-1, 1), action)
        scenes = scenes.moved(action)
    return torch.stack(frames, 1), torch.stack(actions, 1)


def loss_of(
    model: FrameWorld, attend: SequenceAttention, frames: Tensor, actions: Tensor
) -> Tensor:
    """Mean squared error of the predicted frames at one random noise level each."""
    count, num_frames = frames.shape[:2]
    level = torch.rand(count, num_frames, device=frames.device)
    noise = torch.randn_like(frames)
    noisy = frames + (noise - frames) * level[..., None, None]
    blur = PAST_NOISE * torch.rand(count, num_frames, 1, 1, device=frames.device)
    past = frames + blur * torch.randn_like(frames)
    rows = torch.cat([past, noisy], dim=1).flatten(0, 1)
    levels = torch.cat([torch.zeros_like(level), level], dim=1).flatten()
    clock = torch.arange(num_frames, device=frames.device).repeat(2).repeat(count)
    both_actions = torch.cat([actions, actions], dim=1).flatten(0, 1)
    predicted = model(rows, levels, both_actions, clock, attend)
    predicted = predicted.view(count, 2, num_frames, *frames.shape[2:])[:, 1]
    return F.mse_loss(predicted, frames)


def train(model: FrameWorld, device: torch.device, seconds: float) -> None:
    generator = torch.Generator(device).manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    started, done = time.perf_counter(), 0.0
    for num_frames, count, share in STAGES:
        attend = SequenceAttention(model.config, num_frames, device)
        end, step = done + share, 0
        while (elapsed := (time.perf_counter() - started) / seconds) < end:
            optimizer.param_groups[0]["lr"] = 2e-3 * max(0.02, 1 - elapsed)
            frames, actions = random_sequences(model.config, count, num_frames, generator)
            loss = loss_of(model, attend, frames, actions)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 100 == 0:
                print(f"{num_frames} frames, step {step}: loss {loss.item():.4f}", flush=True)
            step += 1
        done = end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240, help="how long to train")
    parser.add_argument("--resume", type=Path, help="weights to start from")
    parser.add_argument("--out", type=Path, default=Path("frame_world.pt"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = FrameWorld(FrameWorldConfig()).to(device)
    if arguments.resume is not None:
        model.load_state_dict(torch.load(arguments.resume, weights_only=True))
    train(model, device, arguments.seconds)
    weights = {name: value.half().cpu() for name, value in model.state_dict().items()}
    torch.save(weights, arguments.out)


if __name__ == "__main__":
    main()
