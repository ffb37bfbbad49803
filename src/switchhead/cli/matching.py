"""`switchhead match`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from switchhead.cli.common import Json, UsageError, arguments_of_the_user, find_recipe, print_json, table

if TYPE_CHECKING:
    from switchhead.accounting import Convention
    from switchhead.hf import SwitchHeadConfig
    from switchhead.recipes import Recipe


def match(
    dense: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DENSE", help="the recipe to be matched")],
    /,
    *,
    heads: tuple[int, ...],
    experts: int,
    k: int,
    by: Literal["parameters", "macs"] = "parameters",
    convention: Literal["all", "consistent", "published", "executed"] = "all",
    grain: int = 4,
    expert_projections: str = "vo",
    as_json: Json = False,
) -> None:
    """Size SwitchHead models to equal a dense recipe in parameters, or in attention's multiply-accumulates.

    Prints the head width and feed-forward width found, and beside them the paper's model of the same heads and experts.
    By parameters, heads are as wide as fit beside the dense model's feed-forward, which then takes what is left. By
    multiply-accumulates, heads are as wide as the budget allows, and the feed-forward stays.

    Args:
        heads: heads of the SwitchHead model; several give several models.
        experts: experts of a projection and head, E.
        k: experts that a token uses.
        by: what is to be equal.
        convention: how multiply-accumulates are counted when they are to be equal; by default one model for each.
        grain: the head width is a multiple of it.
        expert_projections: which of q, k, v, o have experts.
    """
    target = find_recipe(dense)
    if target.model.attention != "mha":
        raise UsageError(f"{dense} is not dense; match against its twin, whose attention is mha")
    if not heads:
        raise UsageError("--heads needs a number, or several")
    if by == "parameters" and convention != "all":
        raise UsageError("--convention has no effect on parameters; leave it out, or use --by macs")
    rows, dense_row = [], _row(target.name, target.model, target)
    with arguments_of_the_user():
        for n_heads in heads:
            start = target.with_model(
                attention="switchhead",
                num_key_value_heads=None,
                num_attention_heads=n_heads,
                num_experts=experts,
                num_experts_per_tok=k,
                expert_projections=expert_projections,
            )
            models = _matched(start, dense_row, by=by, convention=convention, grain=grain)
            models |= {paper.name: paper.model for paper in _papers_choices(start, target)}
            rows += [_row(name, model, target, dense_row) for name, model in models.items()]
    if as_json:
        print_json(rows)
        return
    rows.insert(0, dense_row)
    columns = ("heads", "experts", "k", "head_dim", "intermediate_size", "parameters", "parameter_deviation")
    lines = [
        (
            row["name"],
            *("" if row[column] is None else str(row[column]) for column in columns[:5]),
            f"{row['parameters']:,}",
            f"{100 * row['parameter_deviation']:+.3f} %",
            *(f"{100 * row[f'macs_ratio_{name}']:.1f}" for name in ("published", "consistent", "executed")),
        )
        for row in rows
    ]
    header = ("model", "heads", "E", "k", "d_head", "d_ff", "parameters", "deviation")
    header += ("published", "consistent", "executed")
    print(table(header, lines, right_aligned=range(1, 11)))
    print(f"\nThe last three columns: attention's multiply-accumulates in percent of {dense}'s, counted in three ways.")


def _matched(
    start: Recipe, dense: dict[str, Any], *, by: str, convention: Convention | Literal["all"], grain: int
) -> dict[str, SwitchHeadConfig]:
    from switchhead.accounting import CONVENTIONS, match_macs, match_parameters

    if by == "parameters":
        return {"matched parameters": match_parameters(start.model, parameters=dense["parameters"], grain=grain)}
    conventions = CONVENTIONS if convention == "all" else (convention,)
    counting = {"chunk_length": start.training.chunk_length, "grain": grain}
    return {
        f"matched MACs, {name}": match_macs(start.model, macs=dense[f"macs_{name}"], convention=name, **counting)
        for name in conventions
    }


def _papers_choices(start: Recipe, target: Recipe) -> list[Recipe]:
    """The paper's models of these heads and experts beside this dense model."""
    from switchhead.recipes import compare_with_paper, get_recipe

    def shape(model: SwitchHeadConfig) -> tuple[object, ...]:
        experts = (model.num_experts, model.num_experts_per_tok, model.expert_projections, model.shared_selection)
        return (model.attention, model.feed_forward, model.num_attention_heads, *experts)

    recipes = [get_recipe(row.name) for row in compare_with_paper() if row.dense_twin == target.name]
    return [recipe for recipe in recipes if shape(recipe.model) == shape(start.model)]


def _row(name: str, model: SwitchHeadConfig, target: Recipe, dense: dict[str, Any] | None = None) -> dict[str, Any]:
    """A model beside the row of the dense one, by default itself."""
    from switchhead.accounting import CONVENTIONS, attention_cost, count_parameters

    parameters, chunk_length = count_parameters(model).total, target.training.chunk_length
    counts = {"parameters": parameters} | {
        f"macs_{convention}": attention_cost(model, chunk_length=chunk_length, convention=convention).macs
        for convention in CONVENTIONS
    }
    dense = dense or counts
    ratios = {}
    for convention in CONVENTIONS:
        ratios[f"macs_{convention}"] = counts[f"macs_{convention}"]
        ratios[f"macs_ratio_{convention}"] = counts[f"macs_{convention}"] / dense[f"macs_{convention}"]
    return {
        "name": name,
        "heads": model.num_attention_heads,
        "experts": model.num_experts,
        "k": model.num_experts_per_tok,
        "head_dim": model.head_dim,
        "intermediate_size": None if "intermediate_size" in model.fields_without_effect else model.intermediate_size,
        "parameters": parameters,
        "parameter_deviation": parameters / dense["parameters"] - 1,
        **ratios,
    }
