"""What hardware for structured sparsity would gain where a token chooses two of four experts.

    python benchmarks/kernels/sparsity.py

A head's rows, written once for each expert and zero for those not chosen, have two zeros in every four numbers if the
experts' columns alternate: the pattern that tensor cores multiply at twice the rate. cuSPARSELt's product of such rows
beside cuBLAS's of the same rows with their zeros, and what cuSPARSELt takes to bring them into its own layout.
"""

import torch

from switchhead.bench.timing import graph_ms

TOKENS = 32768
aten = torch.ops.aten
SHAPES = {"262m": (4, 112, 1024), "1.3b": (8, 104, 2048)}  # heads, their width, d_model


def rows_of_two_in_four(heads: int, d: int) -> torch.Tensor:
    """Random `[N, H * d * E]`, the experts' columns alternating."""
    rows = torch.randn(TOKENS, heads, d, 4, device="cuda", dtype=torch.bfloat16)
    chosen = torch.rand(TOKENS, heads, 1, 4, device="cuda").topk(2, -1).indices.expand(-1, -1, d, -1)
    return (rows * torch.zeros_like(rows).scatter_(-1, chosen, 1.0)).flatten(1)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/kernels/sparsity.py times a CUDA device, and there is none here")
    torch.manual_seed(0)
    print("| layer | cuBLAS ms | cuSPARSELt ms | bringing rows into its layout ms |\n|---|---|---|---|")
    for name, (heads, d, d_model) in SHAPES.items():
        rows = rows_of_two_in_four(heads, d)
        weight = torch.randn(rows.shape[1], d_model, device="cuda", dtype=torch.bfloat16) / rows.shape[1] ** 0.5
        compressed = aten._cslt_compress(rows)
        best = aten._cslt_sparse_mm_search(compressed, weight)
        found, expected = aten._cslt_sparse_mm(compressed, weight, alg_id=best).float(), (rows @ weight).float()
        assert (found - expected).norm() < 0.01 * expected.norm()
        dense = graph_ms(lambda rows=rows, weight=weight: rows @ weight)
        sparse = graph_ms(lambda c=compressed, w=weight, a=best: aten._cslt_sparse_mm(c, w, alg_id=a))
        compress = graph_ms(lambda rows=rows: aten._cslt_compress(rows))
        print(f"| {name} | {dense:.3f} | {sparse:.3f} | {compress:.3f} |", flush=True)


if __name__ == "__main__":
    main()
