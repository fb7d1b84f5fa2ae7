"""The page: whole and self-contained, hostile text shown as text, runs that are empty, going on or damaged."""

import html.parser
import re

import pytest
from test_export import content, tiny_run

import checkpoint
import export
import report


class Page(html.parser.HTMLParser):
    """The tags, attributes and text of a page; fails on a tag that is not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page(run):
    return Page(report.page(run)[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_run(tmp_path_factory)[0]


HOSTILE = (
    5 * "\u0301" + "</pre><script>alert(1)</script>&amp; \u202eevil\u202c \x1b[2J\x07 \ud800 \u200b\ufeff \U000e0041\t\r|\u2028"
)


def made(run, updates, **recipe):
    """A run of `updates` updates without checkpoints, whose completions are hostile."""
    checkpoint.create_run(run, {"recipe": {"algorithm": HOSTILE, "updates": 9, **recipe}, "versions": {HOSTILE: HOSTILE}})
    for n in range(updates):
        texts = {"prompt": HOSTILE, "response": HOSTILE * 500, "label": "x" * 5000, "finish_reason": HOSTILE}
        checkpoint.append_rollouts(run, n, [{"sample": i, "reward": i % 2, "response_tokens": [1], **texts} for i in range(8)])
        metrics = {"reward_mean": 0.5, "loss": float("nan"), "entropy": 1e-9 * n, "max_logprob_error": 0.0 if n else 1e-6}
        checkpoint.append_metrics(run, {"update": n, **metrics, "eval": HOSTILE, "seconds": {"total": 1.0, "train": HOSTILE}})
    return run


def test_a_run_is_one_page_with_its_curves_times_completions_audit_and_settings(run, capsys):
    before = content(run)
    assert export.exit_code("report.py", report.main, [str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}: 2 updates\n"
    found = Page((run / "report.html").read_text())
    text = " ".join(found.text)
    for title in ("Reward", "Held-out accuracy", "Policy loss", "Entropy, nats a token", "KL, nats a token",
                  "Log-probability gap, trainer to rollout", "Seconds of an update"):  # fmt: skip
        assert title in found.text, title
    assert found.tags.count("svg") == 10 and found.tags.count("article") == 12
    assert "finished: version 3 committed" in text and "WRONG" not in text and "finished" in found.text
    first = checkpoint.read_rollouts(run, 0)[0]
    assert first["prompt"] in found.text and first["response"] in found.text
    versions = checkpoint.read_run(run)["versions"]
    assert {"n_samples_per_prompt", "megatron-core", versions["ray"]} <= set(found.text)
    after = content(run)
    after.pop("report.html")
    assert after == before
    (run / "report.html").unlink()


def test_the_page_fetches_nothing_and_holds_no_script(run):
    text, _ = report.page(run)
    found = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "a", "base"} & set(found.tags)
    assert not {name for name, _ in found.attributes} & {"src", "href", "srcset", "action"}
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert "url(" not in text and "@import" not in text and "http:" not in text and "https:" not in text
    assert ("content", report.POLICY) in found.attributes and "default-src 'none'" in report.POLICY


def test_hostile_text_is_shown_and_does_nothing(tmp_path):
    text, _ = report.page(made(tmp_path / "run", 3))
    found = Page(text)
    assert "script" not in found.tags and "</pre><script>" in "".join(found.text)
    assert all(c == "\n" or c.isprintable() for c in text), "a raw control or bidirectional character"
    for shown in ("U+202E", "U+001B", "U+0007", "U+D800", "U+200B", "U+FEFF", "U+0301", "U+E0041", "U+2028", "\\t", "\\r"):
        assert shown in found.text, shown
    assert "more characters" in "".join(found.text) and len(text) < 2_000_000
    assert text.encode("utf-8")


def test_an_empty_run_is_one_clear_line(tmp_path, capsys):
    run = made(tmp_path / "run", 0)
    assert export.exit_code("report.py", report.main, [str(run)]) == 0
    assert capsys.readouterr().out.strip().endswith("report.html: no update is complete yet")
    found = Page((run / "report.html").read_text())
    assert "No update is complete yet." in found.text and "svg" not in found.tags


def test_a_run_that_is_going_on_is_shown_as_far_as_it_is(tmp_path):
    run = made(tmp_path / "run", 2)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"update": 2, "rew')  # the line that is being written
    with checkpoint.lock_run(run):
        found = page(run)
    assert "going on" in found.text and "2 of 9" in found.text
    assert "stopped" in page(run).text


def test_rollouts_that_are_gone_leave_the_rest_of_the_page(tmp_path):
    run = made(tmp_path / "run", 2)
    checkpoint.rollouts_file(run, 0).unlink()
    found = page(run)
    assert any("000000.jsonl: missing" in text for text in found.text) and "article" in found.tags


def test_bad_input_is_one_line_with_exit_code_2(tmp_path, capsys):
    run = made(tmp_path / "run", 1)
    checkpoint.append_metrics(run, {"update": 7})
    broken = made(tmp_path / "broken", 1)
    (broken / "metrics.jsonl").write_text("no json\n")
    for args, words in (
        ([tmp_path / "no"], "not a run directory"),
        ([run], "metrics.jsonl"),
        ([broken], "metrics.jsonl:1"),
        ([made(tmp_path / "good", 1), "--out", tmp_path / "no" / "page.html"], "page.html"),
    ):
        code = export.exit_code("report.py", report.main, [str(a) for a in args])
        err = capsys.readouterr().err
        assert code == 2 and err.startswith("report.py: error: ") and err.count("\n") == 1 and words in err, err


def test_held_out_figures_of_each_source_are_shown_from_first_to_last_with_pass_at_k(tmp_path):
    def evaluation(updates, share):
        part = {"rows": 4, "accuracy": share, "greedy": share, "pass_at": {"1": share, "4": 2 * share}}
        sources = {"algebra": part, "<b>\u202e": part, "broken": 3, "none": {"rows": None, "pass_at": [], "accuracy": HOSTILE}}
        return {"updates": updates, "samples": 4, **part, "sources": sources}

    run = made(tmp_path / "run", 0)
    for n, e in enumerate(({"before": evaluation(0, 0.25)}, {"after": evaluation(2, 0.5)})):
        checkpoint.append_rollouts(run, n, [])
        checkpoint.append_metrics(run, {"update": n, "reward_mean": 0.5, "eval": e, "seconds": {"total": 1.0}})
    text = page(run).text
    assert "Held-out accuracy by source, first evaluation to last" in text and "algebra" in text and "<b>" in text
    assert text.count("25.0% → 50.0%") == 2 + 4 and text.count("50.0% → 100.0%") == 2 and "pass@4" in text


def test_a_long_run_is_binned_and_its_largest_gap_is_kept():
    points = [(n, 1e-7) for n in range(10_000)]
    points[1234] = (1234, 0.5)
    few = report.binned(points, report.MOST_POINTS, max)
    assert len(few) <= report.MOST_POINTS and max(y for _, y in few) == 0.5 and few[-1][0] == 9999
    assert report.binned([(0, None), (1, 2.0)], 1, report.average) == [(1, 2.0)]


@pytest.mark.parametrize("low, high", [(0, 0), (0.2, 0.9), (-3e-9, 2e-9), (5, 5), (-2, -2), (0, 1e-30), (0, 1e6), (7, 7.0001)])
def test_ticks_are_few_and_span_the_values(low, high):
    marks = report.ticks(low, high, False)
    assert 2 <= len(marks) <= 8 and marks[0] <= low <= high <= marks[-1] and marks[0] < marks[-1]
    assert all(a < b for a, b in zip(marks, marks[1:], strict=False))


@pytest.mark.parametrize("low, high", [(1e-7, 1e-3), (1e-6, 1e-6), (3e-9, 2.0), (1e-3, 1e-3)])
def test_logarithmic_ticks_are_powers_of_ten(low, high):
    marks = report.ticks(low, high, True)
    assert marks[0] <= low * 1.0001 and marks[-1] * 1.0001 >= high and marks[0] < marks[-1]
    assert all(re.fullmatch(r"1e[+-]\d\d", f"{m:.0e}") for m in marks)


def test_the_reward_curve_is_still_a_picture(run, tmp_path):
    copied = tmp_path / "run"
    copied.mkdir()
    (copied / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    assert report.draw_curve(copied).read_bytes().startswith(b"\x89PNG")
