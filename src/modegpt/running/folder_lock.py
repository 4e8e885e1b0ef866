"""One run at a time in a folder."""

import os
import weakref
from pathlib import Path

from ..errors import InputError

try:
    import fcntl
except ImportError:  # on Windows, where nothing is locked
    fcntl = None


class FolderLock:
    """Keeps other runs out of a folder, until it is released or the last reference to it goes.

    A killed process leaves no lock, and no file is made for it. Where the file system has no locks (some network
    shares), nothing is kept out.

    Args:
        folder: it must exist.

    Raises:
        InputError: another run is in it.
    """

    def __init__(self, folder: Path) -> None:
        """Lock the folder."""
        if fcntl is None:
            return
        handle = os.open(folder, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise InputError(
                f"another run is writing to '{folder}': let it end, stop it, or choose another output"
            ) from None
        except OSError:
            self.release()

    def release(self) -> None:
        """Let others in; a second call does nothing."""
        if fcntl is not None:
            self._close()
