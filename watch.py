"""Curves while a run goes on: every number of metrics.jsonl, for TensorBoard always, for W&B or trackio with --track.

`metrics.jsonl` stays the record; what is written here is a copy for looking at, and a resume begins it again where the
run goes on. Nothing here can end a run. With --profile, also what the processes of one update did, operator by operator.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

TRACKERS = ("wandb", "trackio")  # both have init(project, name, config), log(dict, step) and finish()


def numbers(row: dict, prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, value) of every number in an update's row; nested ones as `seconds/train`, lists left out."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


def open_watchers(run: Path, start: int, track: str | None, settings: dict) -> tuple[Callable[[dict], None], Callable[[], None]]:
    """(show(row), close()). start: the first update that will be shown; what a killed run left after it is hidden.

    ValueError: the package that `track` names is not installed.
    """
    shows, closes = [], []
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        print("no TensorBoard curves: tensorboardX is not installed", file=sys.stderr, flush=True)
    else:
        _one_line_for("_EventLoggerThread")
        board = SummaryWriter(str(run / "tensorboard"), purge_step=start, flush_secs=10)
        shows.append(lambda row: [board.add_scalar(name, value, row["update"]) for name, value in numbers(row)])
        closes.append(board.close)
    if track:
        import importlib

        tracker = importlib.import_module(track)
        tracker.init(project="recurrent-policy-training", name=run.absolute().name, config=settings)
        shows.append(lambda row: tracker.log(dict(numbers(row)), step=row["update"]))
        closes.append(tracker.finish)

    def safely(calls: list, *args) -> None:
        for call in list(calls):
            try:
                call(*args)
            except Exception as error:  # a full disk, a network that is away: the curves end, the run does not
                calls.remove(call)
                print(f"curves end here: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    return (lambda row: safely(shows, row)), (lambda: safely(closes))


def _one_line_for(kind: str) -> None:
    """An exception in a thread of this class is one line: tensorboardX 2.6.5 writes in one, which prints pages on a full disk."""
    before = threading.excepthook

    def hook(seen) -> None:
        if type(seen.thread).__name__ == kind:
            print(f"curves end here: {seen.exc_type.__name__}: {seen.exc_value}", file=sys.stderr, flush=True)
        else:
            before(seen)

    threading.excepthook = hook


# --- traces of one update --------------------------------------------------------------------------------------------


def start_traces(processes: dict) -> None:
    """Let every process begin to record its operators, and its kernels where it has a GPU."""
    import ray

    ray.get([actor.__ray_call__.remote(_start_trace) for actor in processes.values()])


def save_traces(folder: Path, processes: dict) -> None:
    """End the recording and write one trace a process, trainer-0.json.gz, …: Chrome's format, which Perfetto opens."""
    import ray

    folder.mkdir(exist_ok=True)
    paths = {name: str(folder.absolute() / f"{name}.json.gz") for name in processes}
    ray.get([actor.__ray_call__.remote(_save_trace, paths[name]) for name, actor in processes.items()])


def _start_trace(actor) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    actor.trace = profile(activities=kinds)
    actor.trace.start()


def _save_trace(actor, path: str) -> None:
    if not hasattr(actor, "trace"):
        return  # an engine that took the place of one that died
    actor.trace.stop()
    actor.trace.export_chrome_trace(path)
    del actor.trace
