"""The run: what it settles before its first block, what is done to each block, and what is kept of it on disk."""
