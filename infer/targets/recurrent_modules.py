"""Let Hugging Face's recurrent layers call methods of `infer.targets.recurrent.RecurrentStates` in
place of their own functions for convolution and recurrence."""

import inspect
from collections.abc import Callable
from functools import cache, partial, wraps
from types import FunctionType
from typing import cast

import torch
from torch import nn

from infer.attention.kv_cache import CacheView
from infer.targets.recurrent import RecurrentStates, UncachedPackedView

# Keys are names of functions that transformers' recurrent layers call. Values are the methods that
# replace them.
REPLACEMENTS_OF_RECURRENT_FUNCTIONS: dict[str, Callable] = {
    "causal_conv1d_fn": RecurrentStates.convolve,
    "torch_chunk_gated_delta_rule": RecurrentStates.gated_delta_rule,
    "chunk_kimi_delta_attention": RecurrentStates.gated_delta_rule,
    "mamba2_chunk_scan": RecurrentStates.mamba2_scan,
}


def find_recurrent_modules(decoder: nn.Module) -> list[nn.Module]:
    """Return the modules of a decoder that read a recurrent state or a convolution state from a
    cache."""
    return [
        module
        for module in decoder.modules()
        if "get_conv_state" in get_names_in_forward(type(module))
    ]


@cache
def get_names_in_forward(module_class: type[nn.Module]) -> frozenset[str]:
    """Return the names of global variables and attributes that a module class uses in its forward
    method."""
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)
    return frozenset(code.co_names if code else ())


def find_unsupported_recurrent_class_name(decoder: nn.Module) -> str | None:
    """Return the class name of the first recurrent module in a decoder whose functions
    `make_patched_class` cannot replace; None if there is no such module."""
    for module in find_recurrent_modules(decoder):
        names = get_names_in_forward(type(module))
        has_state = "update_recurrent_state" in names
        replaces_recurrence = len(names & REPLACEMENTS_OF_RECURRENT_FUNCTIONS.keys()) >= 2
        if "causal_conv1d_fn" not in names or (has_state and not replaces_recurrence):
            return type(module).__name__
    return None


def patch_recurrent_modules(decoder: nn.Module) -> bool:
    """Make the recurrent layers of a decoder call `RecurrentStates` whenever one of their arguments
    is a cache of this project. With any other cache, they compute the same as without this change.
    Returns whether the decoder has recurrent layers."""
    modules = find_recurrent_modules(decoder)
    for module in modules:
        module.__class__ = make_patched_class(type(module))
    return bool(modules)


class PatchedModuleMarker:
    """Marks the classes that `make_patched_class` creates, which inherit from this class."""


@cache
def make_patched_class(module_class: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `module_class` with a changed forward method. If one of its arguments is
    a cache of this project, the method calls `RecurrentStates` in place of the functions in
    REPLACEMENTS_OF_RECURRENT_FUNCTIONS. A class that is already patched is returned unchanged."""
    if issubclass(module_class, PatchedModuleMarker):
        return module_class
    original = cast(FunctionType, inspect.unwrap(module_class.forward))
    names = REPLACEMENTS_OF_RECURRENT_FUNCTIONS.keys() & get_names_in_forward(module_class)

    @wraps(module_class.forward)  # `get_names_in_forward` unwraps it to find the original code
    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        views = [
            value
            for value in (*args, *kwargs.values())
            if isinstance(value, CacheView | UncachedPackedView)
        ]
        if not views or views[0].recurrent_states is None:
            return module_class.forward(self, *args, **kwargs)
        states = views[0].recurrent_states
        replacements = {
            name: partial(REPLACEMENTS_OF_RECURRENT_FUNCTIONS[name], states, self.layer_idx)
            for name in names
        }
        # Copy the original function, but replace some of its global variables.
        function = FunctionType(
            original.__code__,
            original.__globals__ | replacements,
            original.__name__,
            original.__defaults__,
            original.__closure__,
        )
        function.__kwdefaults__ = original.__kwdefaults__
        return function(self, *args, **kwargs)

    namespace = {"forward": forward, "__module__": module_class.__module__}
    return type(module_class.__name__, (PatchedModuleMarker, module_class), namespace)
