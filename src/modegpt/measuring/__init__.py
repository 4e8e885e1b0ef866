"""How good a model is on tasks and prompts, and what it costs by its shapes."""
