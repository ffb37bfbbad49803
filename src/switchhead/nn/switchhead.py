"""SwitchHead: few attention heads, each with experts for its projections (arXiv 2312.07987)."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from switchhead.nn.attention import (
    AuxLosses,
    Cache,
    RelativeWeights,
    average_values,
    check_input,
    check_sizes,
    merge_heads,
    query_positions,
)
from switchhead.nn.init import normal_
from switchhead.nn.linear import Linear
from switchhead.nn.moe_linear import MoELinear
from switchhead.nn.norm import QKNorm
from switchhead.nn.positions import Positions, Relative, Rotary, as_positions
from switchhead.nn.projections import (
    behind_memory,
    project_all,
    project_experts,
    project_heads,
    project_memory,
    project_output,
    require,
)
from switchhead.nn.router import Router, check_choice
from switchhead.ops.attention import SharedMask
from switchhead.ops.moe_linear import Backend
from switchhead.ops.router import Gating
from switchhead.ops.widths import aligned_width, pad_width
from switchhead.routing import Routing


class SwitchHeadAttention(nn.Module):
    """Attention whose value and output projections are mixtures of experts (equations 7-10; E experts, k chosen).

        s_S = sigmoid(x W_S),  s_D = sigmoid(x W_D)              routers of source and destination side, per head
        V_h[t] = sum_{e in topk(s_S[t, h])} s_S[t, h, e] x[t] W_V[h, e],      Q = x W_Q,  K = x W_K
        y[t]   = sum_h sum_{e in topk(s_D[t, h])} s_D[t, h, e] (A_h V_h)[t] W_O[h, e]

    No norm and no residual. Keys and values cost a cache `n_heads * 2 * d_head` numbers a token, whatever E is.

    Args:
        d_model: width of the input and output.
        n_heads: attention matrices.
        n_experts: experts E of each expert projection in each head. 1: plain projections, with one learned sigmoid gate
            per head and token on the output side where `o` is among the expert projections.
        d_head: width of queries, keys and values of a head.
        k: experts used per token, head and projection.
        positions: `None`, `"rotary"` / `Rotary(...)`, or `"relative"` / `Relative()` (projected per head, no biases).
        expert_projections: which of q, k, v, o have experts, any subset. Queries share the destination router with
            outputs, keys the source router with values.
        shared_selection: one router for both sides.
        gating: `"sigmoid"`, or `"softmax"` over the experts (the competitive ablation).
        expert_dropout: probability that an expert may not be chosen by a token, in training.
        router_threshold: dynamic k: chosen experts whose gate does not exceed it are not used; 0 uses all k.
        expert_norm_init: bring the initial experts to one norm across the expert axis, keeping their deviation.
        qk_norm: norm queries and keys in each head (see `QKNorm`).
        causal: queries see no later keys, of a `context` either: False for cross-attention.
        init_scale: multiplies initial standard deviations; a model of L layers passes `sqrt(2 / L)`.
        backend: how expert projections run, see `switchhead.ops.moe_linear`.

    Raises:
        ValueError: an argument that cannot be; the message names it.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        n_experts: int,
        d_head: int,
        k: int,
        positions: Positions | str = None,
        expert_projections: str = "vo",
        shared_selection: bool = False,
        gating: Gating = "sigmoid",
        expert_dropout: float = 0.0,
        router_threshold: float = 0.0,
        expert_norm_init: bool = False,
        qk_norm: bool = False,
        causal: bool = True,
        init_scale: float = 1.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_sizes(d_model=d_model, n_heads=n_heads, n_experts=n_experts, d_head=d_head, k=k)
        check_choice(n_experts, k, gating, expert_dropout, router_threshold)
        if sorted(expert_projections) != sorted(set(expert_projections) & set("qkvo")):
            raise ValueError(f"expert_projections={expert_projections!r} must be distinct letters out of 'qkvo'")
        self.d_model, self.n_heads, self.d_head = d_model, n_heads, d_head
        self.n_experts, self.k = n_experts, k
        self.causal, self.init_scale = causal, init_scale
        self.positions = as_positions(positions, d_head)
        possible = "qkvo" if n_experts > 1 else "o"
        self.expert_projections = experts = "".join(name for name in possible if name in expert_projections)

        def projection(name: str) -> Linear | MoELinear:
            sizes = (n_heads * d_head, d_model) if name == "o" else (d_model, n_heads * d_head)
            if name not in experts:
                return Linear(*sizes, bias=False)
            d_in, d_out = (d_head, d_model) if name == "o" else (d_model, d_head)
            return MoELinear(
                n_heads=n_heads, n_experts=n_experts, d_in=d_in, d_out=d_out, fan_in=sizes[0],
                reduce="heads" if name == "o" else "k", norm_experts=expert_norm_init, init_scale=init_scale,
                backend=backend,
            )  # fmt: skip

        def router(serves: str) -> Router | None:
            if not set(serves) & set(experts):
                return None
            return Router(
                d_model=d_model, n_heads=n_heads, n_experts=n_experts, k=k,
                gating=gating, expert_dropout=expert_dropout, threshold=router_threshold, init_scale=init_scale,
            )  # fmt: skip

        self.q_proj, self.k_proj, self.v_proj, self.o_proj = map(projection, "qkvo")
        self.shared_selection, self.router_threshold = shared_selection, router_threshold
        self.destination_router = router("qkvo" if shared_selection else "qo")
        self.source_router = None if shared_selection else router("kv")
        relative = isinstance(self.positions, Relative)
        self.position_proj = Linear(d_model, n_heads * d_head, bias=False) if relative else None
        self.qk_norm = QKNorm(d_head) if qk_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew (paper's authors' choices, see `switchhead.nn.init`)."""
        for module in self.children():
            if isinstance(module, Linear):
                normal_(module.weight, module.in_features, self.init_scale)
            elif isinstance(module, MoELinear | Router | QKNorm):
                module.reset_parameters()

    def forward(
        self,
        x: Float[Tensor, "batch T d_model"],
        *,
        context: Float[Tensor, "batch S d_model"] | None = None,
        memory: Float[Tensor, "batch M d_model"] | None = None,
        key_padding_mask: Bool[Tensor, "batch S"] | None = None,
        attn_mask: Tensor | SharedMask | None = None,
        position_ids: Int[Tensor, "*batch T"] | None = None,
        cache: Cache | None = None,
        cu_seqlens: Int[Tensor, " documents+1"] | None = None,
        return_aux: bool = False,
    ) -> Float[Tensor, "batch T d_model"] | tuple[Tensor, AuxLosses]:
        """Attend.

        Args:
            x: input; queries, and keys and values too unless `context` is given.
            context: where keys and values come from instead (cross-attention).
            memory: previous chunk, prepended to x for keys and values.
            key_padding_mask: True = ignore this key; covers all keys, memory first.
            attn_mask: `[T, S]`, `[B*H, T, S]` or `[B, 1 or H, T, S]`; boolean True = ignore, float = added to scores.
                With a cache also a `SharedMask`, see `switchhead.ops.share_mask`.
            position_ids: positions of x for rotary channels; default: x follows its memory.
            cache: keys and values of earlier calls. With a cache, a given `attn_mask` alone says what may be seen.
            cu_seqlens: several documents in a row, none of which sees another: where they begin in the flattened
                batch, from `switchhead.ops.document_boundaries`.
            return_aux: return auxiliary losses by name too; this layer has none.

        Returns:
            `[B, T, d_model]`; zeros for a query that may see nothing.
        """
        check_input(x, self.d_model, context, memory)
        positions = self.positions
        if self._projects_at_once and context is None:
            rotation = None
            if isinstance(positions, Rotary) and self.qk_norm is None and memory is None:
                where = query_positions(x, position_ids, cached=cache is not None)
                rotation, positions = positions.table(where, self.d_head, x.dtype), None
            q, k, v, to = self._project_at_once(x, rotation)  # [B, H, T, d]
        else:
            q, k, v, to = self._project(x, context)
        if memory is not None:  # apart: it asks for no queries and, as a rule, for no gradient
            k, v = behind_memory(self._project_memory(memory.to(x.dtype)), (k, v))  # [B, H, S, d]
        relative = None if self.position_proj is None else RelativeWeights(self.position_proj)
        y = average_values(
            q, k, v, d_head=self.d_head, causal=self.causal, positions=positions, relative=relative,
            qk_norm=self.qk_norm, crossed=context is not None, key_padding_mask=key_padding_mask, attn_mask=attn_mask,
            position_ids=position_ids, cache=cache, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        rows = merge_heads(y)  # [B*T, H, d]
        if isinstance(self.o_proj, MoELinear):
            assert to is not None
            out = project_experts(rows, self.o_proj, to)[:, : self.d_model]
        else:
            out = project_output(rows, self.o_proj, self.d_head)
        out = out.unflatten(0, x.shape[:2])  # [B, T, D]
        return (out, {}) if return_aux else out

    @property
    def _projects_at_once(self) -> bool:
        """Whether all that is made of the same tokens is one operation (`ops.project_inputs`), which is faster."""
        return self.expert_projections.strip("o") == "v" and self.router_threshold == 0  # it takes gates as they are

    def _project_at_once(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Routing]:
        """`_project` of tokens that are their own source."""
        queries, keys, values = (
            require(self.q_proj, Linear),
            require(self.k_proj, Linear),
            require(self.v_proj, MoELinear),
        )
        routers = [router for router in (self.destination_router, self.source_router) if router is not None]
        (q, k, v), routings = project_all(x, queries, keys, routers, values, rotation)
        return q, k, v, routings[0]

    def _project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Routing | None]:
        """Queries, keys and values `[B, H, T or S, d]`, and the routing of the destination side."""
        x = pad_width(x, aligned_width(self.d_model, x.device))
        source = x if context is None else pad_width(context, x.shape[-1])
        to = self.destination_router and self.destination_router(x.flatten(0, 1))
        if self.shared_selection and context is None:
            origin = to
        else:
            router = self._origin_router
            origin = router and router(source.flatten(0, 1))
        q, k, v = self.q_proj, self.k_proj, self.v_proj
        return self._heads(q, x, to), self._heads(k, source, origin), self._heads(v, source, origin), to

    def _project_memory(self, memory: Tensor) -> Sequence[Tensor]:
        """Keys and values `[B, H, M, d]` of a previous chunk. Hooks of routers do not see its tokens again."""
        router = self._origin_router
        if self._projects_at_once:
            assert router is not None
            return project_memory(memory, require(self.k_proj, Linear), router, require(self.v_proj, MoELinear))
        memory = pad_width(memory, aligned_width(self.d_model, memory.device))
        origin = router and router.choose(memory.flatten(0, 1))
        return [self._heads(projection, memory, origin) for projection in (self.k_proj, self.v_proj)]

    @property
    def _origin_router(self) -> Router | None:
        return self.destination_router if self.shared_selection else self.source_router

    def _heads(
        self, projection: Linear | MoELinear, x: Tensor, routing: Routing | None
    ) -> Float[Tensor, "batch heads T d"]:
        if isinstance(projection, Linear):
            return project_heads(x, (projection,), self.d_head)[0]
        assert routing is not None
        return project_experts(x.flatten(0, 1), projection, routing).unflatten(0, x.shape[:2]).transpose(1, 2)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return (
            f"d_model={self.d_model}, n_heads={self.n_heads}, n_experts={self.n_experts}, d_head={self.d_head}, "
            f"k={self.k}, expert_projections={self.expert_projections!r}, positions={self.positions}"
        )
