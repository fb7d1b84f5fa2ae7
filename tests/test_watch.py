"""Curves: every number of an update's row reaches TensorBoard and the tracker, and neither can end a run."""

import struct
import sys
import threading
import types

import watch

ROW = {"update": 3, "loss": 0.5, "grad_norm_steps": [1, 2], "seconds": {"train": 2.0}, "eval": {"after": {"accuracy": 0.25}}}


def scalars(folder) -> dict:
    """{name: (step, value)} of the event files in a folder."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:  # a record: length, its checksum, the event, its checksum
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            found.update((v.tag, (event.step, v.simple_value)) for v in event.summary.value if v.HasField("simple_value"))
            data = data[16 + size :]
    return found


def test_every_number_reaches_tensorboard_under_its_name(tmp_path):
    show, close = watch.open_watchers(tmp_path, 0, None, {})
    show(ROW)
    close()
    assert scalars(tmp_path / "tensorboard") == {
        "update": (3, 3.0), "loss": (3, 0.5), "seconds/train": (3, 2.0), "eval/after/accuracy": (3, 0.25),
    }  # fmt: skip


def test_a_tracker_that_fails_ends_its_curves_and_nothing_else(tmp_path, monkeypatch, capsys):
    seen = []

    def log(numbers, step):
        seen.append((step, numbers["loss"]))
        raise ConnectionError("away")

    module = types.SimpleNamespace(init=lambda **settings: seen.append(settings["name"]), log=log, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "trackio", module)
    show, close = watch.open_watchers(tmp_path, 0, "trackio", {"lr": 1})
    show(ROW)
    show({**ROW, "update": 4})
    close()
    assert seen == [tmp_path.name, (3, 0.5)] and "curves end here" in capsys.readouterr().err
    assert scalars(tmp_path / "tensorboard")["loss"] == (4, 0.5)


def test_a_full_disk_in_tensorboards_own_thread_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    show, close = watch.open_watchers(tmp_path, 0, None, {})
    (thread,) = [t for t in threading.enumerate() if type(t).__name__ == "_EventLoggerThread"]

    def full(*_):
        raise OSError(28, "No space left on device")

    thread._record_writer.write_event = full
    show({"update": 0, "loss": 1.0})
    thread.join(30)
    assert capsys.readouterr().err == "curves end here: OSError: [Errno 28] No space left on device\n"
