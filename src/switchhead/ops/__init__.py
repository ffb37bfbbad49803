"""Functions on tensors. They know no module."""

from switchhead.ops.attention import SharedMask, attend, share_mask
from switchhead.ops.cross_entropy import chunked_cross_entropy
from switchhead.ops.dropout import dropout, relu_dropout
from switchhead.ops.inputs import project_inputs
from switchhead.ops.moe_linear import Choice, choose_backend, moe_linear
from switchhead.ops.packed import document_boundaries, packed_attention
from switchhead.ops.relative import relative_attention
from switchhead.ops.router import route

__all__ = [
    "Choice",
    "SharedMask",
    "attend",
    "choose_backend",
    "chunked_cross_entropy",
    "document_boundaries",
    "dropout",
    "moe_linear",
    "packed_attention",
    "project_inputs",
    "relative_attention",
    "relu_dropout",
    "route",
    "share_mask",
]
