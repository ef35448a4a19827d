"""Optional packages: what is missing is named by its outermost file or folder."""

import pytest

import infer
from infer.utils.optional import (
    explain_missing_module,
    find_missing_path,
    is_installed,
    require_installed,
)


def test_the_outermost_missing_path_is_named():
    assert find_missing_path("infer.trees.chain:build_chain") is None and is_installed(
        "infer.utils"
    )
    assert find_missing_path("infer.trees.gone:build") == "infer/trees/gone.py"
    assert find_missing_path("infer.gone.model.part:load") == "infer/gone"
    assert explain_missing_module("infer.trees.chain:build_chain", "method=chain") is None
    with pytest.raises(
        ValueError, match="^method=x is not in this installation: infer/trees/gone.py is missing$"
    ):
        require_installed("infer.trees.gone:build", "method=x")


def test_a_public_name_without_its_package_is_explained(monkeypatch):
    monkeypatch.setitem(infer._MODULE_OF_NAME, "load_gone", "infer.gone.model")
    with pytest.raises(
        ImportError, match="^infer.load_gone is not in this installation: infer/gone is missing$"
    ):
        from infer import load_gone  # noqa: F401
