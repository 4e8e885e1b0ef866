"""The versions that decide a result; telling them imports none of the packages."""

import platform
import sys
from importlib import metadata

PACKAGES = ("modegpt", "torch", "transformers", "safetensors", "tokenizers")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            # A package that is not installed, but on the path.
            found[package] = getattr(sys.modules.get(package), "__version__", "unknown")
    return found
