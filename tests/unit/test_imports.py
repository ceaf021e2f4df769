"""Dependencies point one way."""

import ast
from pathlib import Path

import k3jax
import sharding

ROOT = Path(k3jax.__file__).parent
SHARDING = Path(sharding.__file__).parent

# package or module of k3jax -> what it may import from k3jax
ALLOWED = {
    "errors": set(),
    "quantization": {"errors"},
    "ops": {"ops", "quantization", "errors"},
    "config": {"config_hf", "config_rules", "config_write", "errors"},
    "config_hf": {"config", "config_rules", "errors"},
    "config_rules": {"config", "errors"},
    "config_write": {"config", "config_rules", "errors"},
    "cache": {"config", "ops", "errors"},
    "layers": {"config", "cache", "ops", "quantization", "layers", "errors"},
    "model": {"config", "cache", "layers", "errors"},
    "runtime": {"config", "cache", "model", "programs", "errors"},
    "checkpoint": {"config", "checkpoint", "quantization", "errors"},
    "tokenizer": {"config", "errors"},
    "vision": {"config", "checkpoint", "layers", "vision", "errors"},
    "programs": {"config", "cache", "model", "errors"},
    "experts": {"config", "model", "errors"},
    "loading": {
        "config", "checkpoint", "experts", "model", "programs", "runtime", "tokenizer", "vision",
        "errors",
    },
    "plan": {"config", "cache", "model", "programs", "plan", "vision", "errors"},
    "generate": {"config", "generate", "runtime", "tokenizer", "vision", "errors"},
}  # fmt: skip


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "k3jax":
                yield from (f"k3jax.{a.name}" for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names)


def test_direction_of_imports():
    wrong = []
    for path in ROOT.rglob("*.py"):
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if package not in ALLOWED:
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] in ("torch", "transformers"):
                wrong.append(f"{path.name} imports {name}")
            if parts[0] == "k3jax" and len(parts) > 1:
                used = parts[1]
                if used != package and used not in ALLOWED[package]:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_layouts_know_no_model_and_ops_no_layout():
    found = {path.name: set(imports(path)) for path in SHARDING.rglob("*.py")}
    assert len(found) > 5
    assert not {f for f, names in found.items() if any(n.split(".")[0] == "k3jax" for n in names)}
    for path in (ROOT / "ops").rglob("*.py"):
        assert not any(n.split(".")[0] == "sharding" for n in imports(path)), path


def test_files_stay_short():
    """400 lines, 700 for a kernel."""
    long = {}
    for path in [*ROOT.rglob("*.py"), *SHARDING.rglob("*.py")]:
        lines = len(path.read_text().splitlines())
        if lines > (700 if path.name.startswith("mosaic_") else 400):
            long[str(path.relative_to(ROOT))] = lines
    assert not long
