"""`negchain` and `python -m negchain`: the command line, if what it needs is installed."""

import sys

TRAIN = ("PIL", "rich", "safetensors", "sklearn", "tensorboard", "threadpoolctl", "timm",
         "torchvision", "typer")  # fmt: skip
"""Modules of the extra `negchain[train]`."""


def main() -> None:
    """Run the command line, or say which extra to install."""
    try:
        from negchain.cli import main as run
    except ModuleNotFoundError as error:
        if (install := missing(error)) is None:
            raise
        print(f"refused: {install}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped before the start", file=sys.stderr)
        sys.exit(130)
    run()


def missing(error: ModuleNotFoundError) -> str | None:
    """What to install for a module of an extra that is not there; None for any other module.

    >>> missing(ModuleNotFoundError(name="timm.optim"))
    "the command line needs timm; install it with: pip install 'negchain[train]'"
    """
    package = (error.name or "").split(".")[0]
    if package not in TRAIN:
        return None
    package = {"PIL": "pillow", "sklearn": "scikit-learn"}.get(package, package)
    return f"the command line needs {package}; install it with: pip install 'negchain[train]'"


if __name__ == "__main__":
    main()
