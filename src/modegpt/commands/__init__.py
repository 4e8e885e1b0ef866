"""One file a command; `modegpt.cli` registers them."""
