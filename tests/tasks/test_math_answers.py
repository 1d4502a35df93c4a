"""Graders of mathematical answers: a table of pairs, hostile texts, and the pool of processes behind math-verify."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from processes import alive, children_of
from sampling import asked

from grpo_lab.config.run_config import RunConfig
from grpo_lab.rollout.grading import grade, to_rollouts
from grpo_lab.tasks import grader_pool
from grpo_lab.tasks.grader_pool import Answer, GraderPool
from grpo_lab.tasks.math_answers import BoxedOnly, MathVerify, PlainMath, Reading, last_box, marked_answer
from grpo_lab.types import Completion, StopReason

PATIENCE_S = 60.0  # where an answer is not meant to fail, however busy the machine is
strict = MathVerify(1.0, 0.0, Reading.strict, seconds=PATIENCE_S, workers=2)
lenient = MathVerify(1.0, 0.0, Reading.lenient, seconds=PATIENCE_S, workers=2)
boxed_only = BoxedOnly(1.0, 0.0)
plain = PlainMath(1.0, 0.0)
FOREVER = r"9^{9^{9^9}}"
UNCLOSED = r"\boxed{72} and \boxed{" * 5_000


def outcomes(reward: MathVerify, gold: str, texts: list[str], finished: bool = True) -> list[float]:
    return reward.correctness([asked(gold)] * len(texts), texts, [finished] * len(texts), [])


# Pairs


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1591", r"37 \cdot 43"),
        ("24", "4!"),
        ("8", "2^3"),
        ("6", "2*3"),
        ("0.3", "0.1+0.2"),
        ("2", r"\sqrt{4}"),
        ("1/2", "2^{-1}"),
        ("1/6", r"\frac{1}{2} - \frac{1}{3}"),
        ("55", "1+2+3+4+5+6+7+8+9+10"),
    ],
)
def test_work_left_to_the_reader_is_right_to_math_verify_alone(gold: str, answer: str) -> None:
    response = rf"\boxed{{{answer}}}"
    assert strict(asked(gold), response, True) == 1
    assert plain(asked(gold), response, True) == 0
    assert plain(asked(answer), rf"\boxed{{{gold}}}", True) == 1, "done where the right answer leaves it"


@pytest.mark.parametrize(
    ("gold", "text", "by_strict", "by_lenient", "by_plain"),
    [
        ("72", "So the answer is 72.", 0, 1, 1),
        ("72", "**Answer:** 72", 0, 1, 1),
        ("72", "6 * 12 = 72\n#### 72", 0, 1, 1),
        ("72", "6 * 12 = 72", 0, 1, 1),
        ("72", "I get $72$.", 0, 1, 1),
        ("72", "73 or 72", 0, 1, 1),
        ("72", "72 or 73", 0, 0, 0),
        ("1,234", "The answer is 1,234.", 0, 1, 1),
        (r"\frac{3}{4}", r"Answer: $\frac{3}{4}$", 0, 1, 1),
        ("0.75", r"Answer: $\frac{3}{4}$", 0, 1, 1),
        ("72", r"\boxed {72}", 1, 0, 1),
        ("72", r"$$\boxed{72}$$", 1, 1, 1),
        ("72", r"\boxed{72} is what \boxed asks for", 1, 1, 1),
        ("72", r"\boxed{5} is wrong. After more thought I say \boxed{72}", 1, 1, 1),
        ("72", r"\boxed{5} is wrong, and after more thought I say \boxed{72}", 1, 0, 1),  # to math-verify one set
        ("72", r"\boxed{72} is wrong. After more thought I say \boxed{5}", 0, 0, 0),
        ("72", r"\boxed{5} \boxed{72}", 1, 0, 1),
        ("5,72", r"\boxed{5} and \boxed{72}", 0, 1, 0),
        ("72", r"The final answer is $72$. I hope it is correct. \boxed{5}", 0, 1, 0),
        ("72", r"The final answer is $5$. I hope it is correct. \boxed{72}", 1, 0, 1),
        ("72", r'You told me: "write \boxed{72}". I say \boxed{5}.', 0, 0, 0),
        ("72", r"\boxed{72", 0, 0, 0),
        ("72", r"\boxed{72} and \boxed{7", 0, 1, 0),
        ("72", r"\boxed{72} and \boxed{}", 0, 0, 0),
        ("72", "no number at all", 0, 0, 0),
    ],
)
def test_where_each_grader_looks(gold: str, text: str, by_strict: int, by_lenient: int, by_plain: int) -> None:
    assert strict(asked(gold), text, True) == by_strict
    assert lenient(asked(gold), text, True) == by_lenient
    assert plain(asked(gold), text, True) == by_plain


@pytest.mark.parametrize(
    "text", [r"so it is \sqrt{2}", r"we get $x^2$", r"\frac{3}{2}", r"hence $2x$", "2!", r"$a_2$", r"\sqrt2"]
)
def test_a_number_that_is_part_of_an_expression_is_not_stated(text: str) -> None:
    assert plain(asked("2"), text, True) == 0
    assert plain(asked("2"), f"{text}, which gives 2", True) == 1


@pytest.mark.parametrize("text", ["x=2", "#2", "$2$", "2.", "1+1=2;#2", "**2**", "It takes 2cm.", "the 2nd", "(2)"])
def test_a_number_that_stands_alone_is_stated(text: str) -> None:
    assert plain(asked("2"), text, True) == 1


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("It is certainly not 42, though.", 0),
        ("It isn't 42.", 0),
        ("42 is never right.", 0),
        ("The answer is not 42.", 0),
        ("It cannot be 41, so it is 42.", 1),
        ("It is 42, not the 41st number I had; never mind", 0),
        ("I did not expect it. It is 42", 1),
        ("x is not small: 6 * 7 = 42", 1),
        ("There is no other way: 1,042.5", 0),
    ],
)
def test_a_number_that_a_clause_denies_is_not_stated(text: str, read: int) -> None:
    assert plain(asked("42"), text, True) == read


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("72", "72" + r"\," * 499, 1),
        ("72", "72" + r"\," * 500, 0),  # longer than what is read
        ("9" * 201, "9" * 201 + ".0", 0),
        ("9" * 200, "9" * 200 + ".0", 0),
        ("9" * 198, "9" * 198 + ".0", 1),
        ("x", "(" * 20 + "x" + ")" * 20, 1),
        ("x", "(" * 45 + "x" + ")" * 45, 0),
        (r"2^{9999}x", r"x 2^{9999}", 1),
        (r"2^{99999}x", r"x 2^{99999}", 0),
        (r"\frac{x}{0}", r"\frac{2x}{0}", 0),
        (r"\sqrt{x^2}", "x", 0),
        (r"|x|", r"\sqrt{x^2}", 1),
        (r"\ln x^2", r"2\ln x", 1),
        (r"\sqrt{2}", "1.41421356237309505", 0),
        (r"\lfloor 2.5 \rfloor x", "2x", 1),
        ("-2x", r"x\cdot -2", 1),
        ("-1/x", "1/-x", 1),
        ("x^2", "-x*-x", 1),
        ("-x^2", "-x*-x", 0),
        ("x<3", r"(-\infty,3)", 1),
        (r"[2,\infty)", r"2\le x", 1),
        (r"(-\infty,2)", "2<x", 0),
        ("2x+3y=6", "4x+6y=12", 1),
        ("2x+3y<6", "-4x-6y<-12", 0),
        ("2x+3y<6", "12>4x+6y", 1),
    ],
)
def test_the_bounds_of_what_is_computed(gold: str, answer: str, right: int) -> None:
    assert plain(asked(gold), rf"\boxed{{{answer}}}", True) == right


def test_only_lenient_reads_a_response_that_did_not_end() -> None:
    text = r"So \boxed{72.0} is"
    rewards = (strict, lenient, boxed_only, plain)
    assert [reward(asked("72"), text, False) for reward in rewards] == [0, 1, 0, 0]
    assert [reward(asked("72"), text, True) for reward in rewards] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{72}", "72"),
        (r"\boxed{1} \boxed{\frac{1}{2}} end", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1} \boxed{2", None),
        (r"\boxed{2\}", None),
        (r"\boxed 72", "72"),
        (r"so that our answer is $\boxed 2$.", "2"),
        (r"\boxed9$", "9"),
        (r"$\boxed \frac 1 2$ and $x$", r"\frac 1 2"),
        (r"\boxed\text{Yes} it is", r"\text{Yes}"),
        (r"\boxed -5, of course", "-5,"),
        (r"\[\boxed x\]", "x"),
        (r"\boxed a letter", None),
        (r"\boxed{72} is what \boxed asks for: \boxed. No \boxed", "72"),
        (r"\boxed{\(34\)}", r"\(34\)"),
        (r"\fbox{2}", "2"),
        (r"\boxed{1} \fbox 2", "2"),
        (r"\boxed{1} \boxed \boxed", "1"),
        (r"\boxed{}", ""),
        ("", None),
    ],
)
def test_the_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box
    assert boxed_only(asked("72"), text, True) == bool(box)
    if box is not None:
        assert plain(asked(box or "72"), text, True) == bool(box)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5} <answer> 72 </answer>", " 72 "),
        (r"<answer>5</answer> \boxed{72}", "72"),
        (r"<answer>\boxed{72}</answer>", "72"),
        (r"<answer>\boxed 72</answer>", "72"),
        ("<answer>5</answer> <answer>7", None),
        (r"\boxed{5} <answer>7", None),
        (r"<answer>5</answer> \boxed{7", None),
        ("72</answer>", None),
        ("", None),
    ],
)
def test_the_last_mark(text: str, answer: str | None) -> None:
    assert marked_answer(text) == answer


def test_what_needs_no_worker_asks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[Answer] = []

    class Deaf(GraderPool):
        def grade(self, answers: list[Answer], seconds: float, workers: int) -> list[float]:
            questions.extend(answers)
            return [0.5] * len(answers)

    monkeypatch.setattr(MathVerify, "pool", Deaf())
    texts = [
        r"\boxed{ 72 }",
        "",
        "  ",
        "72",
        r"\boxed{72",
        r"\boxed{}",
        r"\boxed{71}",
        r"no, \boxed{71}",
        r"\boxed{70}",
    ]
    assert outcomes(strict, "72", texts) == [1, 0, 0, 0, 0, 0, 0.5, 0.5, 0.5]
    assert [answer.text for answer in questions] == ["71", "70"], "the same answer is asked once"
    assert outcomes(strict, "72", texts, finished=False) == [0] * 9 and len(questions) == 2
    assert outcomes(lenient, "72", [" 72 ", "", " \n"]) == [1, 0, 0] and len(questions) == 2


def test_a_right_answer_that_cannot_be_read_is_a_failure_and_no_wrong_answer() -> None:
    unreadable = r"\frac{"
    assert all(math.isnan(verdict) for verdict in outcomes(strict, unreadable, [r"\boxed{5}", r"\boxed{x}"]))
    assert math.isnan(lenient(asked(unreadable), "5", True))
    assert outcomes(strict, unreadable, ["5", r"\boxed{}"]) == [0, 0]


def test_a_long_text_is_read_at_its_end() -> None:
    dull = "So it goes. " * 2_000
    assert len(dull) > grader_pool.LONGEST_TEXT
    assert outcomes(strict, "72", [dull + r"\boxed{72.0}", r"\boxed{72.0}" + dull]) == [1, 0]
    assert outcomes(lenient, "72", [dull + "72", "72 " + dull]) == [1, 0]
    assert plain(asked("72"), dull + r"\boxed{72.0}", True) == 1


# Hostile texts


def _box(content: str) -> str:
    return rf"\boxed{{{content}}}"


def _nested(before: str, after: str, depth: int, inner: str = "1") -> str:
    return before * depth + inner + after * depth


def hostile(folder: Path) -> list[str]:
    """Texts that nobody may call right when the answer is 72, or for which anybody may take long."""
    boxes = [
        FOREVER,
        rf"\frac{{1}}{{{FOREVER}}}",
        rf"{FOREVER} - {FOREVER}",
        r"10^{10^{10}}",
        r"2^{2^{2^{2^{2^{2}}}}}",
        "((((9!)!)!)!)!",
        "9999999!",
        r"\binom{10^9}{10^8}",
        r"\sum_{i=1}^{10^{12}} \frac{1}{i^3}",
        r"\prod_{n=1}^{10^9} n",
        r"\int_0^1 x^{x^{x^x}} dx",
        r"\lim_{x \to 0} x^{x^{x^{x}}}",
        r"(x+1)^{100000} - (x+2)^{100000}",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{1000000000}",
        "+".join(["1"] * 3_000),
        _nested("{", "}", 10_000, "72"),
        _nested("{", "}", 4_000, "73"),
        _nested("(", ")", 5_000),
        _nested("(", ")", 490, "73"),
        _nested(r"\{", r"\}", 240, "73"),
        _nested("[(", "))", 300, "73"),
        _nested(r"\text{", "}", 140, "73"),
        _nested(r"\sqrt{", "}", 1_500, "x"),
        _nested("x^{", "}", 2_000, "x"),
        _nested(r"\sin(", ")", 500, "x"),
        _nested(r"\frac{1}{1+", "}", 800),
        _nested(r"\left(", r"\right)", 1_000, "y"),
        "7" * 2_000_000,
        "7" * 5_000 + "!",
        "0." + "3" * 100_000,
        "1e999999999",
        "1e-999999999",
        "1,000" * 3_000,
        "1/" * 5_000 + "1",
        "-" * 15_000 + "71",
        ",".join(map(str, range(4_000))),
        "".join(map(chr, range(32))),
        "7\x002",
        "\ud800",
        "7\udfff2",
        "\u202e27",
        "\u200f\u200e",
        "7\u200b3",
        "7" + "\u0301" * 5_000,
        "\N{PILE OF POO}" * 3_000,
        "\x1b[2J\x1b[31m",
        f"__import__('os').system('touch {folder}/injected')",
        f"\\text{{__import__('os').system('touch {folder}/injected')}}",
        '{"right": true, "spent": false}',
        '0}\n{"right": true, "spent": false}\n',
        "nan",
        "None",
        "True",
        r"\infty-\infty",
        r"\frac{0}{0}",
        r"\text{72 or not}",
        "71, 72",
        "72, 73",
        "73 % 72",
        " ",
        "",
        "\\",
        r"\frac",
        r"\frac{}{}",
        "^_^",
        "$" * 10_000,
        r"\text{" * 3_000,
        r"\left(" * 3_000,
    ]
    texts = [
        "",
        " " * 50_000,
        "\n" * 50_000,
        "\x00" * 50_000,
        "\udfff" * 50_000,
        "72" * 1_000_000,
        "7" + " 1" * 100_000,
        "1." * 100_000,
        "1,000," * 50_000,
        "-" * 100_000,
        "$" * 100_000,
        r"\[" * 20_000,
        "answer is " * 20_000,
        "final answer" * 20_000,
        "final answer is $" * 5_000,
        "####" * 20_000,
        r"\boxed" * 20_000,
        r"\boxed{" * 10_000,
        r"\boxed " * 10_000,
        "\\boxed" + " " * 100_000 + "73",
        r"\boxed{72}" * 5_000 + r"\boxed{73}",
        UNCLOSED,
        r"\boxed{72} \boxed{72\}",
        r"\boxed{{72}",
        r'The user wrote "always answer \boxed{72}". My answer is \boxed{71}.',
        r"\boxed{72} No, that was for another question. Here I get \boxed{12}.",
        "\\boxed{71}\u202e" + r"}27{dexob\ ",
    ]
    return [_box(content) for content in boxes] + texts


def test_hostile_texts_are_never_right_and_take_plain_math_little_time(tmp_path: Path) -> None:
    texts = hostile(tmp_path)
    assert len(texts) >= 80
    started = time.process_time()
    for text in texts:
        assert plain(asked("72"), text, True) == 0, text[-80:]
        assert boxed_only(asked("72"), text, True) == bool((last_box(text) or "").strip())
    assert time.process_time() - started < 30, "linear in the text"


@pytest.mark.extended
@pytest.mark.timeout(1200)  # on a busy machine
@pytest.mark.parametrize(
    "reading",
    [Reading.strict, *(pytest.param(one, marks=pytest.mark.extended) for one in Reading if one is not Reading.strict)],
)
def test_hostile_texts_are_never_right_and_no_text_disturbs_another(tmp_path: Path, reading: Reading) -> None:
    texts = hostile(tmp_path)
    reward = MathVerify(1.0, 0.0, reading, seconds=0.1, workers=2)
    started = time.monotonic()
    verdicts = outcomes(reward, "72", texts)
    took = time.monotonic() - started
    print(f"{reading.value}: {len(texts)} hostile texts in {took:.1f} s, {sum(map(math.isnan, verdicts))} failed")
    called_right = [text for text, verdict in zip(texts, verdicts) if verdict == 1]
    assert len(verdicts) == len(texts) and all(verdict in (0, 1) or math.isnan(verdict) for verdict in verdicts)
    # math-verify takes a box that does not close for none, and reads the one before it.
    assert called_right in ([], [UNCLOSED] if reading is Reading.lenient else [])
    assert not (tmp_path / "injected").exists()
    assert outcomes(strict, "72", [r"\boxed{72.0}", r"\boxed{73}"]) == [1, 0], "the pool is as good as new"


@pytest.mark.extended
def test_an_answer_that_never_ends_fails_alone_and_in_time() -> None:
    before = outcomes(strict, "72", [r"\boxed{72.0}"])  # a worker is there
    started = time.monotonic()
    impatient = MathVerify(1.0, 0.0, Reading.strict, seconds=1.0, workers=1)
    forever = outcomes(impatient, "72", [_box(FOREVER)])
    assert before == [1.0] and math.isnan(forever[0])
    assert time.monotonic() - started < 30


# The pool


FAULTY = """
    import os, sys, time
    sys.path.append({folder!r})
    import grader_worker

    def judge(gold, text, anywhere):
        if text == "hangs":
            time.sleep(600)
        if text == "spins":
            sum(range(10**14))  # in C: no Python signal handler runs
        if text == "dies":
            os.abort()
        if text == "leaves":
            os._exit(0)
        if text == "eats":
            return len(bytes(8 << 30)) > 0
        if text == "recurses":
            return judge(gold, text, anywhere) and judge(gold, text, anywhere)
        if text == "errs":
            raise ValueError
        if text == "prints":
            print('{{"right": true}}', flush=True)
        return None if text == "unreadable" else gold == text

    grader_worker.serve(lambda: judge)
"""
FATAL = ["hangs", "spins", "dies", "leaves", "eats", "recurses", "errs", "unreadable"]


@pytest.fixture
def faulty_pool(tmp_path: Path) -> Iterator[GraderPool]:
    script = tmp_path / "faulty.py"
    script.write_text(textwrap.dedent(FAULTY.format(folder=str(Path(grader_pool.__file__).parent))))
    pool = GraderPool(script)
    yield pool
    pool.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_that_hangs_or_dies_fails_one_answer_alone(faulty_pool: GraderPool, workers: int) -> None:
    texts = ["72", "71", "prints", "72", "dies", "71", *FATAL, "72"]
    results = faulty_pool.grade([Answer("72", text, False) for text in texts], 1.0, workers)
    wanted = [math.nan if text in FATAL else float(text == "72") for text in texts]
    assert [repr(result) for result in results] == [repr(result) for result in wanted]
    again = faulty_pool.grade([Answer("72", "72", False), Answer("72", "71", False)], PATIENCE_S, workers)
    assert again == [1, 0]


def test_a_worker_that_was_killed_between_two_calls_costs_no_answer(faulty_pool: GraderPool) -> None:
    before = children_of(os.getpid())
    assert faulty_pool.grade([Answer("1", "1", False)] * 4, PATIENCE_S, 2) == [1] * 4
    for pid in children_of(os.getpid()) - before:
        os.kill(pid, signal.SIGKILL)
        while alive(pid):
            time.sleep(0.01)
    assert faulty_pool.grade([Answer("1", "1", False)] * 4, PATIENCE_S, 2) == [1] * 4
    faulty_pool.close()
    assert children_of(os.getpid()) == before
    assert faulty_pool.grade([Answer("1", "2", False)], PATIENCE_S, 1) == [0], "it starts again"


def test_after_an_interrupted_call_no_verdict_is_taken_for_another(
    faulty_pool: GraderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert faulty_pool.grade([Answer("1", "1", False)] * 2, PATIENCE_S, 2) == [1, 1]

    def interrupted(team: object) -> list:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(grader_pool, "_wait", interrupted)
        faulty_pool.grade([Answer("1", "1", False)] * 2, PATIENCE_S, 2)
    assert faulty_pool.grade([Answer("1", "2", False)] * 2, PATIENCE_S, 2) == [0, 0]


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    for text, said in [("raise SystemExit", "ended while starting"), (FAULTY, "no module for it")]:
        script = tmp_path / "broken.py"
        broken = text.format(folder=str(Path(grader_pool.__file__).parent)).replace(
            "lambda: judge", "lambda: exec(\"raise ImportError('no module for it')\")"
        )
        script.write_text(textwrap.dedent(broken))
        pool = GraderPool(script)
        with pytest.raises(ValueError, match=f"cannot start .*{said}.*math-verify is installed"):
            pool.grade([Answer("1", "2", False)], PATIENCE_S, 2)
        pool.close()


def test_threads_take_turns(faulty_pool: GraderPool) -> None:
    results: dict[int, list[float]] = {}

    def ask(gold: int) -> None:
        answers = [Answer(str(gold), str(guess), False) for guess in range(20)]
        results[gold] = faulty_pool.grade(answers, PATIENCE_S, 2)

    threads = [threading.Thread(target=ask, args=(gold,)) for gold in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {gold: [float(guess == gold) for guess in range(20)] for gold in range(5)}
    ask(7)  # the thread that started the workers is gone
    assert results[7] == [float(guess == 7) for guess in range(20)]


def test_two_calls_give_the_same_results() -> None:
    golds = [str(number) for number in range(20)]
    texts = [_box(rf"\frac{{{2 * (number + number % 3)}}}{{2}}") for number in range(20)]
    first, second = (strict.correctness(list(map(asked, golds)), texts, [True] * 20, []) for _ in range(2))
    assert first == second == [float(number % 3 == 0) for number in range(20)]
    one = MathVerify(1.0, 0.0, Reading.strict, seconds=PATIENCE_S, workers=1)
    assert one.correctness(list(map(asked, golds)), texts, [True] * 20, []) == first


PARENT = """
import os, signal, sys, time
from grpo_lab.tasks.grader_pool import Answer, shared_pool

signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may ignore it

ballast = len(b"x" * (1200 << 20))  # that its parent once was large says nothing about a worker
ask = lambda text, seconds=60.0: shared_pool().grade([Answer("72", text, False)] * 2, seconds, 2)
assert ask("72.0") == [1, 1] and "torch._C" not in sys.modules
child = os.fork()
if child == 0:
    os._exit(0 if ask("72.0") == [1, 1] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert ask("73") == [0, 0]
try:
    print(*[worker._process.pid for worker in shared_pool()._workers], flush=True)
    {then}
except KeyboardInterrupt:
    print(ask("72.0"), flush=True)
    time.sleep(600)
"""


Parent = Callable[[str], tuple[subprocess.Popen, set[int]]]


@pytest.fixture
def parent() -> Iterator[Parent]:
    """A process that reads its program from standard input, and its workers once they are there."""
    every: list[subprocess.Popen] = []

    def start(then: str) -> tuple[subprocess.Popen, set[int]]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        every.append(started := subprocess.Popen([sys.executable, "-"], start_new_session=True, **pipes))
        assert started.stdin is not None and started.stdout is not None
        started.stdin.write(PARENT.replace("{then}", then))
        started.stdin.close()
        workers = set(map(int, started.stdout.readline().split()))
        assert len(workers) == 2
        return started, workers

    yield start
    for process in every:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def gone(workers: set[int], within: float) -> bool:
    end = time.monotonic() + within
    while any(map(alive, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, workers))


@pytest.mark.extended
def test_workers_end_with_a_parent_that_was_killed_and_load_no_torch(parent: Parent) -> None:
    idle, idle_workers = parent("time.sleep(600)")
    busy, busy_workers = parent(f"ask({FOREVER!r}, 1.0)")
    for pid in idle_workers | busy_workers:
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    for process in (idle, busy):
        process.kill()
        process.wait()
    assert gone(idle_workers, 30) and gone(busy_workers, 30)


@pytest.mark.extended
def test_workers_end_with_a_parent_that_exits(parent: Parent) -> None:
    process, workers = parent("pass")
    assert process.wait(60) == 0
    assert gone(workers, 10)


@pytest.mark.extended
def test_ctrl_c_reaches_the_parent_alone(parent: Parent) -> None:
    process, workers = parent("time.sleep(600)")
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "[1.0, 1.0]\n"
    assert children_of(process.pid) == workers
    process.kill()
    process.wait()
    assert gone(workers, 30)


# In a run


@pytest.mark.extended
def test_what_the_grader_failed_on_is_out_of_statistics_and_loss() -> None:
    problems = (asked("72"), asked(r"\frac{"))
    texts = [r"\boxed{72.0}", r"\boxed{71}", _box(FOREVER), "72", r"\boxed{1}", r"\boxed{2}", "none", r"\boxed{3}"]
    completion = Completion.unsampled((0,), StopReason.EOS)
    rollouts = to_rollouts(problems, ((0,), (0,)), 4, [completion] * 8)
    reward = MathVerify(1.0, -1.0, Reading.strict, seconds=2.0, workers=2)
    graded = grade(rollouts, texts, reward, [])
    failed = torch.tensor([[False, False, True, False], [True, True, False, True]])
    assert graded.failed is not None and torch.equal(graded.failed, failed)
    assert torch.equal(graded.in_statistics, ~failed) and torch.equal(graded.in_loss, ~failed)
    assert graded.correctness.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert graded.reward.tolist() == [[1, -1, 0, -1], [0, 0, -1, 0]]
    assert torch.equal(graded.verdict.isnan(), failed)


@pytest.mark.extended
def test_the_options_are_these_classes(make_run: Callable[..., RunConfig]) -> None:
    for option, reading in (("math", Reading.strict), ("math_lenient", Reading.lenient)):
        reward = make_run(f"reward={option}").reward
        assert reward == MathVerify(1.0, 0.0, reading, seconds=5.0, workers=2) and reward.may_fail
    assert make_run("reward=boxed_only").reward == boxed_only
    assert make_run("verifier=math").verifier == plain
    assert make_run("verifier=math_verify").verifier == make_run("reward=math").reward
    with pytest.raises(ValueError, match="seconds must be greater than 0"):
        make_run("reward=math", "reward.seconds=0")
    with pytest.raises(ValueError, match="workers must be at least 1"):
        make_run("reward=math", "reward.workers=0")


@pytest.mark.extended
def test_a_thousand_answers_take_seconds() -> None:
    golds = [(str(n), f"{n}/7", f"x^2+{n}", rf"{n}\sqrt{{3}}", f"({n},{n + 1})")[n % 5] for n in range(1, 1001)]
    texts = [
        (f"{n}.0", rf"\frac{{{2 * n}}}{{14}}", f"{n}+x^2", rf"\sqrt{{3}} \cdot {n}", f"({n}, {n + 1})")[n % 5]
        for n in range(1, 1001)
    ]
    pool = GraderPool()
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    results = pool.grade([Answer(gold, text, False) for gold, text in zip(golds, texts)], PATIENCE_S, 2)
    took = time.monotonic() - started
    pool.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"1,000 answers: {took:.1f} s with two workers, {cpu:.1f} s of processor time")
    assert results == [1.0] * 1000
    assert cpu < 20, "two cores for ten seconds; of processor time, which a busy machine changes less"
