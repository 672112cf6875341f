"""Who may import whom. The table below is the one that counts: widen it on purpose, with the change that needs it."""

import ast
import dataclasses
import subprocess
import sys

import pytest
from helpers.source_tree import PACKAGES, Source, sources

HOST_CACHE = ("cache.layout", "cache.block_manager", "cache.prefix_cache")
MODEL_READERS = ("models.config_fields", "models.registry", "models.hf_config", "models.gguf_config")
OPS_SEE = (
    *("errors", "config", "models.config", "models.params", "quantization", "cache.layout", "cache.kv_cache"),
    *("step_io", "controls", "ops"),
)
ARRAYS = ("errors", "config", "models.config", "models.params", "quantization", "cache.layout", "cache.kv_cache")
ENGINE_SEES = (
    "histogram",
    *("engine", "scheduler", "models", "ops", "cache", "step_io", "outputs", "request", "controls", "config", "errors"),
)
DOORS_SEE = (
    "engine",
    "text",
    "checkpoint",
    "quantization",
    "models",
    "outputs",
    "request",
    "structured_outputs",
    "controls",
    "config",
    "errors",
    "client.interrupts",
    "client.local_client",
    "client.submission",
    "client.prompts",
    "client.continuations",
    "progress",
    "convert",
    "quantize",
    "describe",
    "loading",
    "llm",
    "functional",
)

# module or package of photon_jax -> what of photon_jax it may import, what else; the longest name that fits decides
RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "errors": ((), ()),
    "histogram": ((), ()),
    "config": (("errors",), ("numpy",)),
    "controls": (("errors",), ("numpy",)),
    "structured_outputs": (("errors",), ()),
    "request": (("errors", "controls", "structured_outputs"), ()),
    "outputs": (("request",), ("numpy",)),
    "text": (("errors", "request", "text"), ("tokenizers", "jinja2")),
    "text.grammar": (("errors", "controls", "structured_outputs", "text"), ("numpy", "llguidance")),
    "text.tool_grammar": (("errors", "structured_outputs", "text"), ()),
    **dict.fromkeys(HOST_CACHE, (("errors", "config", *HOST_CACHE), ("numpy",))),
    "scheduler": (("errors", "config", "outputs", "request", "controls", "scheduler", *HOST_CACHE), ("numpy",)),
    "step_io": ((), ("numpy",)),
    "models.config": (("errors",), ()),
    **dict.fromkeys(MODEL_READERS, (("errors", "models.config", *MODEL_READERS), ("numpy",))),
    "models.params": (ARRAYS, ("jax",)),
    "quantization": (ARRAYS, ("jax",)),
    **dict.fromkeys(("quantization.calibrate", "quantization.report"), ((*ARRAYS, "models", "ops"), ("jax", "numpy"))),
    "cache.kv_cache": (ARRAYS, ("jax",)),
    "ops": ((*OPS_SEE, "pallas_kernels"), ("jax", "numpy")),
    "models": ((*OPS_SEE, "models"), ("jax",)),
    "models.check_params": (("models.params", "errors"), ("jax", "numpy")),
    "checkpoint": (
        ("models", "quantization", "errors", "checkpoint"),
        ("jax", "numpy", "ml_dtypes", "safetensors", "orbax", "flax", "gguf", "huggingface_hub"),
    ),
    "engine.buckets": (("scheduler", "step_io", "cache.layout", "config", "errors"), ("numpy",)),
    "engine.foresight": (("engine.buckets", "engine.stand_ins", "cache.layout", "request", "step_io"), ()),
    "engine.input_builder": (
        ("scheduler", "step_io", "cache.layout", "config", "errors", "engine.buckets", "engine.slot_table"),
        ("numpy",),
    ),
    "engine.slot_table": (("scheduler", "step_io", "config", "errors"), ("numpy",)),
    "engine.multi_step": (("step_io",), ("jax",)),
    "engine.step": (("models", "ops", "quantization", "cache.kv_cache", "step_io", "config", "engine"), ("jax",)),
    "engine.token_masks": (("scheduler",), ("jax", "numpy")),
    "engine": (ENGINE_SEES, ("jax", "numpy")),
    "client.submission": (("text", "outputs", "request", "errors"), ("numpy",)),
    "client.garbage": ((), ()),
    "client.updates": (("client.submission", "outputs"), ("numpy",)),
    "client.interrupts": ((), ()),
    "client.local_client": (
        (
            "engine",
            "client.garbage",
            "client.interrupts",
            "client.submission",
            "text",
            "models.params",
            "histogram",
            "outputs",
            "request",
            "controls",
            "errors",
        ),
        ("numpy",),
    ),
    "client.stats": (("client.local_client",), ()),
    "client.late_programs": (("client.submission", "engine", "step_io"), ()),
    "client.async_llm": (
        (
            "llm",
            "client.garbage",
            "client.interrupts",
            "client.late_programs",
            "client.local_client",
            "client.stats",
            "client.submission",
            "client.updates",
            "outputs",
            "request",
            "step_io",
            "errors",
        ),
        (),
    ),
    "client.prompts": (("client.submission", "text", "request", "errors"), ()),
    "client.continuations": (("client.submission", "client.prompts", "text", "errors"), ()),
    "progress": (("client.submission", "errors"), ("tqdm",)),
    "convert": (("checkpoint", "text", "models", "progress", "errors"), ()),
    "quantize": (
        ("checkpoint", "text", "models", "quantization", "progress", "convert", "errors"),
        ("jax", "numpy"),
    ),
    "loading": (("checkpoint", "models", "quantization", "progress", "config", "errors"), ("jax", "numpy")),
    "describe": (("checkpoint", "text", "models", "quantization", "cache", "config", "errors"), ("jax",)),
    "functional": (DOORS_SEE, ("jax", "numpy", "tqdm")),
    "llm": (DOORS_SEE, ("jax", "numpy", "tqdm")),
    "server": (
        (
            *(
                "client.async_llm",
                "llm",
                "client.prompts",
                "client.stats",
                "client.submission",
                "client.updates",
                "progress",
                "engine.metrics",
                "step_io",
                "text",
            ),
            *("outputs", "request", "structured_outputs", "controls", "histogram", "errors", "server", ""),
        ),
        ("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "typing_extensions", "numpy"),
    ),
    "bench.workloads": (("errors",), ("numpy",)),
    "bench.shapes": (("models", "errors"), ("jax",)),
    "bench.decode_parts": (("bench.decode", "engine", "models", "ops", "cache.kv_cache", "step_io"), ("jax",)),
    "bench": (
        (*DOORS_SEE, "client.async_llm", "scheduler", "step_io", "bench", ""),
        ("aiohttp", "jax", "numpy", "matplotlib"),
    ),
    "evals": (
        ("evals", "describe", "llm", "models", "outputs", "request", "text", "config", "errors"),
        ("jax", "numpy", "tqdm"),
    ),
    "evals.harness": (("errors",), ("lm_eval",)),
    "cli": ((*DOORS_SEE, "client.async_llm", "bench", "server", "evals", "cli", ""), ("absl", "jax", "numpy")),
}
# Importing these must not import JAX, also through others.
HOST_ONLY = (
    *(
        "errors",
        "histogram",
        "config",
        "controls",
        "structured_outputs",
        "request",
        "outputs",
        "text",
        "scheduler",
        *HOST_CACHE,
    ),
    *("engine.buckets", "engine.input_builder", "engine.slot_table"),
)
KERNEL_LIBRARIES = ("jax", "numpy")


@dataclasses.dataclass(frozen=True)
class Import:
    module: str
    line: int
    for_types: bool  # under `if TYPE_CHECKING:`


def imports_of(source: Source) -> list[Import]:
    """Returns every import of a file, with `from package import name` as package.name where that is a module."""
    modules = {other.module for other in sources(*PACKAGES)}
    typing_blocks = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    ]
    typing_nodes = {id(node) for block in typing_blocks for statement in block.body for node in ast.walk(statement)}
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.path}:{node.lineno}: imports are absolute"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else str(node.module) for name in full]
        else:
            continue
        found += [Import(name, node.lineno, id(node) in typing_nodes) for name in names]
    return found


def is_within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or (prefix and name.startswith(f"{prefix}.")) for prefix in prefixes)


def rule_for(module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    name = module.removeprefix("photon_jax.")
    fitting = [key for key in RULES if is_within(name, (key,))]
    assert fitting, f"{module} has no row in the import table"
    return RULES[max(fitting, key=len)]


def breach(source: Source, item: Import) -> bool:
    """Returns whether an import of a file of the library is against the table."""
    top = item.module.split(".")[0]
    if top in sys.stdlib_module_names:
        return False
    if source.module == "photon_jax":
        return not (item.for_types and top == "photon_jax")
    if source.path.parts[0] == "pallas_kernels":
        is_bench_flag = top == "absl" and source.path.name == "bench.py"
        return not (is_within(item.module, ("pallas_kernels", *KERNEL_LIBRARIES)) or is_bench_flag)
    inside, libraries = rule_for(source.module)
    if top == "pallas_kernels":
        return "pallas_kernels" not in inside
    if top == "photon_jax":
        return not (is_within(item.module.removeprefix("photon_jax").removeprefix("."), inside))
    return top not in libraries and not (source.module == "photon_jax.step_io" and top == "jax" and item.for_types)


def breaches(source: Source) -> list[str]:
    return [f"{source.path}:{i.line}: imports {i.module}" for i in imports_of(source) if breach(source, i)]


def test_imports_follow_the_table():
    library = [source for source in sources(*PACKAGES) if source.text.strip()]
    assert not [text for source in library for text in breaches(source)]


def test_nothing_imports_the_command_lines():
    for source in sources(*PACKAGES):
        if not is_within(source.module, ("photon_jax.cli",)):
            assert not [i for i in imports_of(source) if is_within(i.module, ("photon_jax.cli",))], source.path


def test_only_command_lines_scripts_and_benches_read_flags():
    for source in sources(*PACKAGES):
        if is_within(source.module, ("photon_jax.cli",)) or source.path.name == "bench.py":
            continue
        assert not [i for i in imports_of(source) if i.module.split(".")[0] == "absl"], source.path


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("scheduler/scheduler", "import jax"),
        ("scheduler/scheduler", "from photon_jax.engine.runner import ModelRunner"),
        ("scheduler/scheduler", "from photon_jax.cache import kv_cache"),
        ("models/decoder", "from pallas_kernels import paged_attention"),
        ("engine/engine", "import pallas_kernels"),
        ("engine/engine", "from photon_jax.text.tokenizer import Tokenizer"),
        ("text/stop", "import numpy as np"),
        ("step_io", "import jax"),
        ("checkpoint/demo", "from photon_jax.llm import LLM"),
        ("llm", "import torch"),
        ("request", "def f():\n    import jax"),
    ],
)
def test_a_forbidden_import_is_found(module, text):
    path = next(s.path for s in sources(*PACKAGES) if s.module == "photon_jax").parent / f"{module}.py"
    assert breaches(Source(path, text))


def test_a_type_only_import_of_jax_is_allowed_where_arrays_are_only_named():
    path = next(s.path for s in sources(*PACKAGES) if s.module == "photon_jax").parent / "step_io.py"
    assert not breaches(Source(path, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax"))


def test_package_files_are_empty_but_for_the_public_ones():
    public = {"photon_jax", "pallas_kernels"}
    for source in sources(*PACKAGES):
        is_kernel = source.module.startswith("pallas_kernels.")
        if source.is_package and source.module not in public and not is_kernel:
            assert not source.text.strip(), f"{source.path} must be empty: names are imported from their own module"


def test_importing_host_modules_does_not_import_jax():
    names = [s.module for s in sources("photon_jax") if is_within(s.module.removeprefix("photon_jax."), HOST_ONLY)]
    assert {"photon_jax.errors", "photon_jax.scheduler.scheduler", "photon_jax.cache.block_manager"} <= set(names)
    lines = ["import importlib, sys", f"for name in {['photon_jax', *names]!r}:", "    importlib.import_module(name)"]
    lines.append("    assert 'jax' not in sys.modules, f'{name} imports JAX'")
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_public_names_resolve_and_unknown_ones_do_not():
    import photon_jax

    for name in photon_jax.__all__:
        assert getattr(photon_jax, name).__name__ == name
    assert set(photon_jax.__all__) <= set(dir(photon_jax))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = photon_jax.nonsense
