"""The rules of the house that a reviewer would otherwise have to remember."""

from __future__ import annotations

import ast
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    "schemas",
    "bus",
    "actors",
    "ops",
    "cli",
)  # each may import itself and those before it
LINES_MAX = 500

# Who may speak to NATS: the connection under the JetStream adapter, and the benchmark that is held against the client.
NATS = {"bus/connection.py", "bus/jetstream.py", "bus/publish.py", "bus/pull.py", "ops/bench_objects.py"}
# Who may import torch when imported: the mathematics, the engine, and what the fork server loads for all children.
TORCH = {
    "actors/rollout/kv_cache.py", "actors/rollout/load_weights.py", "actors/rollout/sampling.py",
    "actors/rollout/torch_engine.py", "actors/rollout/vllm_worker.py",
    "actors/trainer/checkpoint.py", "actors/trainer/corrections.py", "actors/trainer/critic.py",
    "actors/trainer/forward.py", "actors/trainer/kl.py", "actors/trainer/learner.py",
    "actors/trainer/losses/__init__.py", "actors/trainer/losses/base.py", "actors/trainer/losses/cispo.py",
    "actors/trainer/losses/gspo.py", "actors/trainer/losses/ppo.py", "actors/trainer/losses/reinforce.py",
    "actors/trainer/losses/sapo.py", "actors/trainer/lora.py", "actors/trainer/m2po.py", "actors/trainer/objective.py",
    "actors/trainer/opsm.py", "actors/trainer/optimizer.py", "actors/trainer/plan.py", "actors/trainer/proximal.py",
    "actors/trainer/reference.py", "actors/trainer/sequences.py", "actors/trainer/sft.py", "actors/trainer/tally.py",
    "actors/trainer/torch_ranks.py", "actors/trainer/value_loss.py", "actors/trainer/zero.py",
    "ops/live_memory.py", "ops/preload.py",
}  # fmt: skip
LIGHT_BESIDE_ENGINES = {
    "actors/rollout/actor.py", "actors/rollout/config.py", "actors/rollout/engine.py", "actors/trainer/config.py",
    "actors/trainer/advantages.py", "actors/trainer/aggregation.py", "actors/trainer/credit.py",
    "actors/trainer/gae.py", "actors/trainer/metrics.py", "actors/trainer/outline.py",
    "actors/trainer/overlong.py", "actors/trainer/own.py", "actors/trainer/presets.py", "actors/trainer/process.py",
    "actors/trainer/ranks.py", "actors/trainer/samples.py", "actors/trainer/sections.py",
}  # fmt: skip
HEAVY = ("torch", "transformers", "safetensors")


@dataclasses.dataclass(frozen=True)
class Import:
    """An import in a file: of which module, at which line, and whether it happens when the file is imported."""

    module: str
    line: int
    at_once: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def sources() -> list[Path]:
    files = [path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")]
    return sorted([*files, *(ROOT / "recipes").glob("*.py"), *ROOT.glob("cli*.py")])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> list[Import]:
    return list(_imports(ast.parse(path.read_text(encoding="utf-8")), at_once=True))


def _imports(node: ast.AST, at_once: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_once) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield Import(child.module or "", child.lineno, at_once)
        else:
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            never = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(child, at_once and not later and not never)


def test_imports_go_one_way() -> None:
    """schemas ← bus ← actors ← ops ← cli: a lower layer that knows a higher one cannot be used alone."""
    wrong = [
        f"{name_of(path)}:{imported.line} imports {imported.module}"
        for path in sources()
        if (layer := name_of(path).partition("/")[0].removesuffix(".py")) in LAYERS
        for imported in imports_of(path)
        if imported.top in LAYERS and LAYERS.index(imported.top) > LAYERS.index(layer)
    ]
    assert wrong == []


def test_a_recipe_needs_nothing_of_ours_but_the_schemas() -> None:
    """People copy these files: they must not lean on our inside."""
    wrong = [
        f"{name_of(path)}:{imported.line} imports {imported.module}"
        for path in (ROOT / "recipes").glob("*.py")
        for imported in imports_of(path)
        if imported.top in LAYERS and imported.top != "schemas"
    ]
    assert wrong == []


def test_only_the_jetstream_adapter_speaks_to_nats() -> None:
    """Everything else goes through the port, or the in-memory bus could not stand in."""
    wrong = {name_of(path) for path in sources() for imported in imports_of(path) if imported.top == "nats"} - NATS
    assert wrong == set()


def test_imports_name_their_module_in_full() -> None:
    """Relative imports would hide from the rules above in which layer a module lies."""
    relative = [
        name_of(path)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_heavy_packages_are_imported_at_once_only_where_they_are_the_point() -> None:
    """torch costs seconds and 200 MB a process; a controller or a `status` must not pay for it."""
    at_once = {
        name_of(path)
        for path in sources()
        for imported in imports_of(path)
        if imported.at_once and imported.top in HEAVY
    }
    assert at_once - TORCH == set()


def test_light_modules_stay_light_through_all_that_they_import() -> None:
    """What a module imports counts, however indirectly: asked in a fresh interpreter, module by module.

    Of rollout and trainer only what others import: the rest is their engine.
    """
    modules = [
        name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in sources()
        if name_of(path) not in TORCH
        and (path.parent.name not in ("rollout", "trainer") or name_of(path) in LIGHT_BESIDE_ENGINES)
    ]
    code = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "    if heavy: print(json.dumps([name, heavy])); break\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout, "imports {1}, through what it imports: {0}".format(*json.loads(done.stdout))


@pytest.mark.parametrize("folder", ["schemas", "bus", "actors", "ops", "recipes", "tests", "."])
def test_a_file_can_be_read_in_one_sitting(folder: str) -> None:
    """Beyond this, a file has two subjects."""
    found = (ROOT / folder).glob("*.py") if folder == "." else (ROOT / folder).rglob("*.py")
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in found}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > LINES_MAX} == {}


def test_a_remedy_is_written_in_one_place() -> None:
    """Or one of them is mended and the other still leads astray. What has four words, as "Name another file.", may."""
    written: dict[str, list[str]] = {}
    remedies: set[str] = set()
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and (text := template_of(node)):
                written.setdefault(text, []).append(f"{name_of(path)}:{node.lineno}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in REMEDIED and len(node.args) > 1:
                remedies.add(template_of(node.args[1]))
    several = {text: written[text] for text in remedies if len(text.split()) > 4 and len(written[text]) > 1}
    assert len(remedies) > 100
    assert several == {}


REMEDIED = ("UserError", "BadRow", "FunctionNotFound")


def template_of(node: ast.expr) -> str:
    """A text, with {} where values come in; empty if it is none."""
    if isinstance(node, ast.JoinedStr):
        return "".join(template_of(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
