"""What people type and bring that cannot be: one short message that names it and the remedy, and nothing begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hydra._internal import utils
from hydra.core.global_hydra import GlobalHydra
from processes import python_path

from grpo_lab import cli, train

MINE = {"GRPO_LAB_CONFIG_PATH": "{here}/mine"}
LIST = "help lists the options, --cfg job every key"
DESIGN = "# @package _global_\ndesign: {name: mine, question: q, prediction: p, control: a, primary: reward/mean, "


@dataclass(frozen=True)
class Case:
    """Words of `python -m grpo_lab.train`, or after `grpo-lab` if the first is a command; what the message says."""

    words: str
    said: str  # parts, separated by |; {here} is the test's folder
    files: dict[str, str | bytes] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def own(file: str, text: str | bytes, words: str, said: str) -> Case:
    return Case(words, said, {f"mine/{file}": text}, MINE)


CASES = [
    # names and values
    Case("explain surogate=ppo", f"there is no key 'surogate': did you mean 'surrogate'|{LIST}"),
    Case("explain surrogate=ppoo", "there is no 'surrogate/ppoo': did you mean surrogate=ppo? choose from |ppo_higher"),
    Case("explain optimizer.lr=3", "there is no key 'optimizer.lr': type optimizer.learning_rate=3"),
    Case("explain seed=abc", f"seed=abc: Value 'abc'|could not be converted to Integer|{LIST}"),
    Case("explain a=[1", f"no viable alternative|{LIST}"),
    Case("explain lr=1e-4", "type optimizer.learning_rate=1e-4"),
    Case("surogate=ppo", f"there is no key 'surogate': did you mean 'surrogate'|{LIST}"),
    Case("surrogate=ppoo", "there is no 'surrogate/ppoo': did you mean surrogate=ppo? choose from |ppo_higher"),
    Case("+surogate=ppo", "there is no key 'surogate': --help lists"),
    Case("seed=abc", f"seed=abc: Value 'abc'|{LIST}"),
    Case("a=[1", f"no viable alternative|{LIST}"),
    Case("seed=1=2", "seed has a value with '=' in it: quote it twice"),
    Case("seed", f"'seed'|{LIST}"),
    Case("runs_dir=a[/b]c", "'runs_dir=a[/b]c' is not an override|quote a value that holds signs"),
    Case("seed=-1", "RunConfig.seed|at least 0|change this value"),
    Case("seed=99999999999999999999", "RunConfig.seed|below 2**63|change this value"),
    Case("threads=0", "RunConfig.threads|at least 1|change this value"),
    Case("threads=99999999", "RunConfig.threads|at most 4096|change this value"),
    Case("group_size=1.5", "group_size=1.5: Value '1.5'|Integer"),
    Case("optimizer.learning_rate=nan", "learning_rate|change this value"),
    Case("optimizer.learning_rate=-1", "learning_rate|change this value"),
    Case("device=tpu", "device|cpu|cuda"),
    Case("objective=acc", "objective|grpo-lab metrics"),
    Case("objective=acc checkpoint.best=null", "objective|grpo-lab metrics"),
    Case("checkpoint_minutes=0", "checkpoint_minutes|above 0, or null"),
    Case("evaluation.suites=[nothing]", "Evaluation.suites|a list of "),
    Case("evaluation.pass_at=[100000]", "Evaluation.pass_at|between 1 and"),
    Case("evaluation.max_tokens=0", "Evaluation.max_tokens|greater than 0|change this value"),
    Case("problems_per_step=${nothing}", "problems_per_step has no value|correct the reference"),
    Case("seed=${group_size} group_size=${seed}", "refers to itself|give one of these keys a value"),
    # places
    Case("runs_dir=", "RunConfig.runs_dir|the path of a folder, such as runs"),
    Case("", "RunConfig.runs_dir|is GRPO_LAB_RUNS empty?", env={"GRPO_LAB_RUNS": ""}),
    Case("tracking=mlflow runs_dir={here}/a?b", "a?b|choose another runs_dir, or tracking=none"),
    Case("tracking=mlflow runs_dir={here}/a%25b", "a%25b|choose another runs_dir, or tracking=none"),
    Case("tracking=mlflow tracking.uri=mlflow.db", "tracking.uri=mlflow.db is not supported|write sqlite:////"),
    Case("tracking=mlflow tracking.uri=sqlite:///mlflow.db", "must be absolute|write sqlite:////absolute/path"),
    Case("tracking=mlflow tracking.uri=http://", "names no host: write for example http://"),
    Case("tracking=mlflow tracking.uri=mysql2://me:secret@host/db", "mysql2://me:***@host/db is not supported"),
    Case("tracking=nothing", "there is no 'tracking/nothing': choose from mlflow, none"),
    Case("base", "/dev/null/cache cannot be written: set GRPO_LAB_CACHE", env={"GRPO_LAB_CACHE": "/dev/null/cache"}),
    Case("base", "/dev/null/.cache/grpo_lab cannot be written: set GRPO_LAB_CACHE", env={"HOME": "/dev/null"}),
    # modules of one's own
    Case("plugins=[nowhere_at_all]", "'nowhere_at_all' cannot be imported|install it or add its folder to PYTHONPATH"),
    Case("", "'nowhere_at_all' cannot be imported|install it", env={"GRPO_LAB_PLUGINS": "nowhere_at_all"}),
    Case("plugins=[my_broken]", "{here}/my_broken.py line 2 (NameError|mend it", {"my_broken.py": "\nnothing\n"}),
    Case("plugins=[my_syntax]", "{here}/my_syntax.py line 1 (SyntaxError|mend it", {"my_syntax.py": "def (\n"}),
    Case("plugins=[my_bytes]", "'my_bytes' fails|mend it", {"my_bytes.py": b"x = '\xff'\n"}),
    # YAML of one's own
    Case("seed=1", "GRPO_LAB_CONFIG_PATH names {here}/mine, which is no folder: make it, correct", env=MINE),
    own("recipe/mine.yaml", "kl: 1\nupdates: 2\nkl: 3\n", "seed=1", "mine.yaml line 3: the key 'kl' is there twice"),
    own("recipe/mine.yaml", "a: {b: 1, b: 2}\n", "seed=1", "mine.yaml line 1: the key 'b' is there twice: keep one"),
    own("recipe/mine.yaml", "a: !!python/object/apply:os.getcwd []\n", "seed=1", "1: the tag !!python/|without it"),
    own("recipe/mine.yaml", "a:\n  b: !mine 3\n", "seed=1", "mine.yaml line 2: the tag !mine|without it"),
    own("recipe/mine.yaml", b"a: 1\nb: \xe4\n", "seed=1", "mine.yaml line 2 is not YAML|mend it"),
    own("recipe/mine.yaml", "a:\n\tb: 1\n", "seed=1", "mine.yaml line 2 is not YAML|mend it, or move it"),
    own("recipe/mine.yaml", "a: [1\n", "seed=1", "mine.yaml line 2 is not YAML|mend it, or move it"),
    own("recipe/mine.yaml", "a: *b\n", "seed=1", "mine.yaml line 1: there is no &b above: correct *b"),
    own("recipe/mine.yaml", "defaults: [mine]\n", "recipe=mine", "leads back to itself|take out the entry"),
    own("recipe/mine.yaml", "defaults: [mine]\n", "explain recipe=mine", "leads back to itself|take out the entry"),
    own(
        "recipe/mine.yaml",
        "defaults: [nowhere]\n",
        "recipe=mine",
        "there is no 'recipe/nowhere': --help lists the options",
    ),
    own("recipe/mine.yaml", "- 1\n- 2\n", "recipe=mine", "recipe/mine"),
    own("recipe/mine.yaml", "# @package _global_\nsurogate: 1\n", "recipe=mine", "surogate"),
    own("surrogate/ppo.yaml", "clip_low: 1\n", "seed=1", "surrogate/ppo.yaml|name of an option that is there: rename"),
    # experiments of one's own
    Case("+experiments=nowhere", "one of your own goes into FOLDER/experiments, with GRPO_LAB_CONFIG_PATH=FOLDER"),
    own(
        "experiments/mine.yaml", DESIGN + "}\n", "+experiments=mine", "design.axis is missing: an experiment states it"
    ),
    own(
        "experiments/mine.yaml",
        "# @package _global_\ndesign: 3\n",
        "+experiments=mine",
        "design is 3: a declaration has entries",
    ),
    own(
        "experiments/mine.yaml", "design: {name: x}\n", "+experiments=mine", "first line must be `# @package _global_`"
    ),
    # sweeps
    Case(
        "-m truncation=score,skore",
        "no run was started|there is no 'truncation/skore': did you mean truncation=score? choose from",
    ),
    Case("-m seed=0,x", "seed=x: a seed is a whole number"),
    Case("-m optimizer.learning_rate=interval(0,1)", "a sweep needs a list of values, such as"),
    Case("-m seed=0,1 hydra/launcher=nowhere", "there is no 'hydra/launcher/nowhere': choose from"),
    Case("-m seed=0,1 hydra.launcher.workers=0", "hydra.launcher.workers must be at least 1, got 0"),
    # other commands
    Case("figures nowhere --runs {here}/none", "there is no folder {here}/none: name the folder"),
    Case("figures nowhere --runs {here}", "nowhere|{here}"),
    Case("report nowhere --runs mysql2://me:secret@host/db", "mysql2://me:***@host/db is not supported"),
    Case("rollouts nowhere --runs {here}", "'nowhere' is neither a run folder|holds no sweep"),
    Case("rollouts nowhere --runs {here} --limit 0", "--limit 0: print at least one"),
    Case("status --runs {here}/none", "there is no folder {here}/none: make some with make demo, or name another"),
    Case("status --runs {here}", "no run is recorded in {here}: start one"),
    Case("stop x --runs {here}", "there is no run 'x' in {here}; running are: none"),
    Case("sync {here}", "holds no run that mlflow can be sent: give a folder of runs"),
    Case("reproduce {here}", "holds no run: give a run's folder"),
    Case("evaluate {here}/none --harness lm_eval --tasks a", "there is no folder {here}/none: give a run's folder"),
    Case("doctor {here}/none.log", "there is no {here}/none.log: give a log file, or the folder"),
    Case("doctor {here}/a.jsonl", "{here}/a.jsonl|give", {"a.jsonl": '{"step": 1, "unknown": 2}\n'}),
    Case("microscope {here}/none", "there is no file {here}/none: give a run's folder, or a .parquet"),
    Case("audit-reward nowhere:f", "No module named 'nowhere'|see that nowhere:f can be imported"),
    Case("check-loss nowhere:f", "nowhere:f cannot be imported|start in the folder of its module, or install it"),
    Case("check-loss nowhere.py:f", "nowhere.py:f: there is no file"),
    Case("check-loss", "nothing to check: give FILE.py:FUNCTION or MODULE:FUNCTION"),
    Case("claims", "give --pack NAME|or --add FOLDER"),
    Case("claims --add {here}/none", "{here}/none"),
    Case("power nowhere", "there is no experiment 'nowhere': choose from"),
    Case("data nowhere --runs {here}", "no sweep 'nowhere' in {here}/sweeps"),
    Case("tuned nowhere --runs {here}", "nowhere|{here}"),
    Case("pass-rates pass_rate=none", "pass_rate=none measures nothing: choose another option"),
    Case("import trl {here}/a --as x --runs {here}", "{here}/a"),
    Case("import trl {here} --as ../x --runs {here}", "'../x': a name has letters, digits"),
    Case("import trl {here} --as .. --runs {here}", "'..': a name has letters, digits"),
    Case(
        "import trl {here} --as x --runs {here}",
        "{here}/trainer_state.json holds no JSON object (line 2: |restore it",
        {"trainer_state.json": '{"a": 1,\n'},
    ),
    Case(
        "import prime-rl {here}/metrics.jsonl --as x --runs {here}",
        "{here}/metrics.jsonl line 2 is none that prime-rl writes|give its metrics.jsonl",
        {"metrics.jsonl": b'{"step": 1}\n\xff\n'},
    ),
    Case("graders seed=1", "no grader is named: write reward=NAME or verifier=NAME"),
    Case("diff {here} {here}", "{here} holds no run: give a run's folder, such as runs/plain/seed=0"),
    Case("ui --runs {here}/none", "there is no folder {here}/none|make some with make demo"),
    Case("ui --runs {here}", "no sweep in {here} is in MLflow|run make demo first|grpo-lab sync"),
    Case("nonsense", "invalid choice: 'nonsense'"),
    Case("status --nonsense", "unrecognized arguments: --nonsense"),
]
COMMANDS = {*cli.command_line()[1], "nonsense"}


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a command changes in its process is as before: signals, Hydra, the environment."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)}
    monkeypatch.setattr(utils, "run_and_report", utils.run_and_report)
    environment = dict(os.environ)
    yield
    GlobalHydra.instance().clear()
    for number, handler in before.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.few(5)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.words} {' '.join(case.files)}"[:60])
def test_what_cannot_be_is_refused_in_a_line(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], untouched: None
) -> None:
    def filled(text: str) -> str:
        return text.replace("{here}", str(tmp_path))

    for name, content in case.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setenv("GRPO_LAB_RUNS", str(tmp_path / "runs"))
    for name, value in case.env.items():
        monkeypatch.setenv(name, filled(value))
        monkeypatch.delenv({"HOME": "XDG_CACHE_HOME"}.get(name, "NOTHING"), raising=False)
    if "HOME" in case.env:
        monkeypatch.delenv("GRPO_LAB_CACHE", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [filled(word) for word in case.words.split(" ") if word]
    command = bool(words) and words[0] in COMMANDS
    before = {path for path in tmp_path.rglob("*") if path.suffix != ".pyc" and path.name != "__pycache__"}
    plain = [] if any(word.startswith("tracking") for word in words) else ["tracking=none"]
    flags = [words.pop(0)] if words[:1] == ["-m"] else []  # behind, as Hydra takes it
    monkeypatch.setattr(sys, "argv", ["", *words] if command else ["", "world=tiny", *plain, *words, *flags])
    with pytest.raises(SystemExit) as ended:
        (cli if command else train).main()
    said = capsys.readouterr().err + (ended.value.code if isinstance(ended.value.code, str) else "")
    assert ended.value.code not in (0, None) and "Traceback" not in said
    assert all(part in said for part in filled(case.said).split("|")), said
    assert len(said.splitlines()) <= (12 if case.words.endswith("nonsense") else 4), said
    left = {path for path in tmp_path.rglob("*") if path.suffix != ".pyc" and path.name != "__pycache__"}
    assert left == before, "nothing was begun"


def test_there_are_many() -> None:
    assert len(CASES) >= 60 and sum(bool(case.files) for case in CASES) >= 20
    known = {case.words.split()[0] for case in CASES if case.words} & COMMANDS
    nothing, training = {"metrics", "tricks", "docs", "cost-model", "design", "completion"}, {"train", "sweep"}
    assert COMMANDS - known == nothing | training, "which take nothing, or are the command that trains"


def run(code: str, *words: str, here: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    settings = {**os.environ, "PYTHONPATH": python_path(here), "GRPO_LAB_RUNS": str(here / "runs"), **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=settings, cwd=here)


INTERRUPTED = """
import importlib.abc, runpy, sys

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
if sys.argv[2] == "train":
    runpy.run_module("grpo_lab.train", run_name="__main__", alter_sys=True)
from grpo_lab.cli import main
"""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "program,module", [("train", "hydra"), ("train", "omegaconf"), ("cli", "argparse"), ("cli", "rich.console")]
)
def test_an_interrupt_while_modules_load_is_one_line(tmp_path: Path, program: str, module: str) -> None:
    done = run(INTERRUPTED, module, program, here=tmp_path)
    assert done.stderr == "interrupted\n" and done.returncode != 0


PLUGIN = """
from dataclasses import dataclass
from grpo_lab.tricks import surrogate

@dataclass(frozen=True)
class Ppo(surrogate.Ppo):
    pass
"""


@pytest.mark.extended
def test_a_plugin_class_named_like_a_built_in_is_refused_and_both_are_named(tmp_path: Path) -> None:
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    code = "import runpy; runpy.run_module('grpo_lab.train', run_name='__main__', alter_sys=True)"
    done = run(code, "plugins=[my_plugin]", here=tmp_path)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"Ppo at {tmp_path / 'my_plugin.py'} line 5" in done.stderr
    assert "tricks/surrogate.py line " in done.stderr and "option ppo: give your class another name" in done.stderr


@pytest.mark.extended
def test_an_experiment_without_a_mode_is_the_sweep_that_it_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], untouched: None
) -> None:
    """It trained one plain run, and none of its arms."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.yaml").write_text(
        "# @package _global_\ndesign:\n  name: mine\n  question: q\n  prediction: p\n  control: plain\n"
        "  primary: eval/heldout/accuracy\n  axis: steps\n  base: [world=tiny, tracking=none]\n  seeds: [0]\n"
        "  arms: {plain: [], mask: [truncation=mask_after]}\n  predictions: []\n"
    )
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", str(tmp_path))
    words = ["+experiments=mine", f"runs_dir={tmp_path / 'runs'}", "hydra.sweeper.dry_run=true"]
    monkeypatch.setattr(sys, "argv", ["train", *words])
    train.main()
    said = capsys.readouterr().err
    assert "mine: 2 runs" in said and "plain,truncation=mask_after" in said and sys.argv[-1] == "-m"
    assert not (tmp_path / "runs").exists()


def test_a_declaration_that_came_another_way_is_not_run_as_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], untouched: None
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "world=tiny", "tracking=none", f"runs_dir={tmp_path}", "design={a:b}"])
    with pytest.raises(SystemExit):
        train.main()
    assert "a declared experiment is a sweep, and this would be one run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
