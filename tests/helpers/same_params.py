"""Equality of parameter trees, leaf by leaf."""

import jax
import numpy as np


def assert_same_params(ours, expected):
    """Asserts that two trees have one structure, and leaves of the same dtypes and values."""
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(ours)[0], jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype, jax.tree_util.keystr(path)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))
