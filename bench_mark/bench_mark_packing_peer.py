"""TRL's packing of the same lengths (trl.data_utils.pack_dataset, strategy "bfd"): rows, and seconds to make them."""

import time
from typing import Any


def trl_rows(lengths: list[int], seq_len: int) -> dict[str, Any] | str:
    """Rows, their filled share and processor seconds; a line that says why where TRL is not installed."""
    try:
        import datasets
        from trl.data_utils import pack_dataset
    except ImportError as error:
        return f"not measured, {error}: pip install trl"
    data = datasets.Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
    started_s = time.process_time()
    packed = pack_dataset(data, seq_length=seq_len, strategy="bfd")
    seconds = time.process_time() - started_s
    rows = len(packed)
    return {"rows": rows, "filled": sum(lengths) / (rows * seq_len), "pack_cpu_s": seconds}
