"""`moe_linear` and `route` as Triton kernels, for CUDA devices of capability 8.0 and newer.

operator.py     operators that a compiler inlines
inputs.py       all that a layer makes of its tokens before attention
moe_linear.py   the primitive
problem.py      which kernels serve it, by shapes
router.py       scores, choice and gates
rotary.py       sines, and the rotation of queries and keys
stack.py        all weights that tokens meet, laid out by one launch
dense.py        all experts through cuBLAS
grouping.py     counting sort: rows by the set of experts they chose, and the tiles that cover them
operands.py     weights cast and padded, rows scaled by their gates
project.py      tall inner dimension: one gathered tile feeds all experts of a set, gates in the epilogue
accumulate.py   short inner dimension: the chosen experts' matrices stacked along it
weight_grad.py  sums over tokens, split evenly over the multiprocessors
decode.py       a handful of tokens: read only the chosen experts
tuning.py       tile sizes, apart from the kernels
"""
