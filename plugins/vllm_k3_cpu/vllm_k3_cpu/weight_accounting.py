"""Bytes of a model's weights as loaded, recorded before vLLM rearranges them.

`process_weights_after_loading` hands weights to oneDNN, which keeps them outside any tensor: afterwards the
parameters of an INT8 layer are empty.  So the figure is taken between loading and that call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

ATTRIBUTE = "_loaded_weight_bytes"


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors`` (views and aliases counted once)."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def bytes_by_dtype(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bytes per element type (``bfloat16``, ``uint8``, ...); tensors that share a storage are counted once."""
    seen, total = set(), Counter()
    for tensor in tensors:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer and pointer not in seen:
            seen.add(pointer)
            total[str(tensor.dtype).removeprefix("torch.")] += tensor.untyped_storage().nbytes()
    return dict(total)


def install() -> None:
    """Record `ATTRIBUTE` on every model that vLLM loads in this process from now on."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    original = BaseModelLoader.load_model
    if getattr(original, "records_weight_bytes", False):
        return

    def load_model(self, *args, **kwargs):
        load_weights, recorded = self.load_weights, {}

        def load_and_record(model, model_config):
            load_weights(model, model_config)
            recorded.update(bytes_by_dtype([*model.parameters(), *model.buffers()]))

        self.load_weights = load_and_record
        try:
            model = original(self, *args, **kwargs)
        finally:
            del self.load_weights
        setattr(model, ATTRIBUTE, recorded)
        return model

    load_model.records_weight_bytes = True
    BaseModelLoader.load_model = load_model
