"""How files hold a model: inside a multimodal one, in packed numbers, as safetensors."""
