"""JAX's persistent compilation cache, switched on in a private folder of the user unless he chose otherwise."""

import logging
import os
from pathlib import Path

import jax

logger = logging.getLogger(__name__)


def default_folder() -> Path:
    """`jaxllm/xla` in the user's cache folder (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxllm" / "xla"


def executables_folder() -> Path | None:
    """Where whole programs are kept: in the compilation cache, wherever the process has it; None if it has none."""
    chosen = jax.config.jax_compilation_cache_dir
    if chosen is None or "://" in chosen or not jax.config.jax_enable_compilation_cache:
        return None
    return Path(chosen) / "jaxllm-programs"


def only_jax_keeps_programs() -> bool:
    """Whether the process has a compilation cache, but one that `executables_folder` cannot be in (in a bucket)."""
    chosen, enabled = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    return chosen is not None and enabled and executables_folder() is None


def enable(folder: Path | None = None) -> Path | None:
    """Keep compiled programs in `folder`, so that the next start with the same shapes compiles nothing.

    Does nothing where the process has already chosen a cache, or switched it off: JAX's settings are the caller's.
    The folder is readable by the user alone, since programs in it are run without further checks.

    Returns:
        The folder, or None if nothing was changed (the reason is logged).
    """
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return None
    try:
        folder = folder or default_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            logger.warning("not caching compiled programs: %s is open to other users (chmod 700 it)", folder)
            return None
    except (OSError, RuntimeError) as error:  # the latter where the user has no home
        logger.warning("not caching compiled programs: %s", error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Every program counts: a step's helpers take milliseconds each, but there are many.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder
