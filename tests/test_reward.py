"""Grading is right, fast where it can be, and bounded: no answer costs more than its own time or changes another's."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reward
from reward import Grade, Grader, last_boxed

BOMB = r"5^{5^{5^{5^{5}}}}"


def boxed(answer: str, label: str = "12") -> tuple[str, str, str]:
    return "prompt", f"so it is \\boxed{{{answer}}}", label


def rewards(grades: list[Grade]) -> list[float]:
    return [grade.reward for grade in grades]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.fixture(scope="module")
def grader():
    with Grader(time_limit_s=10) as grader:  # roomy: the machine that runs the tests may be busy
        yield grader


# --- the answer in the text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"\boxed{12}", "12"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {12}", "12"),
        (r"\boxed{\boxed{12}}", "12"),
        (r"\boxed{\left\{1,2\right.}", r"\left\{1,2\right."),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed{}", ""),
        (r"\boxed 5", None),
        ("12", None),
        ("", None),
    ],
)
def test_the_last_box_with_balanced_braces_is_the_answer(text, answer):
    assert last_boxed(text) == answer


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.text(max_size=60) | st.text(alphabet="\\boxed{}$1 ", max_size=60))
def test_any_text_has_an_answer_or_none(text):
    answer = last_boxed(text)
    assert answer is None or answer in text
    assert last_boxed(text + "\\boxed{7}") == "7"


def test_a_megabyte_of_braces_is_read_in_linear_time():
    started = time.monotonic()
    assert last_boxed("\\boxed{" + "{" * 1_000_000) is None
    assert last_boxed("\\boxed" * 200_000 + "{" + "{}" * 500_000 + "}") == "{}" * 500_000
    assert time.monotonic() - started < 20


# --- Math-Verify -----------------------------------------------------------------------------------------------------


RIGHT = [
    ("12", "12"),
    ("$12$", " 12 "),
    ("012", "12"),
    ("+12", "12"),
    ("12.0", "12"),
    (r"\frac12", "0.5"),
    ("1/2", r"\frac{1}{2}"),
    ("0.5", r"the answer is \boxed{\frac{1}{2}}"),
    (r"\sqrt{2}/2", r"1/\sqrt{2}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"12\text{ cm}", "12"),
    (">", ">"),
    (r"\text{yes}", r"\text{yes}"),
]
WRONG = [("13", "12"), ("-12", "12"), ("", "12"), ("", ""), ("(", "12"), ("x", "12"), ("1/3", "0.5"), ("<", ">")]


def test_equal_answers_earn_one_and_others_zero(grader):
    got = grader.grade([boxed(*pair) for pair in RIGHT + WRONG])
    assert got == [Grade(1.0)] * len(RIGHT) + [Grade(0.0)] * len(WRONG)
    assert (
        grader.grade([("p", "it is 12", "12"), ("p", r"\boxed{12} or \boxed{13}", "12"), ("p", "", "12")])
        == [Grade(0.0)] * 3
    )
    assert grader.grade([]) == []


def test_plain_integers_and_equal_text_need_no_worker_and_are_judged_as_math_verify_does(grader):
    pairs = [(a, b) for a in ("12", "-12", "0012", "+12", "0", "-0", "13") for b in ("12", "-12", "0", "007")]
    with Grader() as quick:
        fast = quick.grade([boxed(*pair) for pair in pairs])
        assert quick._worker is None
    slow = [grader._ask({"answer": a, "label": b})[0] for a, b in pairs]
    assert fast == slow


def _seconds(call) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def test_the_worker_runs_under_one_hash_seed_so_that_sympy_repeats_itself(grader):
    assert grader.grade([boxed("1/2", "0.5")]) == [Grade(1.0)]
    environment = Path(f"/proc/{grader._worker.process.pid}/environ").read_text().split("\0")
    assert "PYTHONHASHSEED=0" in environment


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_nested_power_costs_its_time_limit_once_and_nothing_else():
    with Grader(time_limit_s=1.5) as grader:
        assert grader.grade([boxed("1/2", "0.5")]) == [Grade(1.0)]
        pid = grader._worker.process.pid
        samples = [boxed("1/2", "0.5"), boxed(BOMB), boxed(BOMB), boxed("0.25", "1/4"), boxed("12"), boxed(BOMB)]
        seconds = _seconds(lambda: samples.append(grader.grade(samples)))
        bomb = Grade(0.0, "time")
        assert samples[-1] == [Grade(1.0), bomb, bomb, Grade(1.0), Grade(1.0), bomb]
        assert grader.limits == {"time": 3}
        assert not alive(pid) and alive(grader._worker.process.pid)
        assert seconds < 1.5 + 15  # one limit, and one start of a worker on a busy machine


HOSTILE = [
    r"10^{10^{10}}",
    r"(10^9)!",
    "{" * 900 + "}" * 900,
    r"\frac{" * 300 + "1" + "}{1}" * 300,
    "9" * 1999,
    "a\ud800\udfff\0\x1b[31m\u202e",
    "__import__('os').system('kill -9 $PPID')",
    r"\def\a{\a\a}\a",
    "\r\n\t\v\x85\u2028",
]


def test_hostile_answers_score_nothing_and_change_no_other_reward():
    good = boxed("1/2", "0.5")
    with Grader(time_limit_s=0.8) as grader:
        got = grader.grade([good])
        for answer in HOSTILE:
            started = time.monotonic()
            got = grader.grade([boxed(answer), boxed("12")])
            assert rewards(got) == [0.0, 1.0], answer
            assert time.monotonic() - started < 0.8 + 15
        assert grader.grade([good, boxed("7" * 5_000_000)]) == [Grade(1.0), Grade(0.0)]
        assert grader.grade([boxed("x" * 5_000_000), good]) == [Grade(0.0, "length"), Grade(1.0)]


CUSTOM = """
import os, sys, time, signal, threading
print("loading prints this")
kept = []
def echo(prompt, response, label):
    print("noise", prompt)
    return float(len(prompt) + len(response)) + (label == "\\ud800\\0\\x1b")
def by_response(prompt, response, label):
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "list": [1.0], "huge": 10**400,
            "bool": True, "int": 2, "complex": 1j, "evil": "\\x1b[2J\\n" * 1000}[response]
def raising(prompt, response, label):
    if response == "exit": sys.exit(3)
    raise KeyError("no\\nsuch\\x1bkey")
def limits(prompt, response, label):
    if response == "memory":
        while True: kept.append(bytearray(1 << 20))
    if response == "grow": kept.append(bytearray(40 << 20))
    if response == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if response == "die": os._exit(0)
    if response == "spin": 7 ** (10 ** 9)
    if response == "sleep": time.sleep(1000)
    if response == "torch": return float("torch" in sys.modules)
    if response == "pid": return os.getpid()
    if response == "child":
        child = os.fork()
        if child == 0: time.sleep(1000)
        open(label, "w").write(str(child)); time.sleep(1000)
    return 1.0
not_callable = 3
"""


@pytest.fixture(scope="module")
def custom(tmp_path_factory):
    path = tmp_path_factory.mktemp("custom") / "my_reward.py"
    path.write_text(CUSTOM)
    return path


def one(grader: Grader, response: str, label: str = "") -> Grade:
    return grader.grade([("p", response, label)])[0]


def test_time_memory_and_crash_are_counted_and_the_worker_replaced(custom, tmp_path):
    with Grader(f"{custom}:limits", time_limit_s=1.0, memory_limit_mb=256) as grader:
        for response, limit in [("memory", "memory"), ("crash", "crash"), ("die", "crash"), ("spin", "time")]:
            assert one(grader, "fine") == Grade(1.0)
            assert one(grader, response) == Grade(0.0, limit), response
        assert grader.limits == {"memory": 1, "crash": 2, "time": 1}
        assert one(grader, "torch") == Grade(0.0)
        assert one(grader, "child", str(tmp_path / "child")) == Grade(0.0, "time")
        assert gone_within(int((tmp_path / "child").read_text()), 5), "what a reward started is killed with it"
        # A worker that earlier answers left full is replaced before it would fail an innocent one.
        assert [one(grader, "grow") for _ in range(12)] == [Grade(1.0)] * 12


def test_a_worker_that_died_while_idle_costs_no_answer(custom):
    with Grader(f"{custom}:limits") as grader:
        pid = int(one(grader, "pid").reward)
        os.kill(pid, signal.SIGKILL)
        assert one(grader, "fine") == Grade(1.0)
        assert not grader.limits


def test_an_interrupted_wait_leaves_no_reply_for_the_next_question(custom, monkeypatch):
    with Grader(f"{custom}:limits", time_limit_s=20) as grader:

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(grader._worker, "_receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                one(grader, "fine")
        assert one(grader, "torch") == Grade(0.0)


def test_closing_ends_the_worker_and_a_closed_grader_grades_no_more(custom):
    grader = Grader(f"{custom}:limits")
    pid = grader._worker.process.pid
    grader.close()
    grader.close()
    assert not alive(pid)
    with pytest.raises(RuntimeError, match="closed"):
        grader.grade([])


@pytest.mark.parametrize("state", ["idle", "sleep", "spin"])
def test_a_worker_ends_soon_after_its_parent_is_killed(custom, state):
    program = (
        "import sys, reward\n"
        f"grader = reward.Grader({str(custom) + ':limits'!r}, time_limit_s=1.0)\n"
        "print(grader._worker.process.pid, flush=True)\n"
        # The parent asks with a long limit and is killed while it waits: only the worker's own bounds are left.
        f"grader.time_limit_s = 1000\n"
        f"grader.grade([('p', {state!r}, '')]) if {state!r} != 'idle' else sys.stdin.read()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(reward.__file__).parent)}
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    worker = int(parent.stdout.readline())
    time.sleep(0.3)
    assert alive(worker)
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    assert gone_within(worker, 15)


# --- rewards of one's own --------------------------------------------------------------------------------------------


def test_a_custom_reward_is_called_with_prompt_response_and_label_whatever_they_hold(custom, monkeypatch):
    text = "\ud800\0\x1b\u202e\r\n" + "x" * 3_000_000
    with Grader(f"{custom}:echo", time_limit_s=20) as grader:
        assert grader.grade([("pp", text, "\ud800\0\x1b"), ("", "", "")]) == [Grade(len(text) + 3.0), Grade(0.0)]
    monkeypatch.chdir(custom.parent)
    with Grader("my_reward:echo") as grader:
        assert grader.grade([("pp", "rrr", "")]) == [Grade(5.0)]


def test_a_result_that_is_no_finite_number_is_an_error_that_names_function_and_value(custom):
    with Grader(f"{custom}:by_response") as grader:
        assert grader.grade([("", "bool", ""), ("", "int", "")]) == [Grade(1.0), Grade(2.0)]
        for response, shown in [
            ("nan", "nan (float)"),
            ("inf", "inf (float)"),
            ("none", "None (NoneType)"),
            ("text", "'1.0' (str)"),
            ("list", "[1.0] (list)"),
            ("complex", "1j (complex)"),
            ("huge", "(int)"),
            ("evil", "(str)"),
        ]:
            with pytest.raises(ValueError, match="by_response returned") as caught:
                grader.grade([("", "int", ""), ("", response, "")])
            message = str(caught.value)
            assert "sample 1" in message and shown in message and message.isprintable() and len(message) < 400


def test_an_exception_in_a_custom_reward_is_an_error_of_one_printable_line(custom):
    with Grader(f"{custom}:raising") as grader:
        for response, name in (("", "KeyError"), ("exit", "SystemExit")):
            with pytest.raises(ValueError, match=f"sample 0: raising raised {name}") as caught:
                one(grader, response)
            assert str(caught.value).isprintable()


def test_a_reward_that_cannot_be_loaded_is_refused_at_construction(custom, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module_anywhere\n")
    for spec, message in [
        ("nothing", "expected 'module:function'"),
        (":f", "expected 'module:function'"),
        (f"{custom}:", "expected 'module:function'"),
        (f"{tmp_path}/none.py:f", "there is no file"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("json.no_such:f", "there is no module 'json.no_such'"),
        (f"{custom}:missing", "has no function 'missing'"),
        (f"{custom}:not_callable", "has no function 'not_callable'"),
        (f"{broken}:f", "importing it failed: ModuleNotFoundError"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            Grader(spec)
        assert "\n" not in str(caught.value)
    for bad in ({"time_limit_s": 0}, {"time_limit_s": float("nan")}, {"memory_limit_mb": 0}):
        with pytest.raises(ValueError, match="limit must be"):
            Grader(**bad)


def test_reward_source_is_the_file_and_its_digest_without_importing_it(custom, monkeypatch):
    import blake3

    digest = blake3.blake3(custom.read_bytes()).hexdigest()
    assert reward.reward_source(None) == (None, None)
    assert reward.reward_source(f"{custom}:echo") == (str(custom), digest)
    monkeypatch.chdir(custom.parent)
    assert reward.reward_source("my_reward:echo") == (str(custom), digest)
    assert reward.reward_source("json.decoder:JSONDecoder")[0] == json.decoder.__file__
    assert "my_reward" not in sys.modules
    with pytest.raises(ValueError, match="there is no module"):
        reward.reward_source("no_such_module:f")
