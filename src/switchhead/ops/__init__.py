"""Functions on tensors. They know no module."""

from switchhead.ops.moe_linear import Choice, choose_backend, moe_linear
from switchhead.ops.relative import relative_bias
from switchhead.ops.router import route

__all__ = ["Choice", "choose_backend", "moe_linear", "relative_bias", "route"]
