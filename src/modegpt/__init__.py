"""MoDeGPT: makes a Hugging Face language model smaller and faster without training.

Importing this package registers the compressed classes with transformers, so that
`AutoModelForCausalLM.from_pretrained(folder)` opens what `modegpt compress` wrote.
"""

from .registration import register

register()

from .compress import compress  # noqa: E402
from .config import CompressionConfig  # noqa: E402
from .errors import InputError, MissingExtraError, ModegptError, NumericalError  # noqa: E402
from .evaluate import perplexity  # noqa: E402
from .export.stock import stock_model  # noqa: E402
from .zero_shot import evaluate_tasks  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "CompressionConfig",
    "InputError",
    "MissingExtraError",
    "ModegptError",
    "NumericalError",
    "compress",
    "evaluate_tasks",
    "perplexity",
    "stock_model",
]
