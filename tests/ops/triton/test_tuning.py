import torch

from switchhead.ops.triton.tuning import accumulate_tile


def test_a_gpu_for_desktops_gets_a_tile_that_fits():
    large, small = (accumulate_tile(torch.bfloat16, 448, kib * 1024) for kib in (163, 99))
    assert (large.n, small.n) == (256, 128)
    assert (
        (large.m + large.n) * large.k * 2 * large.stages > 99 * 1024 >= (small.m + small.n) * small.k * 2 * small.stages
    )
