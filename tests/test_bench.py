"""Statistics over seeds, a suite that is trained, and docs that are up to date with the raw files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scripted import RewardFromAction
from test_cli import failed

import t3d
from t3d import bench
from t3d.bench import returns, tables
from t3d.bench.suites import PAPER, SUITES, Task, tasks_of
from t3d.cli import main
from t3d.evaluate import evaluator, statistics

ROOT = Path(__file__).resolve().parent.parent
RAW, PAGE = ROOT / returns.RESULTS, ROOT / "docs" / "results.md"


# ---------------------------------------------------------------------------------------------------- statistics


def test_the_papers_measure():
    curves = np.array([[0.0, 10, 4], [2.0, 20, 6]])
    assert statistics.best_mean(curves) == (1, 15.0, 5.0)  # of the population: not 7.07
    assert statistics.last_mean(curves, 2).tolist() == [7, 13]
    assert statistics.last_mean(curves, 10).tolist() == [14 / 3, 28 / 3]


def test_interquartile_mean():
    assert statistics.interquartile_mean(np.array([100.0, 1, 2, 3, 4, 5, 6, -100])) == 3.5
    assert statistics.interquartile_mean(np.arange(10.0)) == 4.5  # two of ten are left out at either end
    assert statistics.interquartile_mean(np.array([7.0])) == 7
    assert statistics.interquartile_mean(np.array([[0.0, 1, 2, 9], [1, 1, 3, 3]])).tolist() == [1.5, 2]


def test_an_interval_is_stratified_and_always_the_same():
    low, high = statistics.interval([np.zeros(5), np.ones(5)], lambda drawn: drawn.mean(1))
    assert low == high == 0.5  # each group has its share in every sample
    scores = np.random.default_rng(1).normal(10, 2, 40)
    low, high = statistics.interval([scores], lambda drawn: drawn.mean(1))
    error = scores.std() / 40**0.5
    assert low == pytest.approx(scores.mean() - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(scores.mean() + 1.96 * error, abs=0.1 * error)
    assert (low, high) == statistics.interval([scores], lambda drawn: drawn.mean(1))


def test_values_beside_discounted_returns():
    # Two seeds with an episode each: one terminates after two steps, one is cut by a time limit after three.
    q = np.array([[5.0, 1], [7, 1], [0, 1]])
    reward = np.array([[1.0, 4], [2, 4], [0, 4]])
    terminated = np.array([[False, False], [True, False], [False, False]])
    valid = np.array([[True, True], [True, True], [False, True]])
    values = evaluator.compare_values([q, reward, terminated, valid], gamma=0.5, seeds=2)
    assert values.predicted[0] == 6 and values.discounted_returns[0] == ((1 + 0.5 * 2) + 2) / 2
    # What would have come later is half of it.
    assert np.isnan(values.predicted[1]) and np.isnan(values.discounted_returns[1])
    values = evaluator.compare_values([q, reward, terminated, valid], gamma=0.1, seeds=2)
    assert values.discounted_returns[1] == pytest.approx(4.44)  # but for the first state a thousandth
    assert values.predicted[1] == 1


# ------------------------------------------------------------------------------------------------------- suites


def test_the_suites_are_what_they_say():
    assert [task.env for task in SUITES["paper"].tasks] == [f"{name}-v5" for name in PAPER]
    assert all(
        task.settings["steps"] == 1_000_000 and task.settings["eval_every"] == 5_000 for task in SUITES["paper"].tasks
    )
    assert [task.env for task in tasks_of("paper", ["Ant"], "v4")] == ["Ant-v4"]
    names = [task.name for task in tasks_of("ablation", ["Hopper", "Walker2d", "ddpg"])]
    assert names == ["ablation-ddpg-Hopper-v5", "ablation-ddpg-Walker2d-v5"]
    assert len(tasks_of("ablation", ["Hopper"])) == 5
    assert [task.name for task in tasks_of("pixels")] == ["pixels-Pendulum-v1"]
    assert tasks_of("documents")[0].name == "documents-AntBulletEnv-v0"
    with pytest.raises(t3d.T3DError, match=r"the suite quick has no task 'Pendulm'.*Did you mean Pendulum-v1"):
        tasks_of("quick", ["Pendulm"])


KNOBS = {"steps": 60, "eval_every": 20, "eval_episodes": 2, "hidden": (8, 8), "batch_size": 8, "device": "cpu"}
TASK = Task("quick", "Pendulum-v1", {**KNOBS, "random_steps": 10, "eval_values": "on"})


def test_a_suite_is_trained_once_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    said = []

    def train():
        returns.train_suite([TASK], 2, {}, tmp_path / "results", tmp_path / "runs", said.append, progress=False)

    with monkeypatch.context() as patch:
        patch.setattr(returns.files, "write_bytes", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train()
    assert not list((tmp_path / "results").iterdir())
    train()
    path = tmp_path / "results" / "quick-Pendulum-v1.json"
    first = path.read_bytes()
    values = json.loads(first)
    run = t3d.Run.open(tmp_path / "runs" / "quick-Pendulum-v1")
    assert values["steps"] == [0, 20, 40, 60] and values["seeds"] == [0, 1]
    assert np.shape(values["returns"]) == (2, 4, 2) and np.shape(values["q_predicted"]) == (2, 4)
    last = [row["returns"] for row in run.evaluations if row["step"] == 60]
    assert np.allclose([seed[-1] for seed in values["returns"]], last, rtol=1e-6)
    for name in ("env", "suite", "preset", "config", "versions", "hardware", "wall_seconds"):
        assert values[name]
    assert values["config"]["hidden"] == [8, 8] and "/" not in json.dumps(values["hardware"]["cores"])
    train()
    assert path.read_bytes() == first and "left alone" in said[-2]
    path.unlink()
    with pytest.raises(t3d.T3DError, match="was started with steps 60, but now it is 80"):
        returns.train_suite([TASK], 2, {"steps": 80}, tmp_path / "results", tmp_path / "runs", said.append)


def test_the_clock_counts_every_time_a_run_was_taken_up(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(returns.time, "time", lambda: now[0])
    sign = tmp_path / "metrics.jsonl"
    returns.Clock(tmp_path / "clock.json", sign)
    sign.write_text("")
    shutil.os.utime(sign, (130, 130))  # the last that was heard of it
    now[0] = 1000.0
    clock = returns.Clock(tmp_path / "clock.json", sign)
    now[0] = 1007.0
    assert clock.seconds() == 37


# ------------------------------------------------------------------------------------------------------- tables


def made(folder, name, env, curves, variant="", **more):
    """A raw file whose evaluations have one episode each."""
    values = {"env": env, "suite": name.split("-")[0], "variant": variant, "preset": "td3"}
    values |= {"config": {"eval_every": 10, "eval_episodes": 1}, "steps": list(range(0, 10 * len(curves[0]), 10))}
    values |= {"seeds": list(range(len(curves))), "returns": [[[x] for x in curve] for curve in curves]}
    values |= {
        "versions": {"torch": "2"},
        "hardware": {"processor": "P", "cores": 2, "gpu": None},
        "wall_seconds": 60.0,
    }
    (folder / f"{name}.json").write_text(json.dumps(values | more))


def test_a_table_beside_the_paper(tmp_path):
    made(tmp_path, "paper-HalfCheetah-v5", "HalfCheetah-v5", [[0, 10_000, 9_000], [0, 10_400, 9_400]])
    made(tmp_path, "paper-Hopper-v5", "Hopper-v5", [[0, 3_200, 3_100], [0, 3_300, 3_000]])
    made(tmp_path, "paper-Walker2d-v5", "Walker2d-v5", [[0, 4_200, 4_100], [0, 4_200, 4_000]])
    made(tmp_path, "paper-Ant-v5", "Ant-v5", [[0, 900, 800], [0, 900, 700]])
    head, *rows = tables.returns_table(tables.read_results(tmp_path)["paper"])
    cells = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["highest mean ± sd"] for row in cells] == [
        "10,200 ± 200.0",
        "3,250 ± 50.0",
        "4,200 ± 0.00",
        "900.0 ± 0.00",
    ]
    assert [row["reached"] for row in cells] == ["yes", "as the later ones", "within one sd", "no"]
    assert cells[0]["at the end"] == "9,200 ± 200.0" and cells[0]["TD3 paper"] == "9,637 ± 859.0"
    assert "Over all 4 tasks" in tables.overall(tables.read_results(tmp_path)["paper"])


def test_the_ablations_order_is_compared_with_the_papers(tmp_path):
    for variant, level in (("td3", 3000), ("one-critic", 1500), ("no-delay", 3005), ("ddpg", 9000)):
        curves = [[0, level + 10 * k] for k in range(4)]
        made(tmp_path, f"ablation-{variant}-Hopper-v5", "Hopper-v5", curves, variant)
    values = {"q_predicted": [[0, 9], [0, 11]], "discounted_return": [[0, 10], [0, None]]}
    made(tmp_path, "ablation-td3-Walker2d-v5", "Walker2d-v5", [[0, 1], [0, 3]], "td3", **values)
    found = tables.read_results(tmp_path)["ablation"]
    assert tables.overestimation(found) == [
        "Walker2d-v5, value of a state: TD3 predicted 5.00, discounted return 3.33 (+50%)."
    ]
    said = tables.ordering(found)
    assert said == [
        "Hopper-v5: TD3 and no delay cannot be told apart.",
        "Hopper-v5: TD3 is above one critic, as in the paper.",
        "Hopper-v5: TD3 is below DDPG, NOT as in the paper.",
    ]


def test_a_file_that_is_none_of_ours_is_named(tmp_path):
    (tmp_path / "quick-Pendulum-v1.json").write_text('{"env": "Pendulum-v1"}')
    with pytest.raises(t3d.T3DError, match=r"quick-Pendulum-v1.json is not a file of t3d bench returns \(KeyError"):
        tables.read_results(tmp_path)


def test_the_docs_are_up_to_date(tmp_path):
    """If this fails: t3d bench table --docs docs/results.md"""
    shutil.copytree(PAGE.parent, tmp_path / "docs")
    written = bench.write_docs(bench.read_results(RAW), tmp_path / "docs" / "results.md")
    assert (tmp_path / "docs" / "results.md").read_text() == PAGE.read_text()
    for path in written[1:]:
        committed = PAGE.parent / "figures" / path.name
        assert Image.open(committed).text["Source"] == Image.open(path).text["Source"], path.name


def test_tables_on_the_command_line(tmp_path, capsys):
    made(tmp_path, "quick-Pendulum-v1", "Pendulum-v1", [[-1200, -150], [-1300, -170]])
    main(["bench", "table", "--results", str(tmp_path)])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Pendulum-v1"))
    assert "-160.0 ± 10.0" in line and line.rstrip().endswith("1.0")  # whole, however narrow the terminal
    assert "holds no results" in failed(capsys, "bench", "table", "--results", tmp_path / "none")
    assert "has no task 'Hoper'" in failed(capsys, "bench", "returns", "--suite", "paper", "--only", "Hoper")


def test_an_evaluation_says_what_the_critic_expected(tmp_path):
    settings = {**KNOBS, "progress": False, "out": tmp_path / "run", "gamma": 0.0}
    run = t3d.train(RewardFromAction, eval_values="on", random_steps=10, **settings)
    row = run.evaluations[-1]
    assert row["discounted_return"] == pytest.approx(np.mean(row["returns"]))  # episodes of one step
    assert isinstance(row["q_predicted"], float)
