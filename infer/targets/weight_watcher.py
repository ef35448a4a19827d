"""Detection of changed weights, such as a merged adapter or a loaded state dict, after which copies
of the weights must be made again."""

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter, is_

import torch
from torch import nn

WATCHED_VALUES_PER_WEIGHT_MATRIX = 16  # compared with their earlier values
WATCHED_PARAMETERS_CHECKED_PER_ROUND = 32  # whose identity and address are compared in every round
get_version = attrgetter("_version")  # how many in-place writes to a tensor PyTorch has counted


class WeightWatcher:
    """Detects that weights of a module were replaced, moved or written to.

    A write through `.data`, which is how peft merges adapters, changes neither a tensor's version
    nor its address. Therefore values are compared too: all values of vectors (norms and biases),
    since our own decoder works on copies of some of them, and a few values of each matrix. A write
    through `.data` that changes only other values of a matrix is not detected. Our own decoder does
    not need that, as it reads matrices in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.take_snapshot()

    def detect_changes(self) -> bool:
        """Return whether weights have changed since the last snapshot, and take a new snapshot if
        so. On CUDA this waits for the device."""
        weights = list(self.module.parameters())
        same = len(weights) == len(self.weights) and all(map(is_, weights, self.weights))
        if same and not self.detect_changes_quickly() and get_addresses(weights) == self.addresses:
            values = sample_values(weights)
            if all(map(torch.equal, values, self.values)):
                return False
        self.take_snapshot()
        return True

    def detect_changes_quickly(self) -> bool:
        """Return whether versions, identities or addresses show a change.

        This is cheap enough for every round, since it looks at a sample: versions of the first
        parameter of each module, identity and address of a few parameters. `detect_changes`, which
        is called when a sequence starts, detects what this misses.
        """
        if sum(map(get_version, self.versioned_weights)) != self.version_sum:
            return True
        current = [parameters.get(name) for parameters, name in self.checked_entries]
        replaced = not all(map(is_, current, self.checked_weights))
        return replaced or get_addresses(current) != self.checked_addresses

    def take_snapshot(self) -> None:
        """Compare later weights with the current ones."""
        self.weights = list(self.module.parameters())
        self.addresses = get_addresses(self.weights)
        self.values = sample_values(self.weights)

        # (parameter dict, name) of the first parameter of each module
        entries = []
        for module in self.module.modules():
            names = [name for name, weight in module._parameters.items() if weight is not None]
            entries += [(module._parameters, name) for name in names[:1]]
        first_weights = [parameters[name] for parameters, name in entries]
        self.versioned_weights = [weight for weight in first_weights if not weight.is_inference()]
        self.version_sum = sum(map(get_version, self.versioned_weights))  # versions only increase

        step = 1 + len(entries) // WATCHED_PARAMETERS_CHECKED_PER_ROUND
        self.checked_entries = entries[::step]
        self.checked_weights = [parameters[name] for parameters, name in self.checked_entries]
        self.checked_addresses = get_addresses(self.checked_weights)


def get_addresses(weights: Sequence[nn.Parameter | None]) -> list[int]:
    """Return the memory addresses of ordinary parameters. Subclasses are left out: other packages
    use them for sharded or quantised weights, whose memory may move at any time."""
    return [weight.data_ptr() for weight in weights if type(weight) is nn.Parameter]


def sample_values(weights: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return copies of all values of vectors and some values of each matrix, one tensor for each
    device and dtype. Subclasses of nn.Parameter are left out."""
    samples_by_type = defaultdict(list)
    for weight in weights:
        if type(weight) is nn.Parameter and not weight.is_meta:
            samples_by_type[weight.device, weight.dtype].append(
                first_values_of_middle_row(weight.detach())
            )
    return [torch.cat(samples) for samples in samples_by_type.values()]


def first_values_of_middle_row(weight: torch.Tensor) -> torch.Tensor:
    """Return a view of the first values of the middle row of a matrix, or of all values of a
    vector."""
    if weight.ndim < 2:
        return weight.reshape(-1)
    for size in weight.shape[:-1]:
        weight = weight[size // 2]
    return weight.reshape(-1)[:WATCHED_VALUES_PER_WEIGHT_MATRIX]
