"""How long work tells how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with a stage, the steps of it that are done, and those to do in it: first with 0, as the stage begins.

A run's stages are `scores`, `coverage` and `compress`, whose steps are blocks (scores of the rule `error`: as
`running.damage.work` counts them); other work says its own. One that a terminal shows is
`commands.progress_bar.ProgressBar`.
"""
