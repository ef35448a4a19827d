"""Detect changed weights, for example after an adapter was merged or a state dict was loaded.
Everything that was computed from the weights, such as KV caches, must then be computed again."""

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter, is_

import torch
from torch import nn

# Number of values of each matrix that are compared with the snapshot.
WATCHED_VALUES_PER_WEIGHT_MATRIX = 16
# Number of parameters whose identity and address are compared in every decoding round.
WATCHED_PARAMETERS_CHECKED_PER_ROUND = 32
get_version = attrgetter("_version")  # returns how often a tensor was written to


class WeightWatcher:
    """Detects that weights of a module were replaced, moved or written to.

    A write through `.data`, which is how peft merges adapters, changes neither a tensor's version
    nor its address. Therefore values are compared too: all values of vectors (norms and biases),
    because our own decoder works on copies of some vectors, and a few values of each matrix. A
    write through `.data` to other values of a matrix is not detected. Our own decoder stays
    correct, because it reads matrices in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.take_snapshot()

    def detect_changes(self) -> bool:
        """Return whether weights have changed since the last snapshot. If so, take a new snapshot.
        On CUDA, this call waits for the GPU."""
        weights = list(self.module.parameters())
        same = len(weights) == len(self.weights) and all(map(is_, weights, self.weights))
        if same and not self.detect_changes_quickly() and get_addresses(weights) == self.addresses:
            values = sample_values(weights)
            if all(map(torch.equal, values, self.values)):
                return False
        self.take_snapshot()
        return True

    def detect_changes_quickly(self) -> bool:
        """Return whether weights have changed since the last snapshot, as far as a fast check of
        some weights shows.

        The check is cheap enough for every decoding round. It compares the version of the first
        parameter of each module, and the identity and address of a few parameters.
        `detect_changes`, which is called when a sequence starts, finds the changes that this check
        misses.
        """
        if sum(map(get_version, self.versioned_weights)) != self.version_sum:
            return True
        current = [parameters.get(name) for parameters, name in self.checked_entries]
        replaced = not all(map(is_, current, self.checked_weights))
        return replaced or get_addresses(current) != self.checked_addresses

    def take_snapshot(self) -> None:
        """Store versions, addresses and sampled values of the current weights. Later checks compare
        the weights with these."""
        self.weights = list(self.module.parameters())
        self.addresses = get_addresses(self.weights)
        self.values = sample_values(self.weights)

        # One entry (parameters by name, name of the first parameter) for each module.
        entries = []
        for module in self.module.modules():
            names = [name for name, weight in module._parameters.items() if weight is not None]
            entries += [(module._parameters, name) for name in names[:1]]
        first_weights = [parameters[name] for parameters, name in entries]
        self.versioned_weights = [weight for weight in first_weights if not weight.is_inference()]
        # Versions only increase, so any change of a version changes the sum.
        self.version_sum = sum(map(get_version, self.versioned_weights))

        step = 1 + len(entries) // WATCHED_PARAMETERS_CHECKED_PER_ROUND
        self.checked_entries = entries[::step]
        self.checked_weights = [parameters[name] for parameters, name in self.checked_entries]
        self.checked_addresses = get_addresses(self.checked_weights)


def get_addresses(weights: Sequence[nn.Parameter | None]) -> list[int]:
    """Return the memory addresses of ordinary parameters. Subclasses of nn.Parameter are left out,
    because other packages use them for sharded or quantised weights, whose memory may move."""
    return [weight.data_ptr() for weight in weights if type(weight) is nn.Parameter]


def sample_values(weights: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return copies of all values of vectors and of some values of each matrix. The values are
    concatenated to one tensor per device and dtype. Subclasses of nn.Parameter are left out."""
    samples_by_type = defaultdict(list)
    for weight in weights:
        if type(weight) is nn.Parameter and not weight.is_meta:
            samples_by_type[weight.device, weight.dtype].append(
                first_values_of_middle_row(weight.detach())
            )
    return [torch.cat(samples) for samples in samples_by_type.values()]


def first_values_of_middle_row(weight: torch.Tensor) -> torch.Tensor:
    """Return a view of some values of a weight: all values of a vector, or the first values of the
    middle row of a matrix."""
    if weight.ndim < 2:
        return weight.reshape(-1)
    for size in weight.shape[:-1]:
        weight = weight[size // 2]
    return weight.reshape(-1)[:WATCHED_VALUES_PER_WEIGHT_MATRIX]
