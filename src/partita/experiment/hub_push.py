"""Push an exported folder to the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import disable_progress_bars

from partita.core.hub import offline_reason
from partita.experiment.exported import ExportError

REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def check_push(repository: str) -> None:
    """Check that a push can succeed, before any long work.

    Raises:
        ExportError: If the name is no repository's, the Hub cannot be reached, or it does not know the user.
    """
    if not REPOSITORY.fullmatch(repository):
        raise ExportError(f"--push is '{repository}'; give a repository on the Hub as user/name")
    if reason := offline_reason():
        raise ExportError(f"cannot push to the Hub: {reason}; export without --push, and push when you are online")
    if not get_token():
        raise ExportError(
            "cannot push to the Hub without a token; log in with 'hf auth login', or set the environment variable "
            "HF_TOKEN"
        )
    try:
        _api().whoami()
    except (HfHubHTTPError, OSError) as error:
        raise ExportError(
            f"the Hub refuses the token: {_first_line(error)}; log in again with 'hf auth login'"
        ) from error


def push(folder: Path, repository: str, public: bool = False) -> str:
    """Create the repository if there is none, and upload the folder.

    Args:
        folder: The exported folder.
        repository: "user/name".
        public: Whether a new repository is public. One that exists stays as it is.

    Returns:
        The address of the repository.

    Raises:
        ExportError: If the Hub refuses. The folder is complete.
    """
    api = _api()
    disable_progress_bars()
    try:
        made = api.create_repo(repository, private=not public, exist_ok=True, repo_type="model")
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export by partita")
    except (HfHubHTTPError, OSError) as error:
        raise ExportError(
            f"cannot push to '{repository}': {_first_line(error)}; {folder} is complete, so push it again with "
            f"'hf upload {repository} {folder}'"
        ) from error
    return str(made)


def _api() -> HfApi:
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
