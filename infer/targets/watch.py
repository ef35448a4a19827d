"""Weights that change after copies were made of them: an adapter is merged, a state dict loaded."""

from collections import defaultdict
from operator import attrgetter, is_

import torch
from torch import nn

SAMPLE = 16  # numbers of a weight that are compared
version = attrgetter("_version")  # how often PyTorch saw a tensor written to


class Watch:
    """Notices that weights of a module were replaced or written to.

    Writing by way of `.data`, as peft merges adapters, leaves a tensor's version and address as they
    are: some numbers of every weight are compared too. No view of a weight is kept: it would keep the
    memory of one that is replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._note(list(module.parameters()))

    def changed(self) -> bool:
        """Return whether weights are others than when this was last true. On CUDA it waits for the
        device."""
        weights = list(self.module.parameters())
        if len(weights) == len(self.weights) and all(map(is_, weights, self.weights)) and not self.written():
            sample = self._sample()
            if all(map(torch.equal, sample, self.sample)):
                return False
        self._note(weights)
        return True

    def written(self) -> bool:
        """Return whether versions alone tell of a change, which is cheap enough for every round."""
        return sum(map(version, self.counted)) != self.versions

    def _note(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        # the first of every module: what writes to one of its weights alone is seen where a text enters
        firsts = (next(module.parameters(recurse=False), None) for module in self.module.modules())
        self.counted = [weight for weight in firsts if weight is not None and not weight.is_inference()]
        self.versions = sum(map(version, self.counted))  # each only grows
        self.sample = self._sample()

    def _sample(self) -> list[torch.Tensor]:
        """Return some numbers of every weight; not of weights of other classes, which are spread or
        quantised."""
        groups = defaultdict(list)
        for weight in self.weights:
            if type(weight) is nn.Parameter and not weight.is_meta:
                groups[weight.device, weight.dtype].append(_middle(weight.detach()))
        return [torch.cat(views) for views in groups.values()]


def _middle(weight: torch.Tensor) -> torch.Tensor:
    """Return a view of some numbers from the middle of a weight."""
    for size in weight.shape[:-1]:
        weight = weight[size // 2]
    return weight.reshape(-1)[:SAMPLE]
