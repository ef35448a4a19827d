"""Weights that change after copies were made of them: an adapter is merged, a state dict loaded."""

from collections import defaultdict
from operator import attrgetter, is_

import torch
from torch import nn

SAMPLED_VALUES = 16  # of a matrix, compared with what they were
ROUND_CHECK_PARAMETERS = 32  # whose identity and address are compared in every round
version = attrgetter("_version")  # how often PyTorch saw a tensor written to


class Watch:
    """Notices that weights of a module were replaced, moved or written to.

    Writing through `.data`, as peft merges adapters, leaves a tensor's version and address as they
    are. Therefore values are compared too: of vectors (norms and biases) all, since the decoder
    pass works on copies of some; of matrices a few. A partial write through `.data` to a matrix
    that misses those values is not noticed; it needs no notice in a decoder pass, which reads the
    matrices where they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.note()

    def changed(self) -> bool:
        """Return whether weights are others than when this was last true. On CUDA it waits for the
        device."""
        weights = list(self.module.parameters())
        same = len(weights) == len(self.weights) and all(map(is_, weights, self.weights))
        if same and not self.written() and addresses(weights) == self.addresses:
            values = sampled_values(weights)
            if all(map(torch.equal, values, self.values)):
                return False
        self.note()
        return True

    def written(self) -> bool:
        """Return whether versions, or replaced and moved parameters, tell of a change. It is cheap
        enough for every round, since it looks at some parameters only: versions of the first of
        every module, identity and address of a few. What it misses, `changed` sees where a sequence
        enters."""
        if sum(map(version, self.counted)) != self.versions:
            return True
        current = [owner.get(name) for owner, name in self.slots]
        return (
            not all(map(is_, current, self.slot_weights))
            or addresses(current) != self.slot_addresses
        )

    def note(self) -> None:
        """Take the weights as they are now for unchanged."""
        self.weights = list(self.module.parameters())
        self.addresses = addresses(self.weights)
        self.values = sampled_values(self.weights)
        slots = []  # of the first parameter of every module: where it is kept, and its name there
        for module in self.module.modules():
            names = [name for name, weight in module._parameters.items() if weight is not None]
            slots += [(module._parameters, name) for name in names[:1]]
        firsts = [owner[name] for owner, name in slots]
        self.counted = [weight for weight in firsts if not weight.is_inference()]
        self.versions = sum(map(version, self.counted))  # each only grows
        self.slots = slots[:: 1 + len(slots) // ROUND_CHECK_PARAMETERS]
        self.slot_weights = [owner[name] for owner, name in self.slots]
        self.slot_addresses = addresses(self.slot_weights)


def addresses(weights: list[nn.Parameter]) -> list[int]:
    """Return where the values of ordinary parameters lie; not of other classes, which are sharded
    or quantised by other packages and move their memory as they like."""
    return [weight.data_ptr() for weight in weights if type(weight) is nn.Parameter]


def sampled_values(weights: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return the vectors whole and some values of every matrix, copied, of ordinary parameters."""
    groups = defaultdict(list)
    for weight in weights:
        if type(weight) is nn.Parameter and not weight.is_meta:
            groups[weight.device, weight.dtype].append(middle_values(weight.detach()))
    return [torch.cat(views) for views in groups.values()]


def middle_values(weight: torch.Tensor) -> torch.Tensor:
    """Return a view of some values from the middle of a matrix, or of all of a vector."""
    if weight.ndim < 2:
        return weight.reshape(-1)
    for size in weight.shape[:-1]:
        weight = weight[size // 2]
    return weight.reshape(-1)[:SAMPLED_VALUES]
