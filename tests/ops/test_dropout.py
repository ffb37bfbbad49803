import pytest
import torch

from switchhead.ops import dropout, relu_dropout


def test_bad_arguments_are_named():
    x = torch.randn(3, 8)
    for function in (dropout, lambda x, p, **options: relu_dropout(x, None, p, **options)):
        for p in (-0.1, 1.5, float("nan")):
            with pytest.raises(ValueError, match=r"p=.* must be a probability"):
                function(x, p)
        with pytest.raises(ValueError, match=r"backend='cuda' is unknown; use 'auto', 'reference' or 'triton'"):
            function(x, 0.5, backend="cuda")
        with pytest.raises(ValueError, match=r"backend='triton' cannot run here: .*not float64"):
            function(x.double(), 0.5, backend="triton")
    for bias in (torch.ones(1), torch.ones(4), torch.ones(1, 8)):
        with pytest.raises(ValueError, match=r"bias must be \[8\], as wide as x; got"):
            relu_dropout(x, bias, 0.5)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_kept_elements_are_divided_by_their_probability(p):
    x = torch.randn(200, 8)
    for out, full in ((dropout(x, p), x), (relu_dropout(x, torch.ones(8), p), (x + 1).clamp(min=0))):
        kept = out != 0
        assert torch.allclose(out[kept], full[kept] / (1 - p if p < 1 else 1))
        assert abs(kept[full != 0].double().mean() - (1 - p)) < 0.1
