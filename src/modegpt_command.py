"""The program `modegpt`.

It stands beside the package, for `import modegpt` registers the compressed classes, and so brings in torch and
transformers: seconds. With this module loaded the package leaves that to the command that runs, which does it when its
work begins (`commands.shared.begin`). Help, `--version` and the answer to a wrong call do not wait for it.
"""


def main() -> None:
    """Run the command line."""
    from modegpt.cli import main as run

    run()
