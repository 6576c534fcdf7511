"""The weights of a model in memory, as an exporter reads them."""

from torch import Tensor
from torch.nn import Module


class StateReader:
    """Parameters of a model, or other tensors under their names."""

    def __init__(self, found: Module | dict[str, Tensor]):
        tensors = dict(found.named_parameters()) if isinstance(found, Module) else found
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def names(self) -> list[str]:
        return list(self.tensors)

    def get(self, name: str) -> Tensor:
        return self.tensors[name]
