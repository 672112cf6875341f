"""The Python sources of the checkout, parsed, for tests about the code itself."""

import ast
import dataclasses
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("photon_jax", "pallas_kernels")
FOLDERS = (*PACKAGES, "scripts", "tests")


@dataclasses.dataclass(frozen=True)
class Source:
    path: Path  # from the root of the checkout
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def module(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@functools.cache
def sources(*folders: str) -> tuple[Source, ...]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(Source(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in paths)
