"""The one primitive: matrix products with the experts that a routing chose, and the choice of how to run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from switchhead.ops import gated, grouped, reference
from switchhead.ops.availability import is_gpu, require_triton, triton_obstacle
from switchhead.ops.dtypes import compute_dtype, without_autocast
from switchhead.ops.widths import pad
from switchhead.routing import Routing

Reduce = Literal["k", "heads"] | None
Backend = Literal["auto", "reference", "gated", "grouped", "triton"]

_TORCH_BACKENDS: dict[str, Callable[..., Tensor]] = {
    "reference": reference.moe_linear,
    "gated": gated.moe_linear,
    "grouped": grouped.moe_linear,
}

# On a CPU grouping pays from this ratio E / k and this size of an expert on; docs/performance.md has the measurements.
_GROUPED_RATIO = 1.25
_GROUPED_SIZE = 8192


class Choice(NamedTuple):
    """A backend and the reason for it."""

    backend: str
    reason: str


def moe_linear(
    x: Float[Tensor, "tokens *heads d_in"],
    weight: Float[Tensor, "pools experts d_in d_out"],
    routing: Routing,
    *,
    reduce: Reduce,
    backend: Backend = "auto",
    padding: int = 0,
) -> Tensor:
    """Multiply each token with the experts that its router chose (SwitchHead, arXiv 2312.07987, equations 7-10).

        y[n, h, j] = x[n(, h)] @ weight[h, expert_indices[n, h, j]]

    Args:
        x: `[N, d_in]` (all heads read one row) or `[N, H, d_in]`.
        weight: `[H, E, d_in, d_out]`, or `[1, E, d_in, d_out]`: one pool of experts shared by all heads.
        routing: gates and expert indices, `[N, H, K]`.
        reduce: `"k"`: `sum_j gates[n, h, j] * y[n, h, j]`, `[N, H, d_out]`; `"heads"`: the same summed over heads too,
            `[N, d_out]`; `None`: `y` itself, without gates, `[N, H, K, d_out]`.
        backend: `"reference" | "gated" | "grouped" | "triton"`, or `"auto"` to let `choose_backend` decide. All
            compute the same function.
        padding: x has so many more columns than d_in, zeros, whose gradients are zeros too; with `reduce="heads"`, up
            to the next multiple of 16. On a GPU that saves the copies that taking them off would make.

    Returns:
        The result, in autocast's dtype inside autocast, else in the promotion of x's and weight's.

    Raises:
        ValueError: shapes, reduction or backend that do not fit, or a backend that cannot run here.
    """
    _check(x, weight, routing, reduce, padding)
    dtype = compute_dtype(x, weight)
    name = choose_backend(x, weight, routing).backend if backend == "auto" else backend
    if name == "triton":
        require_triton(x.device, dtype)
        from switchhead.ops.triton.moe_linear import moe_linear as run

        return run(x, weight, routing, reduce=reduce)  # casts weights as it lays them out
    if name not in _TORCH_BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of auto, triton, {', '.join(_TORCH_BACKENDS)}")
    weight = pad(weight, (0, 0, 0, padding))
    with without_autocast(x.device):  # the operands have their dtype; sums stay wide
        return _TORCH_BACKENDS[name](x.to(dtype), weight.to(dtype), routing, reduce=reduce)


def choose_backend(x: Tensor, weight: Tensor, routing: Routing) -> Choice:
    """The backend that `backend="auto"` runs for these operands, and why. Depends on device, dtype and shape only."""
    ratio = routing.n_experts / routing.k
    if is_gpu(x.device):
        obstacle = triton_obstacle(x.device, compute_dtype(x, weight))
        if obstacle is None:
            return Choice("triton", "a CUDA device that runs the kernels")
        return Choice("gated", f"{obstacle}; computing all experts needs no word from the device to the host")
    d_in, d_out = weight.shape[2:]
    if ratio < _GROUPED_RATIO:
        return Choice("gated", f"E / k = {ratio:.2f}: computing all experts costs less than gathering rows of so few")
    if d_in * d_out < _GROUPED_SIZE:
        return Choice(
            "gated", f"experts of {d_in} x {d_out}: computing all of them costs less than gathering their rows"
        )
    return Choice("grouped", f"E / k = {ratio:.2f}: computing only the chosen experts saves more than gathers cost")


def _check(x: Tensor, weight: Tensor, routing: Routing, reduce: Reduce, padding: int) -> None:
    tokens, heads, _ = routing.gates.shape
    if reduce not in ("k", "heads", None):
        raise ValueError(f"reduce={reduce!r} is unknown; use 'k', 'heads' or None")
    if weight.ndim != 4 or weight.shape[0] not in (1, heads) or weight.shape[1] != routing.n_experts:
        raise ValueError(
            f"weight must be [{heads} or 1, {routing.n_experts}, d_in, d_out] for this routing ({heads} heads, "
            f"{routing.n_experts} experts); got {tuple(weight.shape)}"
        )
    d_in = weight.shape[2]
    most = -d_in % 16 if reduce == "heads" else 0
    if not 0 <= padding <= most:
        raise ValueError(f"padding must be 0 to {most} for d_in={d_in} and reduce={reduce!r}; got {padding}")
    d_in += padding
    if tuple(x.shape) not in ((tokens, d_in), (tokens, heads, d_in)):
        raise ValueError(
            f"x must be [{tokens}, {d_in}] or [{tokens}, {heads}, {d_in}] for this routing and weight; "
            f"got {tuple(x.shape)}"
        )
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"x and weight must be floating point; got {x.dtype} and {weight.dtype}")
    if not x.device == weight.device == routing.gates.device:
        raise ValueError(
            f"x, weight and routing must be on one device; got {x.device}, {weight.device}, {routing.gates.device}"
        )
