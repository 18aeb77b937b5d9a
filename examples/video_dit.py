"""Train a small diffusion transformer on videos with captions: all processes share each video.

    torchrun --nproc-per-node 2 examples/video_dit.py [--layout balanced]

A bright square moves across the videos, in the direction that the caption names. Tokens see later
tokens: in every second layer, a frame sees itself, the frame before and the caption; in the others,
every token sees all. The loss is that of flow matching."""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from mtrain_cli import api

TEXT, FRAMES, SIDE, PATCH = 16, 8, 8, 16  # tokens; frames of SIDE x SIDE patches with PATCH values
FRAME = SIDE * SIDE
SEQ = TEXT + FRAMES * FRAME
WIDTH, HEADS, LAYERS, STEPS = 64, 4, 4, 6


def near_frames() -> np.ndarray:
    """Query start and stop, key start and stop, and kind (0: all pairs) of each slice."""
    slices = [(0, SEQ, 0, TEXT, 0)]  # all see the caption
    for frame in range(FRAMES):
        start = TEXT + frame * FRAME
        slices.append((start, start + FRAME, max(TEXT, start - FRAME), start + FRAME, 0))
    return np.array(slices)


def video() -> tuple[Tensor, Tensor]:
    """Return the caption, [1, TEXT], and the patches, [1, FRAMES * FRAME, PATCH]."""
    direction, row = int(torch.randint(2, ())), int(torch.randint(SIDE, ()))
    patches = torch.zeros(FRAMES, SIDE, SIDE, PATCH)
    for frame in range(FRAMES):
        patches[frame, row, frame if direction else SIDE - 1 - frame] = 1
    return torch.full((1, TEXT), direction), patches.view(1, -1, PATCH)


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.mask = "near" if number % 2 == 0 else "all"
        self.scales = nn.Linear(WIDTH, 4 * WIDTH)  # by the noise level
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, level: Tensor, batch) -> Tensor:
        scale, shift, mlp_scale, mlp_shift = self.scales(level).chunk(4, -1)
        h = F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(batch.attention(q, k, v, self.number, mask=self.mask).flatten(2))
        return x + self.mlp(F.layer_norm(x, (WIDTH,)) * (1 + mlp_scale) + mlp_shift)


class DiffusionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.positions = nn.Embedding(2, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.patches, self.level = nn.Linear(PATCH, WIDTH), nn.Linear(1, WIDTH)
        self.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))
        self.out = nn.Linear(WIDTH, PATCH)

    def forward(self, text, patches, positions, is_video, level, batch) -> Tensor:
        """Return the velocity of each patch. All but level are this process's tokens."""
        x = torch.where(is_video[..., None], self.patches(patches), self.text(text))
        x, level = x + self.positions(positions), F.silu(self.level(level))
        for layer in self.layers:
            x = layer(x, level, batch)
        return self.out(x)


parser = argparse.ArgumentParser()
parser.add_argument("--layout", default="auto")
parser.add_argument("--exchange", default="auto")
options = parser.parse_args()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
cp = api.context_parallel(seq=SEQ, layout=options.layout, exchange=options.exchange, mask="full")
torch.manual_seed(0)  # the same weights, videos and noise on all processes
model = DiffusionTransformer().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
near, positions = near_frames(), torch.arange(SEQ)[None]
for step in range(1, STEPS + 1):
    caption, patches = video()
    noise, level = torch.randn_like(patches), torch.rand(1, 1, 1)
    noised, velocity = (1 - level) * patches + level * noise, noise - patches
    # The whole sequence: the caption, then the frames.
    whole = (
        F.pad(caption, (0, FRAMES * FRAME)), F.pad(noised, (0, 0, TEXT, 0)), positions,
        positions >= TEXT, F.pad(velocity, (0, 0, TEXT, 0)),
    )  # fmt: skip
    batch = cp.batch(masks={"near": near, "all": None})
    *inputs, is_video, wanted = batch.shard(*(tensor.to(device) for tensor in whole))
    found = model(*inputs, is_video, level.to(device), batch)
    loss = ((found - wanted)[is_video] ** 2).sum() / patches.numel()
    loss.backward()
    for tensor in (loss.detach(), *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(tensor)  # each process has its part of the sum
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
