"""Imports go one way, and the core needs nothing beyond torch, numpy, safetensors and jaxtyping."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import switchhead

PACKAGE = Path(switchhead.__file__).parent

# What each part may import besides itself. Everything may import `errors`; the command line may import everything.
ARROWS = {
    "__init__": {"nn", "ops", "routing"},
    "errors": set(),
    "routing": set(),
    "ops": {"routing"},
    "nn": {"ops", "routing"},
    "hf": {"nn", "ops", "routing"},
    "convert": {"nn", "ops", "routing"},
    "accounting": {"hf", "nn", "ops"},
    "data": set(),
    "runs": {"data", "hf"},
    "eval": {"data", "hf", "runs"},
    "train": {"accounting", "data", "eval", "hf", "nn", "ops", "routing", "runs"},
    "recipes": {"accounting", "hf", "train"},
    "search": {"accounting", "hf", "recipes", "runs", "train"},
    "bench": {"accounting", "data", "hf", "nn", "ops", "routing", "train"},
    "demo": {"accounting", "data", "eval", "hf", "recipes", "train"},
    "doctor": {"__init__", "ops", "routing"},
    "__main__": {"cli"},
}
EXTERNAL = {
    "torch": set(ARROWS),
    "numpy": set(ARROWS),
    "safetensors": set(ARROWS),
    "jaxtyping": set(ARROWS),
    "triton": {"ops"},
    "transformers": {"hf", "eval", "data"},
    "tokenizers": {"data"},
    "sentencepiece": {"data"},
    "datasets": {"data", "eval"},
    "lm_eval": {"eval"},
    "huggingface_hub": {"data"},
    "pyarrow": {"data"},
    "zstandard": {"data"},
    "tqdm": {"eval"},
    "tyro": {"cli"},
    "rich": {"train", "demo"},
    "tensorboard": {"train"},
    "matplotlib": {"accounting", "demo", "search"},
}


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(file: Path) -> set[str]:
    """Every module that a file imports, at any depth, for types too."""
    package = ["switchhead", *file.relative_to(PACKAGE).parent.parts]
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            # `from switchhead import nn` imports a part, `from switchhead.nn import Router` something of it.
            modules.update(f"{source}.{alias.name}" if source == "switchhead" else source for alias in node.names)
    return modules


FILES = sorted(PACKAGE.rglob("*.py"))
PARTS = {part_of(file) for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(file):
    part = part_of(file)
    for module in imported_modules(file):
        top, _, rest = module.partition(".")
        if top == "switchhead":
            imported = rest.split(".")[0]
            if imported not in PARTS:
                imported = "__init__"  # the package itself, or a public name of it
            allowed = ARROWS.get(part, set(ARROWS)) | {part, "errors"}
            assert imported in allowed, f"{part} may not import switchhead.{imported}"
        elif top not in sys.stdlib_module_names:
            assert part in EXTERNAL.get(top, set()), f"{part} may not import {top}"


def test_every_part_has_its_arrows():
    assert not PARTS - ARROWS.keys() - {"cli"}


def test_the_package_imports_and_computes_without_optional_packages():
    script = """
import sys, torch
optional = {"transformers", "triton", "tyro", "rich", "tensorboard", "matplotlib"}
before = set(sys.modules)
import switchhead
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} & optional
assert not loaded, loaded
sys.modules.update(dict.fromkeys(optional))  # from here on as if they were not installed
layer = switchhead.SwitchHeadAttention(d_model=16, n_heads=2, n_experts=3, d_head=8, k=2, positions="rotary")
layer(torch.randn(1, 5, 16)).sum().backward()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
