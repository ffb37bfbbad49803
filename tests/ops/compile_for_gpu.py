"""Compiles what operators launch on a GPU, without one; run by test_compile_for_gpu.py, whose kernels are interpreted.

    compile_for_gpu.py NAME      every launch of the cases of this name, for GPUs of compute capability 9.0
    compile_for_gpu.py oldest    the first launch of each kernel of all cases, for 8.0, the oldest supported

Operators run forward and backward on a CPU as if it were a GPU. Their launches are recorded instead of made, and each
is compiled as Triton would before making it: for the same types, constants and alignments, once where these repeat.
Standard output gets the `Compilation`s as JSON.

Private here: Triton's active driver is a stand-in (`triton.runtime.driver.set_active`), `JITFunction.__getitem__` is
replaced while an operator runs, and what `torch.compile` finds out about what a kernel writes, by
`torch._higher_order_ops.triton_kernel_wrap`, is asked of it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch._higher_order_ops import triton_kernel_wrap
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from switchhead import ops
from switchhead.ops.availability import as_on_a_gpu
from switchhead.ops.rotary import rotary_table
from switchhead.ops.triton.dropout import keep_mask
from switchhead.routing import Routing

NEWEST, OLDEST = 90, 80  # compute capabilities, times 10
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Compilation:
    """What came of one launch.

    Attributes:
        kernel: its name.
        case: the call that launched it.
        capability: 10 times the compute capability it was compiled for.
        error: what the compiler said, if it failed; what follows is missing then.
        written: parameters that `torch.compile` takes as written.
        shared: bytes of shared memory of a program.
        stack: bytes of local memory of a thread, mostly of what does not fit into registers.
        known_stack: what these were when the case was written.
    """

    kernel: str
    case: str
    capability: int
    error: str = ""
    written: tuple[str, ...] = ()
    shared: int = 0
    stack: int = 0
    known_stack: int = 0


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """An operator, its arguments (see the functions below), and how it is called.

    Attributes:
        dtype: autocast's; float32: without.
        tf32: whether TF32 is allowed.
        stack: bytes that kernels are known to have on the stack for capability 9.0; the others have none.
    """

    run: Callable[..., None]
    arguments: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = BF16
    tf32: bool = False
    stack: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.run.__name__}({arguments}) in {self.dtype}{' with TF32' if self.tf32 else ''}"

    def launches(self) -> list[Launch]:
        """In their order, with their arguments, so that no address is given twice."""
        launches: list[Launch] = []

        def record(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: launches.append(Launch(kernel, grid, args, options))

        launch, JITFunction.__getitem__ = JITFunction.__getitem__, record
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        try:
            with as_on_a_gpu(), nullcontext() if self.dtype == FP32 else torch.autocast("cpu", self.dtype):
                self.run(**self.arguments)
        finally:
            JITFunction.__getitem__ = launch
        return launches


def project_inputs(
    *, tokens=64, d_model=256, d=64, heads=2, experts=4, k=2, x_dtype=FP32, weight_dtypes=(FP32,) * 4, queries=True,
    sides=2, rotated=True, dropped=False, train=True,
):  # fmt: skip
    shapes = (heads * d, d_model), (heads * d, d_model), (sides * heads, experts, d_model), (heads, experts, d_model, d)
    weights = [zeros(*shape, dtype=dtype, train=train) for shape, dtype in zip(shapes, weight_dtypes, strict=True)]
    rotation = rotary_table(torch.arange(tokens), d // 4, 1e4, FP32) if rotated else None
    mask = torch.zeros(tokens, sides * heads, experts, dtype=torch.bool) if dropped else None
    x = zeros(tokens, d_model, dtype=x_dtype, train=train)
    weights = [weights[0] if queries else None, *weights[1:]]
    q, k_, v, routings = ops.project_inputs(x, *weights, k, rotation=rotation, dropped=mask)
    backward(q, k_, v, *(routing.gates for routing in routings))


def moe_linear(
    *, tokens=64, d_in=256, d_out=64, heads=2, pools=2, experts=5, k=2, x_dtype=FP32, reduce="k", per_head=False,
    train=True,
):  # fmt: skip
    x = zeros(tokens, *([heads] if per_head else []), d_in, dtype=x_dtype, train=train)
    weight = zeros(pools, experts, d_in, d_out, train=train)
    indices = torch.zeros(tokens, heads, k, dtype=torch.int32)
    routing = Routing(zeros(tokens, heads, k, train=train), indices, experts)
    backward(ops.moe_linear(x, weight, routing, reduce=reduce))


def route(*, tokens=64, d_model=256, heads=2, experts=5, k=2, x_dtype=BF16, gating="sigmoid", dropped=False):
    mask = torch.zeros(tokens, heads, experts, dtype=torch.bool) if dropped else None
    x, weight = zeros(tokens, d_model, dtype=x_dtype), zeros(heads, experts, d_model)
    backward(ops.route(x, weight, k, gating=gating, dropped=mask).gates)


def dropout(*, width=80, x_dtype=BF16, bias=True):
    keep_mask(zeros(64, width), 0.1)
    backward(ops.relu_dropout(zeros(64, width, dtype=x_dtype), zeros(width) if bias else None, 0.1))


def relative_attention(
    *, queries=64, keys=96, d=64, heads=2, key_heads=2, causal=True, padding=False, biases=False, train=True
):  # fmt: skip
    shapes = (2, heads, queries, d), (2, key_heads, keys, d), (2, key_heads, keys, d), (heads, keys + queries - 1, d)
    q, k, v, r = (zeros(*shape, train=train) for shape in shapes)
    content, position = (zeros(heads, d, train=train) if biases else None for _ in range(2))
    mask = torch.zeros(2, keys, dtype=torch.bool) if padding else None
    out = ops.relative_attention(
        q, k, v, r, content_bias=content, position_bias=position, scale=0.1, causal=causal, key_padding_mask=mask
    )
    backward(out)


def zeros(*shape: int, dtype: torch.dtype = FP32, train: bool = True) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=train)


def backward(*outputs: Tensor | None) -> None:
    differentiable = [out for out in outputs if out is not None and out.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.zeros_like(out) for out in differentiable])


MIXED = dict(weight_dtypes=(FP32, BF16, FP16, FP32))
DENSE = dict(experts=4, k=3)  # all experts are multiplied
SLOTS = dict(experts=16, k=4, pools=1)  # too many sets of experts: rows are slots
OUTPUT = dict(reduce="heads", per_head=True, d_in=64, d_out=256)

# Shapes are the smallest that choose the kernels (E, k, tokens), tiles (d) and masks (d, d_model) to be compiled.
# What differs less is combined, because each compilation takes a tenth of a second to several.
CASES: dict[str, list[Case]] = {
    "project_inputs": [
        Case(project_inputs, stack={"_rotary_table_kernel": 48}),
        Case(
            project_inputs,
            MIXED | dict(d=41, d_model=412, experts=5, dropped=True),
            stack={"_rotary_table_kernel": 48},
        ),
        Case(project_inputs, DENSE | dict(d=76, queries=False, sides=1, rotated=False, x_dtype=FP16), FP16),
        Case(project_inputs, {}, FP32, tf32=True),
        Case(project_inputs, dict(tokens=4, train=False)),
    ],
    "moe_linear": [
        Case(moe_linear),
        Case(moe_linear, OUTPUT, stack={"_project_kernel": 56}),
        Case(moe_linear, DENSE),
        Case(moe_linear, DENSE | OUTPUT),
        Case(moe_linear, SLOTS | dict(reduce=None)),
        Case(moe_linear, SLOTS | OUTPUT, FP32, stack={"_partial_sums_kernel": 8}),
        Case(moe_linear, dict(d_in=412, d_out=41), FP16, stack={"_project_kernel": 248}),
        Case(moe_linear, dict(tokens=4, train=False)),
        Case(moe_linear, OUTPUT | dict(tokens=1, d_out=2048, heads=8, pools=8, experts=4, train=False)),
    ],
    "route and dropout": [
        Case(route),
        Case(route, dict(x_dtype=FP16, gating="softmax", dropped=True)),
        Case(route, dict(experts=64)),
        Case(route, dict(tokens=4, gating="softmax", dropped=True)),
        Case(route, dict(tokens=1, experts=64, x_dtype=FP16)),
        Case(route, dict(x_dtype=FP32), FP32, tf32=True),
        Case(dropout),
        Case(dropout, dict(x_dtype=FP32, bias=False), FP32),
    ],
    "relative_attention": [
        Case(relative_attention, stack={"query_gradient_kernel": 64}),
        Case(
            relative_attention,
            dict(d=41, key_heads=1, causal=False, padding=True, biases=True),
            FP16,
            stack={"forward_kernel": 32, "query_gradient_kernel": 72, "key_gradient_kernel": 144},
        ),
        Case(
            relative_attention,
            dict(d=112, biases=True),
            stack={"query_gradient_kernel": 744, "key_gradient_kernel": 432},
        ),
        Case(relative_attention, dict(d=76, padding=True, train=False)),
        Case(relative_attention, dict(d=128, causal=False, train=False)),
        Case(
            relative_attention,
            dict(d=16, padding=True),
            FP32,
            stack={"forward_kernel": 592, "query_gradient_kernel": 368, "key_gradient_kernel": 1376},
        ),
    ],
}


class StandIn:
    """A driver of one GPU."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compile_for(capability: int, cases: list[Case], *, once: bool) -> Iterator[Compilation]:
    """All launches of these cases, or `once` only the first of each kernel."""
    triton.runtime.driver.set_active(StandIn(capability))
    kernels: set[str] = set()
    binaries: set[int] = set()  # Triton keeps them, and returns them again
    for case in cases:
        for kernel, grid, args, options in case.launches():
            name = kernel.__name__
            if once and name in kernels:
                continue
            kernels.add(name)
            try:
                binary = kernel.warmup(*args, grid=grid, **options)
            except Exception as error:  # the front end, the passes and ptxas raise errors of different kinds
                yield Compilation(name, str(case), capability, "\n".join(map(repr_of, causes(error))))
                continue
            if id(binary) in binaries:
                continue
            binaries.add(id(binary))
            given = dict(zip(kernel.arg_names, args, strict=False)) | options
            written = written_by(kernel, {name: given[name] for name in kernel.arg_names})
            yield Compilation(
                name, str(case), capability, written=tuple(sorted(written)),
                shared=binary.metadata.shared, stack=stack_of(binary.asm["cubin"]), known_stack=case.stack.get(name, 0),
            )  # fmt: skip


def written_by(kernel: JITFunction, arguments: dict[str, Any]) -> list[str]:
    """Names of the arguments that `torch.compile` takes as written."""
    if hasattr(triton_kernel_wrap, "identify_accessed_tensors"):
        tensors = triton_kernel_wrap.identify_accessed_tensors(kernel, arguments, {})
        return [one.name for one in tensors.read_writes.writes]
    return triton_kernel_wrap.identify_mutated_tensors(kernel, arguments, {})  # until torch 2.11


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def repr_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def stack_of(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1])


def compile_what(what: str) -> Iterator[Compilation]:
    if what == "oldest":
        return compile_for(OLDEST, [case for cases in CASES.values() for case in cases], once=True)
    return compile_for(NEWEST, CASES[what], once=False)


if __name__ == "__main__":
    print(json.dumps([asdict(compilation) for compilation in compile_what(sys.argv[1])]))
