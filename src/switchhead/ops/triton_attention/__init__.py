"""Flash-style attention with Transformer-XL's relative positions, in Triton.

`operator.py` has the differentiable op, `forward.py` and `backward.py` the kernels, `skew.py` what is special about
them: how a tile of position scores is turned into a tile of attention scores without leaving the registers.
"""
