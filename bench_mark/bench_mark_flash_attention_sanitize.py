"""Every attention kernel once on small odd shapes, to run under NVIDIA's compute-sanitizer, which sees stray accesses.

    compute-sanitizer --tool memcheck python3 -m bench_mark.bench_mark_flash_attention_sanitize

Tensors are cut out of larger ones whose margins hold nan, so that without the sanitizer too a read outside shows.
Run it once without the sanitizer before: Triton then finds its kernels compiled. The last line is one JSON document.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from kernel.flash_attention_triton import AttentionMask, flash_attention, resolve_mask
from kernel.flash_attention_triton_decode import DecodeOptions, flash_attention_decode
from kernel.flash_attention_triton_launch import Attention, TileConfig, capability, run_backward, run_forward

MARGIN = 64  # rows of nan before and after
PLAIN = TileConfig(64, 64, 4, 2)
HOPPER_FORWARD = TileConfig(128, 128, 4, 2, consumers=2)


def guarded(rows: int, heads: int, D: int, dtype: torch.dtype) -> torch.Tensor:
    """(1, rows, heads, D) of normal numbers inside a tensor of nan."""
    whole = torch.full((1, rows + 2 * MARGIN, heads, D), torch.nan, device="cuda", dtype=dtype)
    inner = whole[:, MARGIN : MARGIN + rows]
    inner.copy_(torch.randn(inner.shape, device="cuda"))
    return inner


def training(D: int, dtype: torch.dtype, mask: AttentionMask, forward: TileConfig | None, backward: TileConfig | None):
    """A forward and a backward of 67 queries over 131 keys, four heads on two; the kernel of dQ too."""
    q, k, v, dout = (guarded(rows, heads, D, dtype) for rows, heads in ((67, 4), (131, 2), (131, 2), (67, 4)))
    ranges, bounds, q_offset = resolve_mask(mask, q, k)
    results = []
    for deterministic in (False, True):
        call = Attention(tuple(ranges), bounds, q_offset, D**-0.5, 0.0, deterministic)
        out, lse = run_forward(q, k, v, call, forward)
        results += [out, *run_backward([q, k, v, out, lse, dout, torch.ones_like(lse)], call, backward, backward)]
    return results


def capped(D: int) -> list[torch.Tensor]:
    """The public call with softcap and window, gradients through out and lse."""
    q, k, v = (guarded(rows, heads, D, torch.bfloat16).detach() for rows, heads in ((67, 4), (131, 2), (131, 2)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attention(*leaves, AttentionMask(window=50), None, 3.0)
    return [out, *torch.autograd.grad(out.sum() + lse.sum(), leaves)]


def decode(D: int, dtype: torch.dtype, T: int, page_size: int) -> list[torch.Tensor]:
    """Lengths at the ends of tiles, pages and the cache; table entries past a length lie outside the cache."""
    lengths = torch.tensor([131, 0, 1, 64, 128, 129], dtype=torch.int32, device="cuda")
    q = torch.randn(6, T, 8, D, device="cuda", dtype=dtype)
    if page_size:
        pages = -(-131 // page_size)
        table = torch.arange(6 * pages, device="cuda", dtype=torch.int32).flip(0).view(6, pages)
        used = torch.arange(pages, device="cuda")[None] * page_size < lengths[:, None]
        table = torch.where(used, table, 2**30).int()
        k, v = torch.randn(2, 6 * pages, page_size, 2, D, device="cuda", dtype=dtype)
    else:
        table = None
        k, v = torch.randn(2, 6, 131, 2, D, device="cuda", dtype=dtype)
    out, _ = flash_attention_decode(q, k, v, lengths, table, DecodeOptions())
    windowed, _ = flash_attention_decode(q, k, v, lengths, table, DecodeOptions(window=40, softcap=2.0))
    return [out, windowed]


def cases() -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Name to a call that runs some kernels and returns what they wrote."""
    ends = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 30, 67], [0, 65, 131])]
    documents = AttentionMask(cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
    found: dict[str, Callable[[], list[torch.Tensor]]] = {}
    for D in (32, 64, 80, 96, 128, 256):
        found[f"training D{D}"] = lambda D=D: training(D, torch.bfloat16, AttentionMask(), None, None)
        found[f"softcap D{D}"] = lambda D=D: capped(D)
        found[f"decode D{D}"] = lambda D=D: decode(D, torch.bfloat16, 1, 0)
    for D in (64, 128):
        found[f"plain D{D}"] = lambda D=D: training(D, torch.bfloat16, AttentionMask(), PLAIN, PLAIN)
        found[f"documents D{D}"] = lambda D=D: training(D, torch.float16, documents, None, None)
        if capability(None) == 9:
            found[f"Hopper forward D{D}"] = lambda D=D: training(D, torch.bfloat16, documents, HOPPER_FORWARD, None)
    found["float32"] = lambda: training(64, torch.float32, AttentionMask(q_offset=-5), None, None)
    for page_size in (16, 64, 256):
        found[f"decode pages of {page_size}"] = lambda p=page_size: decode(128, torch.bfloat16, 5, p)
    found["decode float32"] = lambda: decode(64, torch.float32, 1, 16)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only the cases whose name holds this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this check needs a CUDA GPU and none was found; run it on one")
    torch.manual_seed(0)
    started, failed, names = time.monotonic(), [], []
    for name, run in cases().items():
        if arguments.only not in name:
            continue
        names.append(name)
        finite = all(bool(x.isfinite().all()) for x in run())  # synchronises, so that a fault is named here
        print(f"{name:24} {'finite' if finite else 'NAN: something outside was read'}", flush=True)
        if not finite:
            failed.append(name)
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"device": torch.cuda.get_device_name(), "cases": names, "failed": failed, "seconds": seconds}))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
