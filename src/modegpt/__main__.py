"""`python -m modegpt` is the command `modegpt`."""

from .cli import main

main()
