"""What transformers calls the cache of keys and values, where models take it and in what they return."""

from dataclasses import fields

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
"""`cache` since transformers 5.24, `past_key_values` before."""
