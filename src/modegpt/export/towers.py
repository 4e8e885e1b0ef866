"""What stands beside the language model in a multimodal one: what turns images, or sound, into hidden states."""

import copy
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..blocks import required_tensors
from ..errors import InputError, refused
from ..formats.text_part import multimodal_class
from ..loading.models import quietly
from ..modeling_modegpt import base_of


class Towers:
    """All of a multimodal model but its language model, in memory; of that, one block and the embeddings come with it.

    Args:
        whole: the model: folder or hub name.
        outer: its config.
        dtype: of the weights.

    Raises:
        InputError: the model cannot be loaded, or a weight is missing or of another shape than the config says.
    """

    def __init__(self, whole: str, outer: PreTrainedConfig, dtype: torch.dtype) -> None:
        """Load it."""
        model_class = getattr(transformers, multimodal_class(outer.model_type))
        with quietly(and_silently=True), refused(f"model '{whole}' cannot be loaded"):
            self.model, found = model_class.from_pretrained(
                whole, config=_shallow(outer), dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
        kind, base = outer.text_config.model_type, base_of(self.model)
        parts = (part for part in base.modules() if isinstance(part, PreTrainedModel))
        language_model = next(part for part in parts if part.config.model_type == kind)
        self.inner = _place(base, base_of(language_model))
        """Where the language model without its head is, from the base model."""
        self.prefix = f"{_place(self.model, language_model)}."
        """Of the names of its tensors."""
        self._has_head = base_of(language_model) is not language_model  # in Llama 4; in others it stands outside
        names = [name for name in required_tensors(self.model) if not name.startswith((self.prefix, "lm_head."))]
        unlike = {each[0] for each in found["mismatched_keys"]} | set(found["missing_keys"])
        if broken := sorted(unlike.intersection(names)):
            raise InputError(f"the files of model '{whole}' lack '{broken[0]}', or hold it in another shape")
        tensors = self.model.state_dict()
        self.state: dict[str, Tensor] = {name: tensors[name] for name in names}

    @property
    def class_name(self) -> str:
        """Name of the stock class."""
        return type(self.model).__name__

    @property
    def n_parameters(self) -> int:
        """Parameters of the towers."""
        return sum(weight.numel() for name, weight in self.model.named_parameters() if name in self.state)

    @property
    def embedding(self) -> Tensor:
        """The language model's, `(vocab, d_model)`."""
        return self.model.get_input_embeddings().weight

    def renamed(self, name: str) -> str:
        """Return what a tensor of the language model is called in the multimodal one."""
        if self._has_head:
            return self.prefix + name
        return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name


def _place(model: PreTrainedModel, part: PreTrainedModel) -> str:
    """Return the path of a part in a model."""
    return next(path for path, module in model.named_modules() if module is part)


def _shallow(outer: PreTrainedConfig) -> PreTrainedConfig:
    """Return a multimodal config whose language model has one block, and of whose quantization nothing is said."""
    shallow: Any = copy.deepcopy(outer)
    fields = shallow.text_config.to_dict()
    count = fields.pop("num_hidden_layers")
    fields = {
        name: each[:1] if isinstance(each, list) and len(each) == count else each for name, each in fields.items()
    }
    # Of Gemma 4: which layers differ, and how many of them read keys of others.
    alike: dict[str, Any] = {"per_layer_config": {}, "num_kv_shared_layers": 0}
    fields |= {name: value for name, value in alike.items() if name in fields}
    fields.pop("quantization_config", None)
    shallow.text_config = type(shallow.text_config).from_dict({**fields, "num_hidden_layers": 1})
    if hasattr(shallow, "quantization_config"):
        del shallow.quantization_config
    return shallow
