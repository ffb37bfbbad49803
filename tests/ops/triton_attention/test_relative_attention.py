"""The fused kernels against float64: on a GPU, or in Triton's interpreter on tiny shapes."""

import pytest
import torch

from switchhead.ops.relative import relative_attention
from switchhead.ops.triton_attention import operator
from tests.helpers import check_operator, gradients, relative_error

NAMES = ("out", "q", "k", "v", "r", "content_bias", "position_bias", "scale")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles each way on tiny shapes."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(operator, "launch_for", lambda width, dtype: operator.Launch(16, {}, {}, {}, {}))


def inputs(
    *, batch=2, heads=1, key_heads=1, queries=20, keys=41, width=16, causal=True, biases=False, padding=False, device
):
    """The tensors of `NAMES`, in float64, and the padding mask."""
    positions = keys if causal else keys + queries - 1
    shapes = [(batch, heads, queries, width), *[(batch, key_heads, keys, width)] * 2, (heads, positions, width)]
    tensors = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    if biases:
        tensors += [torch.randn(heads, width, dtype=torch.float64, device=device) for _ in range(2)]
        tensors += [torch.tensor([0.3], dtype=torch.float64, device=device)]
    mask = None
    if padding:
        mask = torch.zeros(batch, keys, dtype=torch.bool, device=device)
        mask[0, : keys // 2] = True
        mask[-1] = True  # nothing to attend to
    return tensors, mask


def reference_output(tensors, mask, causal):
    q, k, v, r, *rest = tensors
    content_bias, position_bias, scale = rest or (None, None, 0.3)
    return relative_attention(
        q, k, v, r, content_bias=content_bias, position_bias=position_bias, scale=scale, causal=causal,
        key_padding_mask=mask, backend="reference",
    )  # fmt: skip


def run(tensors, mask, dtype, *, backend, causal=True, function=relative_attention):
    """Output and gradients of all tensors."""
    q, k, v, r, *rest = leaves = [x.to(dtype).detach().requires_grad_() for x in tensors]
    content_bias, position_bias, scale = rest or (None, None, 0.3)
    out = function(
        q, k, v, r, content_bias=content_bias, position_bias=position_bias, scale=scale, causal=causal,
        key_padding_mask=mask, backend=backend,
    )  # fmt: skip
    # In the direction of the output itself, the scale's gradient is a sum that does not cancel.
    cotangent = reference_output(tensors, mask, causal) + 0.1 * torch.linspace(-1, 1, out.numel()).view_as(out).to(out)
    return dict(zip(NAMES, (out.detach(), *gradients(out, *leaves, cotangent=cotangent)), strict=False))


def assert_accurate(tensors, mask, dtype, **options):
    """Error at most twice that of plain PyTorch in the same dtype, both against float64."""
    exact = run(tensors, mask, torch.float64, backend="reference", **options)
    plain = run(tensors, mask, dtype, backend="reference", **options)
    fused = run(tensors, mask, dtype, backend="triton", **options)
    for name, expected in exact.items():
        error, allowed = relative_error(fused[name], expected), relative_error(plain[name], expected)
        luck = 1e-5
        if name == "scale":  # one number, summed over all scores: plain PyTorch's may come out right by chance
            luck = torch.finfo(dtype).eps + 3 * torch.finfo(torch.float32).eps
        assert error <= 2 * allowed + luck, name


CASES = {
    "one tile": dict(queries=16, keys=16),
    "memory, odd lengths": dict(),
    "one query": dict(queries=1),
    "one key": dict(queries=1, keys=1),
    "several tiles": dict(batch=1, queries=33, keys=70),
    "grouped keys": dict(batch=1, heads=4, key_heads=2),
    "biases and learned scale": dict(biases=True),
    "padding": dict(padding=True, biases=True),
    "both directions": dict(causal=False),
    "both directions, padding": dict(causal=False, padding=True),
    "odd width": dict(width=41),
}


@pytest.mark.parametrize("case", CASES)
def test_float32_is_as_accurate_as_plain_pytorch(case, device):
    tensors, mask = inputs(**CASES[case], device=device)
    assert_accurate(tensors, mask, torch.float32, causal=CASES[case].get("causal", True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["biases and learned scale", "both directions, padding"])
def test_half_precision_is_as_accurate_as_plain_pytorch(case, dtype, device):
    tensors, mask = inputs(**CASES[case], device=device)
    assert_accurate(tensors, mask, dtype, causal=CASES[case].get("causal", True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [41, 64, 76, 100, 112, 128, 132])
def test_widths_of_the_paper_are_as_accurate_as_plain_pytorch(width, dtype, device):
    tensors, mask = inputs(width=width, queries=200, keys=450, biases=True, device=device)
    assert_accurate(tensors, mask, dtype)


@pytest.mark.parametrize(("fitting_tiles", "n_chunks"), [(1, 9), (2, 6), (4, 3), (7, 2), (100, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_backward_in_chunks_gives_the_same_gradients(fitting_tiles, n_chunks, causal, device, monkeypatch):
    """Three sequences of three tiles."""
    tile = operator.launch_for(16, torch.float32).tile
    queries, keys = 3 * tile - 12, 3 * tile + 9
    tensors, mask = inputs(batch=3, heads=2, key_heads=2, queries=queries, keys=keys, causal=causal, device=device)
    q, k = (x.float() for x in tensors[:2])
    blocks = operator.divide(q, k, tile, causal=causal).blocks
    monkeypatch.setattr(operator, "_CHUNK_BYTES", fitting_tiles * 2 * blocks * tile**2 * 4)
    assert len(operator.divide(q, k, tile, causal=causal).chunks) == n_chunks
    assert_accurate(tensors, mask, torch.float32, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
def test_sequences_split_over_programs_give_the_same_gradients(causal, device, monkeypatch):
    """As on a GPU, whose many multiprocessors few distances and heads would not fill."""
    monkeypatch.setattr(operator, "_multiprocessors", lambda device: 64)
    tensors, mask = inputs(batch=5, heads=2, key_heads=1, causal=causal, padding=True, biases=True, device=device)
    tile = operator.launch_for(16, torch.float32).tile
    assert operator.divide(*(x.float() for x in tensors[:2]), tile, causal=causal).splits == 5
    assert_accurate(tensors, mask, torch.float32, causal=causal)


def test_rows_with_nothing_to_attend_to_give_zeros_and_finite_gradients(device):
    tensors, mask = inputs(padding=True, biases=True, device=device)
    results = run(tensors, mask, torch.float32, backend="triton")
    assert torch.count_nonzero(results["out"][-1]) == 0
    for name, x in results.items():
        assert x.isfinite().all(), name


def test_any_layout_of_the_inputs_gives_the_same_result(device):
    tensors, _ = inputs(device=device)
    q, k, v, r = (x.float() for x in tensors)
    expected = relative_attention(q, k, v, r, scale=0.3, backend="triton")
    layouts = (
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        [torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v)],
        [torch.cat([x, x], dim=2)[:, :, x.shape[2] :] for x in (q, k, v)],
    )
    for layout in layouts:
        assert torch.equal(relative_attention(*layout, r, scale=0.3, backend="triton"), expected)


def test_heads_may_share_positions(device):
    (q, k, v, r), _ = inputs(heads=2, key_heads=2, device=device)
    q, k, v, shared = (x.float() for x in (q, k, v, r[:1].expand_as(r)))
    torch.testing.assert_close(
        relative_attention(q, k, v, shared, scale=0.3, backend="triton"),
        relative_attention(q, k, v, shared, scale=0.3, backend="reference"),
    )


def test_gradients_repeat_bit_for_bit(device):
    tensors, mask = inputs(batch=3, device=device)
    first, *others = (run(tensors, mask, torch.float32, backend="triton") for _ in range(20 if device == "cuda" else 2))
    for other in others:
        for name, x in first.items():
            assert torch.equal(x, other[name]), name


def test_no_uninitialised_memory_is_read(device, poisoned_allocations):
    tensors, mask = inputs(padding=True, device=device)
    for name, x in run(tensors, mask, torch.float32, backend="triton").items():
        assert x.isfinite().all(), name


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("batch", [0, 2])
def test_what_a_compiler_is_told_holds(batch, biases, device):
    (q, k, v, r), mask = inputs(batch=batch, heads=2, key_heads=2, queries=5, keys=9, padding=batch > 0, device=device)
    # As from a layer: heads beside each other in memory.
    q, k, v, r = (x.float().transpose(-3, -2).contiguous().transpose(-3, -2).requires_grad_() for x in (q, k, v, r))
    u = torch.randn_like(q, requires_grad=True) if biases else None
    torch.library.opcheck(operator.relative_attention, (q, u, k, v, r, mask, 0.3, True))
    tensors = [x if x is None else x.detach() for x in (q, u, k, v, r)]
    out, lse = operator.relative_attention(*tensors, mask, 0.3, True)
    arguments = (torch.randn_like(out), *tensors, mask, out, lse, 0.3, True)
    check_operator(operator.relative_attention_backward, arguments, differentiable=False)


@pytest.mark.slow
def test_compiles_whole_and_once_for_many_lengths(device):
    compiled = torch.compile(relative_attention, fullgraph=True, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for queries in (3, 5, 9):
        tensors, mask = inputs(queries=queries, keys=queries + 8, biases=True, device=device)
        expected = run(tensors, mask, torch.float32, backend="triton")
        found = run(tensors, mask, torch.float32, backend="triton", function=compiled)
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, msg=name, atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", [0, 1, 4])
def test_fewer_keys_than_queries_run_without_the_kernel_alone(keys, causal, device):
    (q, k, v, r), _ = inputs(queries=6, keys=keys, causal=causal, device=device)
    scores = torch.full((2, 1, 6, keys), -torch.inf, dtype=q.dtype, device=device)
    for i in range(6):
        for j in range(keys if not causal else max(keys - 6 + i + 1, 0)):
            scores[..., i, j] = 0.3 * (q[:, :, i] * (k[:, :, j] + r[:, 5 - i + j])).sum(-1)
    expected = scores.softmax(-1).nan_to_num() @ v
    found = relative_attention(q, k, v, r, scale=0.3, causal=causal)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=f"S = {keys} keys for T = 6 queries"):
        relative_attention(*(x.float() for x in (q, k, v, r)), scale=0.3, causal=causal, backend="triton")


class Grids:
    """In place of a kernel: notes its grids and runs nothing."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **options: None


def test_heads_of_all_sequences_are_numbered_in_the_grid_dimension_without_a_small_limit(monkeypatch, device):
    """2 x 33,000 of them; all other dimensions of a grid end at 65,535."""
    q, r = (torch.empty(shape, device=device, requires_grad=True) for shape in ((33_000, 2, 17, 8), (2, 17, 8)))
    kernels = ("forward_kernel", "query_gradient_kernel", "position_gradient_kernel", "key_gradient_kernel")
    noted = {name: Grids() for name in kernels}
    for name, kernel in noted.items():
        monkeypatch.setattr(operator, name, kernel)
    relative_attention(q, q, q, r, scale=0.3, backend="triton").sum().backward()
    for name, kernel in noted.items():
        assert kernel.grids, name
        assert all(len(grid) == 1 for grid in kernel.grids), name
    tile = operator.launch_for(8, q.dtype).tile
    assert noted["forward_kernel"].grids == [(66_000 * -(-17 // tile),)]


@pytest.mark.gpu
def test_more_heads_than_a_grids_second_dimension_holds_agree_with_plain_pytorch(device):
    tensors, _ = inputs(batch=33_000, heads=2, key_heads=2, queries=5, keys=7, width=8, device=device)
    assert_accurate(tensors, None, torch.float32)


@pytest.mark.parametrize("causal", [True, False])
def test_positions_outside_a_chunks_windows_are_left_alone(causal, device):
    """Adding nothing would turn a negative zero into a positive one."""
    M, tiles, blocks = 16, 3, 2 if not causal else 4
    u = torch.ones(1, 1, tiles * M, 16, device=device)
    grad_p = torch.zeros(1, 1, blocks, M, M, device=device)
    windows = blocks if causal else tiles - 1 + blocks
    keys = tiles * M if causal else M
    grad_r = torch.full((1, 1, windows * M, 16), -0.0, device=device)
    first_tile = 0  # whose window begins behind those of all later tiles
    operator.position_gradient_kernel[(windows,)](
        u, grad_p, grad_r, *u.stride()[:3],
        1, tiles * M, keys, windows * M, blocks, 0, 1, first_tile, 1, windows, 1,
        CAUSAL=causal, PRECISION="ieee", M=M, WIDTH=16, D=16,
    )  # fmt: skip
    touched = ~grad_r.signbit().view(windows, -1)
    assert not touched[: tiles - 1].any()
    assert touched[tiles - 1 :].all()


def test_arguments_that_do_not_fit_are_refused(device):
    (q, k, v, r), _ = inputs(heads=3, key_heads=2, device=device)
    with pytest.raises(ValueError, match="multiple of Hk"):
        relative_attention(q, k, v, r, scale=0.3)
    (q, k, v, r), _ = inputs(device=device)
    with pytest.raises(ValueError, match="P >= 60"):
        relative_attention(q, k, v, r, scale=0.3, causal=False)
    with pytest.raises(ValueError, match="must be boolean"):
        relative_attention(q, k, v, r, scale=0.3, key_padding_mask=torch.zeros(2, 41, device=device))
    with pytest.raises(ValueError, match="unknown"):
        relative_attention(q, k, v, r, scale=0.3, backend="flash")
    with pytest.raises(ValueError, match="float64"):
        relative_attention(q, k, v, r, scale=0.3, backend="triton")
    with pytest.raises(ValueError, match="positive"):
        relative_attention(q, k, v, r, scale=-0.3)
