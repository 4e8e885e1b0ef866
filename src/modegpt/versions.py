"""The versions that decide a result; telling them imports none of the packages."""

import platform
import sys
from functools import cache
from importlib import metadata

PACKAGES = ("modegpt", "torch", "transformers", "safetensors", "tokenizers")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a result."""
    return {"python": platform.python_version(), **{package: _version(package) for package in PACKAGES}}


@cache
def _version(package: str) -> str:
    """Read an installed package's metadata, once: it takes milliseconds, and stands in every report."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # A package that is not installed, but on the path.
        return getattr(sys.modules.get(package), "__version__", "unknown")
