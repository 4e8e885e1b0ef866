"""Prompts to continue: their tokens, and whether a model can read them."""

from typing import Any

from jinja2 import TemplateError

from ..errors import InputError, first_line
from ..positions import position_limit

LIKELIEST = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
"""Settings of `generate` that take the likeliest token each time, whatever the model's own say: those of many chat
models penalise what was written before."""


def encode(tokenizer: Any, prompt: str, config: Any, new_tokens: int, chat: bool = False) -> Any:
    """Tokenise a prompt that a model is to continue.

    Args:
        tokenizer: of the model.
        prompt: the text.
        config: of the model.
        new_tokens: to be added at most.
        chat: whether the prompt goes into the model's chat template.

    Returns:
        What a tokenizer gives, `input_ids` of shape `(1, tokens)` among it.

    Raises:
        InputError: the prompt is empty or no text, has no tokens, the template is missing or fails, a token is outside
            the vocabulary, or the model has too few positions.
    """
    if not prompt:
        raise InputError("the prompt is empty; give some text to continue")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # what Python makes of bytes that are no text
        raise InputError("the prompt is no text in UTF-8; give it in that encoding")
    inputs = _in_template(tokenizer, prompt) if chat else _plain(tokenizer, prompt)
    ids, vocabulary = inputs["input_ids"], config.get_text_config().vocab_size
    if not ids.numel():
        raise InputError(f"the prompt '{prompt[:80]}' has no tokens by the model's tokenizer; give another text")
    if int(ids.max()) >= vocabulary:
        raise InputError(
            f"the prompt has the token {int(ids.max())}, and the model has {vocabulary} of them; give the "
            "tokenizer that belongs to the model"
        )
    n_tokens, limit = ids.shape[1], position_limit(config)
    if limit and n_tokens + new_tokens > limit:
        raise InputError(
            f"{n_tokens} tokens of prompt and {new_tokens} new ones exceed the model's {limit} positions; "
            "give a smaller --max-new-tokens or a shorter prompt"
        )
    return inputs


def _plain(tokenizer: Any, prompt: str) -> Any:
    return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)


def _in_template(tokenizer: Any, prompt: str) -> Any:
    if not tokenizer.chat_template:
        raise InputError("--chat was given, but the model's tokenizer has no chat template; leave --chat out")
    messages = [{"role": "user", "content": prompt}]
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    except TemplateError as problem:
        raise InputError(
            f"the model's chat template refuses the prompt ({first_line(problem)}); leave --chat out"
        ) from problem
