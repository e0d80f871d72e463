"""Small token directories for tests, written by hand in the format of llm/token_files.py."""

from pathlib import Path

import numpy as np

from llm.token_files import ShardMeta, TokenMeta, write_meta

SHA = "0" * 64


def write_source(
    directory: Path, shards: dict[str, list[np.ndarray]], vocab_size: int = 100, eot_id: int = 0, sha: str = SHA
) -> Path:
    """Write a source directory: split name -> the token arrays of its shards."""
    directory.mkdir(parents=True, exist_ok=True)
    metas = []
    for split, arrays in shards.items():
        for number, tokens in enumerate(arrays):
            stem = f"{split}_{number:05d}"
            np.save(directory / f"{stem}.npy", tokens.astype(np.uint16))
            ends = np.flatnonzero(tokens == eot_id) + 1
            np.save(directory / f"{stem}.offsets.npy", np.concatenate(([0], ends)).astype(np.int64))
            metas.append(
                ShardMeta(f"{stem}.npy", f"{stem}.offsets.npy", split, len(tokens), len(ends), 4 * len(tokens))
            )
    write_meta(directory, TokenMeta(directory.name, sha, vocab_size, eot_id, "uint16", metas))
    return directory
