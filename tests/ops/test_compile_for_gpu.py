"""Every Triton kernel is compiled for GPUs, without one: its interpreter lets pass what a GPU's compiler refuses."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from switchhead import ops

triton = pytest.importorskip("triton")
from tests.ops import compile_for_gpu  # noqa: E402

# What each kernel writes; one that has two uses has two sets. `torch.compile` copies whatever else it takes as written.
WRITES = {
    "_accumulate_kernel": ({"out_ptr"},),
    "_add_chunks_kernel": ({"out_ptr"},),
    "_combine_experts_kernel": ({"out_ptr", "kept_ptr", "dots_ptr"},),
    "_count_kernel": ({"keys_ptr", "counts_ptr"},),
    "_decode_kernel": ({"out_ptr"},),
    "_grad_weight_kernel": ({"partial_ptr"},),
    "_grad_x_kernel": ({"grad_x_ptr"},),
    "_keep_mask_kernel": ({"mask_ptr"},),
    "_move_kernel": ({"stacked_ptr"}, {"first_ptr", "second_ptr", "values_ptr", "scores_ptr"}),
    "_partial_sums_kernel": ({"partial_ptr"},),
    "_place_kernel": ({"order_ptr", "offsets_ptr", "tiles_ptr"},),
    "_prepare_weight_kernel": ({"out_ptr"},),
    "_project_kernel": ({"out_ptr", "kept_ptr", "dots_ptr"},),
    "_relu_dropout_backward_kernel": ({"grad_x_ptr", "sums_ptr"},),
    "_relu_dropout_kernel": ({"out_ptr"},),
    "_rotary_table_kernel": ({"cos_ptr", "sin_ptr"},),
    "_rotate_heads_kernel": ({"out_ptr", "second_out_ptr"},),
    "_route_few_kernel": ({"gates_ptr", "indices_ptr", "probabilities_ptr"},),
    "_route_kernel": ({"gates_ptr", "indices_ptr", "probabilities_ptr"},),
    "_scale_rows_kernel": ({"rows_ptr", "dots_ptr"},),
    "_score_grads_kernel": ({"score_grads_ptr"},),
    "_split_weight_kernel": ({"parts_ptr"},),
    "_spread_rows_kernel": ({"out_ptr", "dots_ptr"},),
    "forward_kernel": ({"out_ptr", "lse_ptr"},),
    "key_gradient_kernel": ({"grad_k_ptr", "grad_v_ptr"},),
    "position_gradient_kernel": ({"grad_r_ptr"},),
    "query_gradient_kernel": ({"delta_ptr", "grad_p_ptr", "grad_q_ptr", "grad_u_ptr"},),
}
# Bytes of shared memory that a program may have (CUDA C++ programming guide, compute capabilities). 8.6 and 8.9 have
# less than 8.0, and run what is compiled the same way.
SHARED = {80: 99 * 1024, 90: 227 * 1024}


def compiler_obstacle() -> str | None:
    try:
        return None if triton.knobs.nvidia.ptxas and triton.knobs.nvidia.cuobjdump else "Triton has no compiler"
    except RuntimeError as error:
        return str(error)


pytestmark = pytest.mark.skipif(compiler_obstacle() is not None, reason=f"{compiler_obstacle()}")


@pytest.mark.slow
@pytest.mark.parametrize("name", compile_for_gpu.CASES)
def test_launches_compile_for_a_gpu_and_write_only_results(name, tmp_path):
    assert_sound(compilations(name, tmp_path))


@pytest.mark.slow
def test_each_kernel_in_the_sources_compiles_for_the_oldest_gpu(tmp_path):
    found = compilations("oldest", tmp_path)
    assert {one["kernel"] for one in found} == kernels_in_sources(), "cases in compile_for_gpu.py launch every kernel"
    assert_sound(found)


def compilations(what: str, cache: Path) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, compile_for_gpu.__file__, what]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def assert_sound(found: list[dict]) -> None:
    faults = [f"{one['kernel']} of {one['case']}: {fault}" for one in found if (fault := fault_of(one))]
    assert not faults, "\n\n".join(faults)


def fault_of(one: dict) -> str | None:
    if one["error"]:
        return f"does not compile for capability {one['capability']}:\n{one['error']}"
    writes = WRITES.get(one["kernel"], ())
    if not any(set(one["written"]) <= results for results in writes):
        return f"torch.compile takes {one['written']} as written; WRITES says {writes}"
    if one["shared"] > SHARED[one["capability"]]:
        return f"takes {one['shared']} bytes of shared memory, of {SHARED[one['capability']]}"
    if one["capability"] == compile_for_gpu.NEWEST and one["stack"] > one["known_stack"]:
        return f"spills: {one['stack']} bytes of stack, where {one['known_stack']} were known"
    return None


def kernels_in_sources() -> set[str]:
    """Functions that Triton compiles and that no other calls."""
    compiled, called = set(), set()
    for file in Path(ops.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                compiled.add(node.name)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.add(node.func.id)
    return compiled - called
