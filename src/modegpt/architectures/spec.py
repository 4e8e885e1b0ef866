"""What the compressor must know of a model family, as data."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

PROJECTIONS = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Architecture:
    """One family: where its projections are and how its heads are laid out.

    Paths are those of transformers' modules. `describe` gives the part that a checkpoint carries.
    """

    model_type: str
    """`config.model_type` of the dense model."""
    name: str
    """Prefix of the stock class names: `Llama` for `LlamaForCausalLM`."""
    layers: str = "layers"
    """The list of decoder blocks, from the base model."""
    attention: str = "self_attn"
    """The attention module, from the block."""
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Every projection into the MLP's intermediate space, from the block."""
    down: str = "mlp.down_proj"
    middle: str = "post_attention_layernorm"
    """The module whose input is the residual stream between attention and MLP, from the block."""
    width: str = "intermediate_size"
    """The config's name for the MLP width."""
    rotary: bool = True
    """Whether query and key pass a rotary embedding with halves as pairs: coordinate `j` with `j + r/2`."""
    scale_query: bool = False
    """Whether the query is scaled before the attention, which then scales by 1 (OPT)."""
    notes: str = ""
    """One line for the table of supported architectures."""

    def describe(self) -> dict[str, Any]:
        """Return what the shipped modeling file needs to rebuild the family, for `config.json`."""
        data = asdict(self)
        for unused in ("model_type", "middle", "width", "rotary", "notes"):
            del data[unused]
        return {**data, "up": list(self.up)}

    def projection(self, block: nn.Module, role: str) -> nn.Linear:
        """Return the linear layer that plays `query`, `key`, `value`, `output` or `down` in a block."""
        if role == "down":
            return block.get_submodule(self.down)  # pyright: ignore[reportReturnType]
        return block.get_submodule(f"{self.attention}.{getattr(self, role)}")  # pyright: ignore[reportReturnType]

    def middle_module(self, block: nn.Module) -> nn.Module:
        """Return the module whose input is the residual stream between attention and MLP."""
        return block.get_submodule(self.middle)

    def up_projections(self, block: nn.Module) -> list[nn.Linear]:
        """Return the linear layers into the MLP's intermediate space."""
        return [block.get_submodule(path) for path in self.up]  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a decoder, in the names used throughout the package."""

    n_layers: int
    d_model: int
    d_int: int
    d_head: int
    n_heads: int
    n_kv_heads: int
    rotary_dim: int
    """Leading coordinates of a head under the rotary embedding; 0 where there is none."""

    @classmethod
    def of(cls, architecture: Architecture, config: Any) -> "Dimensions":
        """Read the sizes from a dense model's config."""
        d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            n_layers=config.num_hidden_layers,
            d_model=config.hidden_size,
            d_int=getattr(config, architecture.width),
            d_head=d_head,
            n_heads=config.num_attention_heads,
            n_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            rotary_dim=d_head if architecture.rotary else 0,
        )
