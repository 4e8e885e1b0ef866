"""MoDeGPT: makes a Hugging Face language model smaller and faster without training.

Importing this package registers the compressed classes with transformers, so that
`AutoModelForCausalLM.from_pretrained(folder)` opens what `modegpt compress` wrote.
"""

import sys

__version__ = "0.1.0"

if "modegpt_command" not in sys.modules:  # the program registers later, and needs none of these names
    from .registration import register

    register()

    from .compress import compress
    from .config import CompressionConfig
    from .errors import InputError, MissingExtraError, ModegptError, NumericalError
    from .evaluate import perplexity
    from .export.rejoin import rejoin
    from .export.stock import stock_model
    from .measuring.zero_shot import evaluate_tasks

__all__ = [
    "CompressionConfig",
    "InputError",
    "MissingExtraError",
    "ModegptError",
    "NumericalError",
    "compress",
    "evaluate_tasks",
    "perplexity",
    "rejoin",
    "stock_model",
]
