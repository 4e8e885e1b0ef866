"""nanochat."""

from .spec import Architecture

NANOCHAT = Architecture(
    model_type="nanochat",
    name="NanoChat",
    up=("mlp.fc1",),
    down="mlp.fc2",
    # Its rotary embedding turns the other way, and its queries and keys are normalised behind it.
    whole_attention=True,
    notes="nanochat; norms without gains, squared ReLU; the MLPs alone: attention stays whole",
)
