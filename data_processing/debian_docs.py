"""A real corpus from Debian's documentation packages: HTML, PDF and prose that any Debian machine can fetch by apt.

    python -m data_processing.debian_docs output=data/debian/raw                # on Debian or Ubuntu, needs apt sources
    python -m data_processing.debian_docs output=data/debian/raw packages='[sqlite3-doc,python3.11-doc]'

`apt-get download` and `dpkg -x` need no root and install nothing. output/html, output/pdf and output/text hold the
files by package (text: what is plain or a dictd file). A package that apt does not know is passed over with one line;
docs/data_licences.md says what the licences ask.
"""

import gzip
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import hydra
from omegaconf import DictConfig

from configs.errors import UserError
from configs.loader import CONFIG_DIR, run_script, start_script

PACKAGES = ("linux-doc", "python3-doc", "postgresql-doc", "python-django-doc", "sqlite3-doc", "debian-handbook")
PACKAGES += ("debian-reference-en", "cmake-doc", "git-doc", "octave-doc", "dict-gcide", "dict-wn", "anarchism")
KINDS = {"html": (".html", ".htm", ".html.gz"), "pdf": (".pdf", ".pdf.gz"), "text": (".txt", ".txt.gz", ".dict.dz")}


@dataclass
class DebianDocsConfig:
    """Which packages, and where their files go."""

    output: str = "data/debian/raw"
    packages: list[str] = field(default_factory=lambda: list(PACKAGES))

    def __post_init__(self):
        if not self.packages:
            raise UserError("packages=[] is empty; name Debian packages such as sqlite3-doc")


def run(*command: str, folder: Path) -> tuple[int, str]:
    """(exit status, what it printed) of a command."""
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError(f"{command[0]} is not here; this script needs Debian or Ubuntu (apt-get, dpkg)") from error
    return result.returncode, (result.stdout + result.stderr).strip()


def real_package(name: str, folder: Path) -> str:
    """The package that a name stands for: itself, or of a metapackage (linux-doc) its versioned dependency."""
    status, text = run("apt-cache", "depends", "--no-recommends", "--no-suggests", name, folder=folder)
    wanted = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.strip().startswith("Depends:")]
    stem = name.removesuffix("-doc")
    versioned = [w for w in wanted if not status and w.startswith(stem) and w.endswith(("-doc", *"0123456789"))]
    return versioned[0] if versioned else name


def kind_of(path: Path) -> str:
    """html, pdf, text, or "" for what is none of them."""
    return next((kind for kind, suffixes in KINDS.items() if path.name.endswith(suffixes)), "")


def sort_files(tree: Path, output: Path, package: str) -> dict[str, int]:
    """Copy a package's documents to output/KIND/PACKAGE; returns bytes by kind. Links are not followed."""
    sizes = dict.fromkeys(KINDS, 0)
    for path in sorted(p for p in tree.rglob("*") if p.is_file() and not p.is_symlink()):
        kind = kind_of(path)
        if not kind:
            continue
        target = output / kind / package / path.relative_to(tree / "usr/share")
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name.endswith(".dict.dz"):  # dictd's format is gzip with an index in its header
            target = target.with_name(path.name.removesuffix(".dict.dz") + ".txt")
            with gzip.open(path, "rb") as packed, open(target, "wb") as plain:
                shutil.copyfileobj(packed, plain)
        else:
            shutil.copyfile(path, target)
        sizes[kind] += target.stat().st_size
    return sizes


def fetch_package(name: str, output: Path) -> dict[str, int] | None:
    """Download, unpack and sort one package; None when apt does not have it."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        package = real_package(name, place)
        status, text = run("apt-get", "download", package, folder=place)
        debs = list(place.glob("*.deb"))
        if status or not debs:
            print(f"{name}: not fetched ({(text.splitlines() or ['no file'])[-1]})", file=sys.stderr)
            return None
        status, text = run("dpkg", "-x", debs[0].name, "tree", folder=place)
        if status:
            raise UserError(f"dpkg could not unpack {debs[0].name} ({text}); fetch it again")
        shutil.rmtree(output / "html" / name, ignore_errors=True)
        return sort_files(place / "tree", output, name)


def body(config: DebianDocsConfig) -> dict[str, int]:
    """Fetch all packages; returns bytes by kind and prints them."""
    output, total = Path(config.output).expanduser(), dict.fromkeys(KINDS, 0)
    for name in config.packages:
        sizes = fetch_package(name, output)
        for kind, size in (sizes or {}).items():
            total[kind] += size
        if sizes is not None:
            print(f"{name}: " + ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in sizes.items() if size))
    if not any(total.values()):
        raise UserError(f"none of {', '.join(config.packages)} was fetched; run apt-get update, or name other packages")
    print(f"in {output}: " + ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in total.items()))
    return total


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="debian_docs")
def main(config: DictConfig) -> None:
    run_script(body, DebianDocsConfig, config)


if __name__ == "__main__":
    start_script(main, DebianDocsConfig, "debian_docs")
