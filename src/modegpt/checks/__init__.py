"""What `modegpt check` proves on a model, one function a check, and what it needs for it."""
