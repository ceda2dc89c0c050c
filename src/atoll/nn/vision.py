"""The vision tower and the projector that turns its output into input embeddings, under the hub's names.

MoonViT-V2 (Kimi K3 report §2.4, arXiv 2607.24653): patches of any number of images, in any sizes, as one row; learned positions
interpolated to each grid; pre-norm blocks whose attention sees one whole item; neighbouring patches merged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atoll.config import VisionConfig
from atoll.nn.linear import Linear, RMSNorm, Weight
from atoll.ops.attention import segment_attention
from atoll.ops.norm import rms_norm
from atoll.ops.vision import Grid, interpolate_table, merge_patches, rotate_pairs, rotation_angles, time_codes


class VisionNorm(RMSNorm):
    """RMSNorm whose epsilon, when None, is the machine epsilon of its input's type: 2^-23 in float32, 2^-7 in bfloat16, as released."""

    def __init__(self, dim: int, eps: float | None, **factory) -> None:
        super().__init__(dim, math.nan, **factory)
        self.given = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, torch.finfo(x.dtype).eps if self.given is None else self.given)


class VisionMLP(nn.Module):
    """`fc1(gelu(fc0 x))`, GELU in its tanh form."""

    def __init__(self, dim: int, hidden: int, **factory) -> None:
        super().__init__()
        self.fc0, self.fc1 = Linear(dim, hidden, **factory), Linear(hidden, dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """`x + wo(attention(norm0 x))`, then `x + mlp(norm1 x)`, on [N, dim]; attention within each item, in both directions."""

    def __init__(self, dim: int, heads: int, qkv: int, hidden: int, eps: float | None, **factory) -> None:
        super().__init__()
        self.heads = heads
        self.norm0, self.norm1 = VisionNorm(dim, eps, **factory), VisionNorm(dim, eps, **factory)
        self.wqkv, self.wo = Linear(dim, 3 * qkv, **factory), Linear(qkv, dim, **factory)
        self.mlp = VisionMLP(dim, hidden, **factory)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, lengths: list[int]) -> Tensor:
        q, k, v = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = rotate_pairs(q, cosine, sine), rotate_pairs(k, cosine, sine)
        out = segment_attention(q[None], k[None], v[None], lengths, scale=q.shape[-1] ** -0.5)
        x = x + self.wo(out[0].flatten(1))
        return x + self.mlp(self.norm1(x))


class PatchEmbed(nn.Module):
    """Patches [N, 3, p, p] to [N, dim]: one linear map of the pixels, and the learned position of row and column.

    A code of the frame is added only where an item has more than one. It is computed when needed and not kept, so that no change of
    type or device can wear it down.
    """

    def __init__(self, dim: int, patch: int, table: tuple[int, int], frames: int, **factory) -> None:
        super().__init__()
        self.frames = frames
        self.proj, self.pos_emb = Weight(dim, 3, patch, patch, **factory), Weight(*table, dim, **factory)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        weight = self.proj.weight
        x = F.linear(pixels.to(weight.dtype).flatten(1), weight.flatten(1))
        alike = [(grid, len(list(run))) for grid, run in itertools.groupby(grids)]
        return x + torch.cat([self._positions(grid).repeat(count, 1) for grid, count in alike]).to(x.dtype)

    def _positions(self, grid: Grid) -> Tensor:
        frames, rows, columns = grid
        plane = interpolate_table(self.pos_emb.weight, rows, columns).flatten(0, 1)
        if frames == 1:
            return plane
        return (plane + time_codes(frames, plane.shape[-1], plane.device)[:, None]).flatten(0, 1)


class VisionEncoder(nn.Module):
    """The blocks and the final norm."""

    def __init__(self, dim: int, blocks: int, heads: int, qkv: int, hidden: int, eps: float | None, **factory) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.head_dim = qkv // heads
        self.blocks = nn.ModuleList(VisionBlock(dim, heads, qkv, hidden, eps, **factory) for _ in range(blocks))
        self.final_layernorm = VisionNorm(dim, eps, **factory)

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        angles = rotation_angles(grids, self.head_dim, x.dtype, x.device)
        call = angles.cos(), angles.sin(), [math.prod(grid) for grid in grids]
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, *call, use_reentrant=False, preserve_rng_state=False) if recompute else block(x, *call)
        return self.final_layernorm(x)


class VisionTower(nn.Module):
    """Patches of all items to merged features, [N, 3, p, p] to [M, a·b, dim].

    Args:
        dim: width. blocks, heads: depth and heads of a block. qkv: width of queries, keys and values over all heads (default: dim).
        hidden: inner width of a block's MLP. patch: pixels on a side of a patch.
        table: rows and columns of the table of learned positions. frames: most frames in one item.
        merge: patches (a, b), down and across, that become one feature.
        eps: epsilon of the norms; None is the machine epsilon of the type computed in (`VisionNorm`).
    """

    def __init__(
        self,
        dim: int,
        blocks: int,
        heads: int,
        *,
        hidden: int,
        qkv: int | None = None,
        patch: int = 14,
        table: tuple[int, int] = (64, 64),
        frames: int = 4,
        merge: tuple[int, int] = (2, 2),
        eps: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        weights = {"device": device, "dtype": dtype}
        self.patch, self.frames, self.merge = patch, frames, merge
        self.patch_embed = PatchEmbed(dim, patch, table, frames, **weights)
        self.encoder = VisionEncoder(dim, blocks, heads, qkv or dim, hidden, eps, **weights)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """MLPs normal with variance 2 / inputs, cut at ±2; table of positions normal(0, 1); norms 1, as released.

        The release says nothing of the other matrices: uniform within ±1/sqrt(inputs), torch's own for a linear map.
        """
        nn.init.normal_(self.patch_embed.pos_emb.weight)
        _uniform(self.patch_embed.proj.weight)
        nn.init.ones_(self.encoder.final_layernorm.weight)
        for block in self.encoder.blocks:
            assert isinstance(block, VisionBlock)
            for norm in (block.norm0, block.norm1):
                nn.init.ones_(norm.weight)
            for linear in (block.wqkv, block.wo):
                _uniform(linear.weight)
            for linear in (block.mlp.fc0, block.mlp.fc1):
                _cut_normal(linear.weight)

    def forward(self, pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
        """Features [M, a·b, dim] of all items, one after the other.

        Args:
            pixel_values: [N, 3, p, p], the patches of all items; in an item frame by frame, row by row.
            grid_thws: integers [items, 3], frames, rows and columns in patches. Read on the CPU.

        Raises ValueError, one line, for grids that cannot be and for counts that do not agree.
        """
        grids = self.grids(pixel_values, grid_thws)
        order = sorted(range(len(grids)), key=grids.__getitem__)  # items of one grid are computed together
        sizes = [math.prod(grid) for grid in grids]
        alike = [grids[i] for i in order]
        x = self.encoder(self.patch_embed(_reordered(pixel_values, sizes, order), alike), alike)
        runs = [(grid, len(list(run))) for grid, run in itertools.groupby(alike)]
        parts = zip(x.split([math.prod(grid) * count for grid, count in runs]), runs, strict=True)
        merged = torch.cat([merge_patches(part, grid, self.merge, count) for part, (grid, count) in parts])
        back = sorted(range(len(order)), key=order.__getitem__)
        lengths = self.feature_lengths(torch.tensor(alike))
        return _reordered(merged, lengths, back)

    def grids(self, pixel_values: Tensor, grid_thws: Tensor) -> list[Grid]:
        """The checked grids of a call."""
        if grid_thws.ndim != 2 or grid_thws.shape[1] != 3 or not len(grid_thws) or grid_thws.is_floating_point():
            raise ValueError(f"grid_thws is {grid_thws.dtype} {tuple(grid_thws.shape)}: integers [items, 3] are expected")
        grids = [(t, h, w) for t, h, w in grid_thws.tolist()]
        a, b = self.merge
        for i, (t, h, w) in enumerate(grids):
            if not 1 <= t <= self.frames:
                raise ValueError(f"grid_thws[{i}] = {(t, h, w)}: 1 to {self.frames} frames are expected")
            if h < 1 or w < 1 or h % a or w % b:
                raise ValueError(f"grid_thws[{i}] = {(t, h, w)}: rows must be a multiple of {a} and columns of {b}")
        patches, shape = sum(math.prod(grid) for grid in grids), (3, self.patch, self.patch)
        if not pixel_values.is_floating_point():
            raise ValueError(f"pixel_values is {pixel_values.dtype}: normalised floats are expected, not a picture's bytes")
        if tuple(pixel_values.shape) != (patches, *shape):
            found = tuple(pixel_values.shape)
            raise ValueError(f"pixel_values has shape {found}: {(patches, *shape)} is expected, the patches that grid_thws adds up to")
        return grids

    def feature_lengths(self, grid_thws: Tensor) -> list[int]:
        """Features of each item: rows · columns / (a·b), whatever its frames."""
        return [h * w // math.prod(self.merge) for _, h, w in grid_thws.tolist()]


class Projector(nn.Module):
    """Merged features [M, a·b, dim] to input embeddings [M, out]: flattened, two linear maps with an exact GELU between, RMSNorm."""

    def __init__(self, inner: int, out: int, eps: float = 1e-5, **factory) -> None:
        super().__init__()
        self.proj = nn.Sequential(Linear(inner, inner, **factory), nn.GELU(), Linear(inner, out, **factory))
        self.post_norm = RMSNorm(out, eps, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Both maps normal with variance 2 / inputs, cut at ±2; norm 1, as released."""
        for linear in (self.proj[0], self.proj[2]):
            assert isinstance(linear, Linear)
            _cut_normal(linear.weight)
        nn.init.ones_(self.post_norm.weight)

    def forward(self, features: Tensor) -> Tensor:
        return self.post_norm(self.proj(features.flatten(1)))


def build_vision(v: VisionConfig, hidden_size: int, **factory) -> tuple[VisionTower, Projector]:
    """The tower that `v` describes, and the projector from it to a text model of `hidden_size`."""
    tower = VisionTower(
        v.vt_hidden_size,
        v.vt_num_hidden_layers,
        v.vt_num_attention_heads,
        qkv=v.qkv_hidden_size,
        hidden=v.vt_intermediate_size,
        patch=v.patch_size,
        table=(v.init_pos_emb_height, v.init_pos_emb_width),
        frames=v.init_pos_emb_time,
        merge=v.merge_kernel_size,
        eps=v.norm_eps,
        **factory,
    )
    return tower, Projector(v.vt_hidden_size * math.prod(v.merge_kernel_size), hidden_size, v.projector_ln_eps, **factory)


def _reordered(x: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    """The parts of `x` [N, ...], of `sizes` rows each, in `order`."""
    if order == list(range(len(order))):
        return x
    starts = [0, *itertools.accumulate(sizes)]
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
    return x.index_select(0, rows.to(x.device))


def _uniform(weight: Tensor) -> None:
    bound = weight[0].numel() ** -0.5
    nn.init.uniform_(weight, -bound, bound)


def _cut_normal(weight: Tensor) -> None:
    nn.init.trunc_normal_(weight, std=math.sqrt(2 / weight.shape[1]))
