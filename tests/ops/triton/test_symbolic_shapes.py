"""What compiled code asks about the number of tokens: each question but one would cost a compilation."""

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from switchhead.ops.triton.inputs import _project_inputs, _project_inputs_backward
from switchhead.ops.triton.moe_linear import _backward, _forward
from switchhead.ops.triton.router import _route, _route_backward
from switchhead.ops.widths import attention_width

# d_model, d_head, heads, experts, k: the published layers, one with odd widths, one of slots sorted one by one
SHAPES = [
    (1024, 112, 4, 4, 2),
    (412, 76, 2, 5, 3),
    (1024, 132, 2, 8, 4),
    (21, 11, 3, 4, 1),
    (64, 16, 1, 12, 4),
    (2048, 104, 8, 4, 2),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_operators_ask_only_whether_tokens_are_few_enough_for_decoding(shape, dtype):
    d_model, d, heads, experts, k = shape
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.empty(1000, d_model, dtype=dtype), symbolic_context=dynamic)
    with mode, enable_python_dispatcher():
        weights = [torch.empty(s) for s in ((heads * d, d_model), (heads * d, d_model), (2 * heads, experts, d_model))]
        values, outputs = torch.empty(heads, experts, d_model, d), torch.empty(heads, experts, d, d_model)
        tables = [torch.empty(100, d // 4) for _ in range(2)]
        width = attention_width(d, torch.device("cuda"))
        *rows, gates, indices, kept, copy = _project_inputs(
            x, *weights, values, k, *tables, dtype, width, True, None
        )  # fmt: skip
        tokens, grads = copy if d_model % 8 else x, [*rows, gates]
        rest = (*tables, gates, indices, kept, rows[2], dtype, True)
        _project_inputs_backward(*grads, tokens, *weights, values, *rest)

        routed = gates[0].clone(), indices[0].clone()
        operands = {"k": (x, values), "heads": (rows[2].clone(), outputs), "none": (x, values)}
        for reduce, (a, weight) in operands.items():
            y, kept = _forward(a, weight, *routed, reduce, dtype, reduce == "k")
            _backward(y, a, weight, *routed, kept, reduce, dtype, True, True, reduce != "none")
        for softmax in (False, True):
            chosen = _route(x, weights[2], k, softmax, None)
            _route_backward(chosen[0], x, weights[2], *chosen, softmax, True, True)
    symbol = x.shape[0].node.expr
    assert {str(guard.expr) for guard in environment.guards} <= {f"{symbol} > 16"}
    assert y.shape[0].node.expr == symbol
