"""What is read off a block while it runs, and how parts of it are left out of the pass."""
