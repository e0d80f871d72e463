"""What a step's pieces of prompts need on the device, made on the host in a few array operations whatever their number.

A piece is the next tokens of one prompt; its history are all tokens of that prompt so far, the piece's own included.
Places are where tokens lie in the cache: page * page_size + offset.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from llm.engine_scheduler import Segment


@dataclass
class PromptArrays:
    """M tokens of the pieces one after the other, and S of their histories; all int64.

    tokens: (3, M) ids, positions, places. history: (S,) places. bounds: (2, M), the interval of the history that each
    token sees. offsets, history_offsets: (pieces + 1,) where each piece begins among the tokens and in the history.
    ends: (R,) the tokens after which one is sampled.
    """

    tokens: np.ndarray
    history: np.ndarray
    bounds: np.ndarray
    offsets: np.ndarray
    history_offsets: np.ndarray
    ends: np.ndarray


def prompt_arrays(segments: list[Segment], page_size: int) -> PromptArrays:
    """The arrays of a step's segments, of which there is at least one."""
    starts = np.array([segment.start for segment in segments], dtype=np.int64)
    counts = np.array([len(segment.token_ids) for segment in segments], dtype=np.int64)
    offsets, history_offsets = running_sum(counts), running_sum(starts + counts)
    pages = np.zeros((len(segments), max(len(segment.request.pages) for segment in segments)), dtype=np.int64)
    for row, segment in enumerate(segments):
        pages[row, : len(segment.request.pages)] = segment.request.pages
    piece, position = ragged(starts, counts, offsets)
    places = pages[piece, position // page_size] * page_size + position % page_size
    every_id = itertools.chain.from_iterable(segment.token_ids for segment in segments)
    ids = np.fromiter(every_id, dtype=np.int64, count=offsets[-1])
    history = places
    if starts.any():
        whose, where = ragged(np.zeros_like(starts), starts + counts, history_offsets)
        history = pages[whose, where // page_size] * page_size + where % page_size
    low = history_offsets[piece]
    bounds = np.stack((low, low + position + 1))
    ends = offsets[1:][[segment.samples for segment in segments]] - 1
    return PromptArrays(np.stack((ids, position, places)), history, bounds, offsets, history_offsets, ends)


def running_sum(counts: np.ndarray) -> np.ndarray:
    """(n,) -> (n + 1,), from 0."""
    sums = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def ragged(starts: np.ndarray, counts: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of counts[i] entries for each i, starts[i] onwards: i and the entry, (sum,) each."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(offsets[-1]) + (starts - offsets[:-1])[index]
