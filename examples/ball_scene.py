"""What the small world model learns: a ball that the player pushes across a checkered plane."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEP = 0.05
BALL_RADIUS = 0.1
EDGE = 0.12
# Ground and ball. Few and far apart, so that a model pulls its own small errors back to them.
COLOURS = (
    ((-0.8, -0.2, -0.8), (1.0, 0.9, 0.2)),
    ((-0.9, -0.7, 0.1), (1.0, 0.4, 0.1)),
    ((0.1, -0.6, -0.7), (0.7, 1.0, 1.0)),
    ((-0.5, -0.5, -0.4), (0.9, 0.2, 0.8)),
)


@dataclass(frozen=True, slots=True)
class Scenes:
    """`B` scenes. position: `[B, 2]` of the ball in 0..1 (x, y). ground, ball: `[B, 3]` colours in
    -1..1.
    """

    position: Tensor
    ground: Tensor
    ball: Tensor

    def moved(self, action: Tensor) -> Scenes:
        """After one frame under an action `[B, 2]` in -1..1; the edge stops the ball."""
        position = (self.position + STEP * action).clamp(EDGE, 1 - EDGE)
        return Scenes(position, self.ground, self.ball)

    def pictures(self, side: int) -> Tensor:
        """float `[B, side, side, 3]` in -1..1: a checkered plane with the ball on it."""
        line = (torch.arange(side, device=self.position.device) + 0.5) / side
        across = line[None, None] - self.position[:, :1, None]
        down = line[None, :, None] - self.position[:, 1:, None]
        cover = torch.sigmoid((BALL_RADIUS - (across**2 + down**2).sqrt()) * 2 * side)[..., None]
        squares = ((line * 4).long()[:, None] + (line * 4).long()) % 2
        ground = self.ground[:, None, None] * (0.75 + 0.25 * squares[..., None])
        return ground + cover * (self.ball[:, None, None] - ground)


def random_scenes(count: int, generator: torch.Generator) -> Scenes:
    """Balls at random places, in one of the four pairs of colours."""
    device = generator.device
    position = EDGE + (1 - 2 * EDGE) * torch.rand(count, 2, generator=generator, device=device)
    chosen = torch.randint(len(COLOURS), (count,), generator=generator, device=device)
    ground, ball = torch.tensor(COLOURS, device=device)[chosen].unbind(1)
    return Scenes(position, ground, ball)
