"""Files and functions stay small enough to read."""

import ast

import pytest
from helpers.source_tree import FOLDERS, sources

MAX_FILE_LINES = 400
MAX_KERNEL_FILE_LINES = 500
MAX_FUNCTION_LINES = 50
MAX_KERNEL_BODY_LINES = 60
EXCEPTIONS: frozenset[str] = frozenset()  # "path" or "path:function"


def long_files(source):
    limit = MAX_KERNEL_FILE_LINES if source.path.parts[0] == "pallas_kernels" else MAX_FILE_LINES
    num_lines = len(source.text.splitlines())
    if num_lines > limit:
        yield f"{source.path}", f"{num_lines} lines, {limit} allowed"


def long_functions(source):
    in_kernels = source.path.parts[0] == "pallas_kernels"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_kernel = in_kernels and node.name.endswith("_kernel")
            limit = MAX_KERNEL_BODY_LINES if is_kernel else MAX_FUNCTION_LINES
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > limit:
                yield f"{source.path}:{node.name}", f"{num_lines} lines, {limit} allowed"


@pytest.mark.parametrize("check", [long_files, long_functions])
def test_nothing_is_longer_than_its_limit(check):
    found = [item for source in sources(*FOLDERS) for item in check(source)]
    assert not [f"{name}: {text}" for name, text in found if name not in EXCEPTIONS]


def test_exceptions_are_still_needed():
    found = {
        name for source in sources(*FOLDERS) for check in (long_files, long_functions) for name, _ in check(source)
    }
    assert found >= EXCEPTIONS
