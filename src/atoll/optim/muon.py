"""Muon: momentum whose every block is made orthogonal before it is applied.

Source: Moonlight (arXiv 2502.16982) for the scale and the decoupled decay; Kimi K3 report §2.5 for the split along heads, so
that a head of large gradients does not drown the others. A block is what gets orthogonalised: a whole matrix, one head's rows,
or one expert. Blocks of one shape from all over the model go through Newton–Schulz as one batched matmul, which on a CPU is the
difference between a few large products and thousands of small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.optim.masters import MasterOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MAX_BATCH_ELEMENTS = 1 << 26  # elements of one batched Newton–Schulz: bounds its memory (256 MiB a copy in float32)


@dataclass(frozen=True)
class Blocks:
    """How a parameter splits into blocks: `heads` groups of rows, each cut into consecutive pieces of `rows` rows.

    `Blocks()` takes the matrix whole. `Blocks(4, (32,))` is four heads of 32 rows. `Blocks(4, (32, 48))` is four heads, each of
    32 key rows followed by 48 value rows, hence eight blocks. A 3-D parameter is a stack whose every matrix is split so.
    """

    heads: int = 1
    rows: tuple[int, ...] = ()

    def split(self, x: Tensor) -> list[Tensor]:
        """Views of `x` [.., R, C] as stacks [n, r, C], one a piece. Raises ValueError when the rows do not add up."""
        height, width = x.shape[-2:]
        if not self.rows:
            return [x.view(-1, height, width)]
        if self.heads * sum(self.rows) != height:
            raise ValueError(f"{self.heads} heads of {self.rows} rows do not make up a matrix of {height} rows")
        stacked = x.view(-1, sum(self.rows), width)
        return list(stacked.split(self.rows, dim=1))


def newton_schulz(x: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS) -> Tensor:
    """Nearest orthogonal matrix, roughly: singular values of each matrix of `x` [n, r, c] are driven towards 1.

    X ← aX + (bA + cA²)X with A = XXᵀ, from X = x/‖x‖_F, on the side with fewer rows (Moonlight §2.1). A zero matrix stays zero.
    Same dtype out; accuracy is that of `x`'s dtype.
    """
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / torch.where(norm == 0, torch.ones_like(norm), norm)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(MasterOptimizer):
    """Muon over parameters of two or three dimensions.

    Args:
        params: parameters, or groups with an optional `blocks`: one `Blocks` a parameter (default: whole matrices).
        lr: step size. weight_decay: decoupled, W ← W − lr·decay·W.
        momentum: M ← μM + G. nesterov: orthogonalise G + μM in place of M.
        ns_dtype: dtype of Newton–Schulz; None keeps the master's. bfloat16 is for GPUs: it deviates by about 3e-2.

    The update is 0.2·sqrt(max(r, c)) times the orthogonal block of [r, c], which makes its RMS that of AdamW's (Moonlight §2.2),
    so learning rate and decay carry over. Low-precision parameters are stepped on float32 masters.
    Set `found_inf` to a float tensor of 0 or 1 to leave everything as it was (1), without a host sync.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "blocks": None}
        super().__init__(params, {**defaults, "ns_steps": ns_steps, "ns_dtype": ns_dtype})
        self.found_inf: Tensor | None = None
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum"] = torch.zeros_like(p)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; refuses (ValueError) parameters that are not matrices or stacks of matrices."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["blocks"] = group["blocks"] or [Blocks() for _ in group["params"]]
        for p, blocks in zip(group["params"], group["blocks"], strict=True):
            if p.dim() not in (2, 3):
                raise ValueError(f"Muon takes matrices or stacks of matrices, not shape {tuple(p.shape)}")
            self._check_blocks(p, blocks)

    def _check_blocks(self, p: Tensor, blocks: Blocks) -> None:
        blocks.split(p.detach())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        self.take_gradients()
        for group in self.param_groups:
            pairs = zip(group["params"], group["blocks"], strict=True)
            self._update([(p, blocks, self._momentum(p, group)) for p, blocks in pairs if p.grad is not None], group)
        self.publish()
        return loss

    def _momentum(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Advance the momentum of `p`; the matrix to be orthogonalised."""
        mu, buffer, gradient = group["momentum"], self.state[p]["momentum"], p.grad
        assert gradient is not None
        if self.found_inf is None:
            buffer.mul_(mu).add_(gradient)
        else:
            skip = self.found_inf.to(buffer.device) > 0
            gradient = torch.where(skip, torch.zeros_like(gradient), gradient)
            buffer.copy_(torch.where(skip, buffer, buffer * mu + gradient))
        return buffer.mul(mu).add_(gradient) if group["nesterov"] else buffer

    def _update(self, taken: list[tuple[Tensor, Blocks, Tensor]], group: dict[str, Any]) -> None:
        """Step parameters, each given with its blocks and the matrix to be orthogonalised."""
        weights = [w for p, blocks, _ in taken for w in blocks.split(p)]
        updates = [u for _, blocks, whole in taken for u in blocks.split(whole)]
        lr = self._rate(group)
        for i, block, scale in orthogonalised(updates, group["ns_steps"], group["ns_dtype"]):
            weights[i].mul_(1 - lr * group["weight_decay"]).sub_(block.to(weights[i].dtype) * (lr * scale))

    def _rate(self, group: dict[str, Any]) -> Any:
        """The step size: 0 where the step is skipped."""
        return group["lr"] if self.found_inf is None else group["lr"] * (1 - self.found_inf)


def orthogonalised(stacks: list[Tensor], steps: int, dtype: torch.dtype | None) -> Iterator[tuple[int, Tensor, float]]:
    """(index, orthogonal matrices, factor of the update) of every stack [n, r, c], those of one shape in one batch."""
    for indices in _batches([s.shape for s in stacks]):
        rows, cols = stacks[indices[0]].shape[-2:]
        ortho = _orthogonal([stacks[i] for i in indices], steps, dtype)
        for i, block in zip(indices, ortho.split([stacks[i].shape[0] for i in indices]), strict=True):
            yield i, block, 0.2 * max(rows, cols) ** 0.5


def _orthogonal(stacks: list[Tensor], steps: int, dtype: torch.dtype | None) -> Tensor:
    """All matrices of `stacks` [n_i, r, c], orthogonalised as [Σ n_i, r, c], in slices of bounded memory."""
    whole = torch.cat(stacks) if len(stacks) > 1 else stacks[0]
    limit = max(1, MAX_BATCH_ELEMENTS // (whole.shape[1] * whole.shape[2]))
    slices = [newton_schulz(part if dtype is None else part.to(dtype), steps) for part in whole.split(limit)]
    return torch.cat(slices) if len(slices) > 1 else slices[0]


def _batches(shapes: list[torch.Size]) -> list[list[int]]:
    """Indices of stacks whose matrices share a shape, in batches of at most `MAX_BATCH_ELEMENTS` (one stack may exceed it)."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, shape in enumerate(shapes):
        by_shape.setdefault(tuple(shape[1:]), []).append(i)
    batches = []
    for indices in by_shape.values():
        batch, size = [], 0
        for i in indices:
            if batch and size + shapes[i].numel() > MAX_BATCH_ELEMENTS:
                batches.append(batch)
                batch, size = [], 0
            batch.append(i)
            size += shapes[i].numel()
        batches.append(batch)
    return batches
