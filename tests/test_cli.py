"""The command line as a user meets it: what it prints, what it refuses and how."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import crafted
import pytest

import t3d
from t3d.cli import COMMANDS, Train, main
from t3d.config import Config
from t3d.options import Group, flag, options_of
from t3d.runs.folder import Run
from t3d.steps import Hyperparameters

QUICK = [
    "--steps", "300", "--random-steps", "1e2", "--eval-every", "150", "--eval-episodes", "2", "--hidden", "8", "8",
    "--batch-size", "8", "--device", "cpu",
]  # fmt: skip


def failed(capsys, *arguments):
    """The error text of a command that must end with 2 and without a traceback."""
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    assert exit.value.code == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out + err


def without_sum(config):
    return {name: value for name, value in config.items() if name != "sha256"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "run"
    main(["train", "Pendulum-v1", "--seeds", "2", *QUICK, "--out", str(path)])
    return path


def test_train_from_start_to_picture(tmp_path, capsys):
    main(["train", "Pendulum-v1", "--seed", "6", *QUICK, "--gamma", "0.9", "--out", str(tmp_path / "run")])
    text = capsys.readouterr().out
    assert "the first 100 actions random" in text.splitlines()[1]
    assert "step       300 of 300" in text and "Mean return at step 300" in text and "t3d evaluate /" in text
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["seeds"] == [6] and config["gamma"] == 0.9 and config["hidden"] == [8, 8]
    assert (tmp_path / "run" / "report" / "learning-curve.png").exists()


@pytest.mark.parametrize(
    ("typed", "seeds"),
    [([], [0]), (["--seeds", "3"], [0, 1, 2]), (["--seeds", "3", "5"], [3, 5]), (["--seed", "3"], [3])],
)
def test_seeds(typed, seeds, tmp_path, capsys):
    main(["train", "Pendulum-v1", *QUICK, "--steps", "110", *typed, "--out", str(tmp_path / "run")])
    assert t3d.Run(tmp_path / "run").seeds == seeds


def test_config_takes_a_runs_settings_and_typed_ones_go_first(run, tmp_path, capsys):
    main(["train", "--config", str(run / "config.json"), "--out", str(tmp_path / "again")])
    strip = [{k: v for k, v in row.items() if k != "steps_per_second"} for row in t3d.Run(run).metrics]
    assert strip == [
        {k: v for k, v in row.items() if k != "steps_per_second"} for row in t3d.Run(tmp_path / "again").metrics
    ]
    typed = ["--tau", "0.5", "--seed", "1", "--steps", "120"]
    main(["train", "--config", str(run / "config.json"), *typed, "--out", str(tmp_path / "other")])
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert (config["tau"], config["seeds"], config["steps"], config["batch_size"]) == (0.5, [1], 120, 8)
    assert config["random_steps"] == 12  # fewer steps, and no more than a tenth of them random


def test_presets_set_defaults_and_typed_ones_go_first(tmp_path, capsys):
    typed = ["--steps", "300", "--hidden", "8", "--eval-episodes", "1", "--device", "cpu"]
    main(["train", "Pendulum-v1", "--preset", "documents", *typed, "--out", str(tmp_path / "run")])
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["preset"], config["hidden"], config["batch_size"]) == ("documents", [8], 100)
    assert config["train_freq"] == "episode" and config["random_steps"] == 30


def test_no_out_makes_a_folder_under_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["train", "Pendulum-v1", *QUICK, "--steps", "110"])
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("Pendulum-v1-20")


def test_evaluate(run, capsys):
    main(["evaluate", str(run)])
    text = capsys.readouterr().out
    assert "Pendulum-v1, 2 episodes for each seed" in text and text.count("yes") == 2


BENCH = [["bench", name] for name in COMMANDS["bench"]]


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main([*arguments])
    assert exit.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], *([*c, "--help"] for c in [[c] for c in COMMANDS] + BENCH), []])
def test_help_fits_eighty_columns(arguments, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(capsys, *arguments)
    assert "usage: t3d" in text and max(map(len, text.splitlines())) <= 80
    assert not set(text) - {chr(code) for code in range(32, 127)} - {"\n"}  # no boxes, no colors in a pipe


def groups_in_help(capsys, *arguments):
    """{title: [names]} of a help page, in its order."""
    groups, names = {}, []
    for line in help_of(capsys, *arguments).splitlines():
        if re.fullmatch("[A-Z][a-z ]+:", line) and line != "Examples:":
            names = groups.setdefault(line[:-1], [])
        elif groups and (found := re.match(r"  (--[a-z-]+(?:\.KEY)?|[A-Z]+)", line)):
            names.append(found[1])
    return groups


def test_help_of_train_has_groups_in_order(capsys):
    groups = groups_in_help(capsys, "train", "--help")
    assert list(groups) == [group.value for group in Group]
    assert groups["Common options"] == [
        "ENV", "--seeds", "--steps", "--num-envs", "--batch-size", "--hidden", "--actor-lr", "--critic-lr", "--device",
        "--out", "--preset",
    ]  # fmt: skip
    assert groups["Exploration"] == ["--random-steps", "--exploration-noise"]
    printed = [name for names in groups.values() for name in names]
    assert len(printed) == len(set(printed))
    fields = {field.name for cls in (Train, Config) for field in dataclasses.fields(cls)} - {"settings", "env_args"}
    assert set(printed) == {flag(name) for name in fields - {"env"}} | {"ENV", "--env.KEY"}


def test_every_option_declares_a_group_and_a_text():
    options = {option.field: option for option in options_of(Train)}
    assert all(option.group and option.text.endswith((".", "]")) for option in options.values())
    equations = {field.name for field in dataclasses.fields(Hyperparameters)} - {"actor_lr", "critic_lr"}
    assert {name for name, option in options.items() if option.group is Group.ALGORITHM} > equations
    undeclared = {option.field for option in options_of(Config) if option.group is None}
    assert undeclared == equations  # they are in the group that `Train.settings` declares


def test_help_shows_the_defaults_of_a_preset(capsys):
    text = " ".join(help_of(capsys, "train", "--preset", "paper", "--help").split())
    assert "Transitions per batch. [step 4] (default: 100)" in text
    assert "(default: 256)" in " ".join(help_of(capsys, "train", "Pendulum-v1", "-h").split())


def test_doctor(capsys):
    main(["doctor", "Pendulum-v1", "--steps", "250"])
    text = capsys.readouterr().out
    assert "Pendulum-v1: gymnasium, because no faster adapter" in text
    assert "bit-identical to gymnasium.make in 250 steps of 3 environments, 3 ends" in text
    assert "observations: 3 numbers; actions: 1, from -2 to 2" in text


def test_arguments_for_the_environment(tmp_path, capsys):
    main(["train", "Pendulum-v1", *QUICK, "--steps", "110", "--env.g", "5", "--env.render-mode=rgb_array",
          "--out", str(tmp_path / "run")])  # fmt: skip
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["env_args"] == {"g": 5, "render_mode": "rgb_array"}
    main(["evaluate", str(tmp_path / "run")])
    assert capsys.readouterr().out.count("yes") == 1
    assert "unexpected keyword argument" in failed(capsys, "train", "Pendulum-v1", "--env.wind", "3")
    assert "needs a value" in failed(capsys, "train", "Pendulum-v1", "--env.g")


def test_module_and_version():
    result = subprocess.run([sys.executable, "-m", "t3d", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"t3d {t3d.__version__}\n"


# ------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian", "Pendulum-v1"], "Did you mean train?"),
        (["train", "Pendulum-v2"], "Did you mean Pendulum-v1"),
        (["train", "pendulum"], "Did you mean Pendulum-v1"),
        (["train", "HalfChetah-v5"], "HalfCheetah-v5"),
        (["train", "nowhere/Pendulum-v1"], "Did you mean Pendulum-v1"),
        (["train", "no_such_module:Env-v0"], "no module no_such_module"),
        (["train", "CartPole-v1"], "TD3 needs continuous"),
        (["train"], "needs an environment"),
        (["train", "Pendulum-v1", "--gama", "0.9"], "--gamma"),
        (["train", "Pendulum-v1", "--gamma", "1.5"], "--gamma must be between 0 and 1; it is 1.5"),
        (["train", "Pendulum-v1", "--gamma", "nan"], "--gamma must be between 0 and 1"),
        (["train", "Pendulum-v1", "--tau", "0"], "--tau must be above 0"),
        (["train", "Pendulum-v1", "--actor-lr=-1"], "--actor-lr must be above 0"),
        (["train", "Pendulum-v1", "--steps", "0"], "--steps must be between 1"),
        (["train", "Pendulum-v1", "--steps", "many"], "--steps cannot be 'many': it takes a whole number."),
        (["train", "Pendulum-v1", "--steps", "1.5"], "--steps cannot be '1.5': it takes a whole number."),
        (["train", "Pendulum-v1", "--steps"], "--steps needs a value: a whole number."),
        (["train", "Pendulum-v1", "--out", "--seed", "1"], "--out needs a value: a path."),
        (["train", "Pendulum-v1", "--seeds", "--steps", "100"], "--seeds needs a value: whole numbers"),
        (["train", "Pendulum-v1", "--gamma", "high"], "--gamma cannot be 'high': it takes a number."),
        (["train", "Pendulum-v1", "--hidden", "64", "x"], "--hidden cannot be 'x': it takes whole numbers"),
        (["train", "--seeds", "3", "Pendulum-v1"], "Put ENV before --seeds."),
        (["train", "Pendulum-v1", "--real-env=yes"], "--real-env takes no value."),
        (["train", "Pendulum-v1", "Hopper-v5"], '"t3d train" does not take the argument \'Hopper-v5\'.'),
        (["train", "Pendulum-v1", "--steps", "100", "--random-steps", "100"], "must be less than --steps 100"),
        (["train", "Pendulum-v1", "--hidden", "0"], "--hidden must be between 1"),
        (["train", "Pendulum-v1", "--hidden"], "--hidden"),
        (["train", "Pendulum-v1", "--seeds", "0"], "between 1 and 10,000 seeds"),
        (["train", "Pendulum-v1", "--seeds", "1", "1"], "the same seed twice"),
        (["train", "Pendulum-v1", "--seed=-1"], "a seed is a whole number from 0"),
        (["train", "Pendulum-v1", "--seed", "1", "--seeds", "2"], "not both"),
        (["train", "Pendulum-v1", "--preset", "td4"], "it takes td3, paper or documents. Did you mean td3?"),
        (["train", "Pendulum-v1", "--device", "tpu"], "--device cannot be 'tpu': it takes auto, cpu or cuda."),
        (["train", "--config", "absent.json"], "t3d: cannot read absent.json"),
        (["train", "Pendulum-v1", "--out", 300 * "x"], "File name too long"),
        (["train", "Pendulum-v1", "--steps", "1e12", "--buffer-size", "2e9", "--seeds", "500"], "the replay memory"),
        (["train", "Pendulum-v1", "--steps=-1"], "--steps must be between 1"),
        (["train", "Pendulum-v1", "--threads=-1"], "--threads must be between 1"),
        (["train", "Pendulum-v1", "--seeds", "1e9"], "between 1 and 10,000 seeds"),
        (["evaluate", "no/such/run"], "there is no run no/such/run"),
        (["evaluate", "."], "not a run folder"),
        (["evaluate"], '"t3d evaluate" needs RUN: the run folder. All options: t3d evaluate --help'),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence_and_leaves_nothing(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = failed(capsys, *arguments)
    assert sentence in " ".join(text.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "typed", "suggested"),
    [
        (["train", "Pendulum-v1", "--batchsize", "3"], "--batchsize", "--batch-size"),
        (["train", "Pendulum-v1", "--batch_sise=3"], "--batch_sise", "--batch-size"),
        (["train", "Pendulum-v1", "--seed", "1", "--lr", "3"], "--lr", "--actor-lr or --critic-lr"),
        (["train", "Pendulum-v1", "--suite", "quick"], "--suite", None),
        (["train", "Pendulum-v1", "--episodes", "3"], "--episodes", "--eval-episodes"),
        (["train", "Pendulum-v1", "--no-real-en"], "--no-real-en", "--no-real-env"),
        (["train", "Pendulum-v1", "-s", "1"], "-s", None),
        (["train", "--batchsize", "3"], "--batchsize", "--batch-size"),
        (["resume", "X", "--step", "3"], "--step", "--steps"),
        (["resume", "X", "--batch-size", "3"], "--batch-size", None),
        (["resume", "X", "--env.g", "3"], "--env.g", None),
        (["evaluate", "X", "--num-episodes", "3"], "--num-episodes", "--episodes"),
        (["evaluate", "X", "--steps", "3"], "--steps", None),
        (["doctor", "--step", "3"], "--step", "--steps"),
        (["doctor", "Pendulum-v1", "--seeds", "3"], "--seeds", None),
        (["bench", "returns", "--suit", "quick"], "--suit", "--suite"),
        (["bench", "returns", "--docs", "x"], "--docs", None),
        (["bench", "table", "--doc", "x"], "--doc", "--docs"),
        (["bench", "table", "--suite", "quick"], "--suite", None),
    ],
)
def test_a_mistyped_option_suggests_options_of_its_command_only(arguments, typed, suggested, capsys):
    prog = "t3d " + " ".join(arguments[: 2 if arguments[0] == "bench" else 1])
    hint = f" Did you mean {suggested}?" if suggested else ""
    expected = f't3d: there is no option {typed} for "{prog}".{hint} All options: {prog} --help\n'
    assert failed(capsys, *arguments) == expected
    command = COMMANDS[arguments[0]] if arguments[0] != "bench" else COMMANDS["bench"][arguments[1]]
    names = {name for option in options_of(command) for name in option.names}
    assert set(re.findall(r"--[a-z-]+", hint)) <= names


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian"], 'there is no command "t3d trian". Did you mean train? Commands: train, resume'),
        (["bench", "retruns"], 'there is no command "t3d bench retruns". Did you mean returns? Commands: returns or'),
        (["bench"], '"t3d bench" needs a command: returns or table. Help: t3d bench --help'),
        (["--steps", "3"], '"t3d" needs a command before --steps: train, '),
    ],
)
def test_a_mistyped_command(arguments, sentence, capsys):
    text = failed(capsys, *arguments)
    assert text.startswith(f"t3d: {sentence}") and text.count("\n") == 1


def test_what_tyro_reads_is_not_refused(tmp_path, capsys):
    typed = ["--hidden=8", "--exploration_noise", ".1", "--no-real-env", "--reward-scale=1e-1", "--seeds", "3", "5"]
    main(["train", *QUICK, *typed, "--steps", "1_10", "--out", str(tmp_path / "run"), "--", "Pendulum-v1"])
    config = t3d.Run(tmp_path / "run").config
    assert (config["hidden"], config["reward_scale"], config["seeds"], config["steps"]) == ([8], 0.1, [3, 5], 110)


@pytest.mark.skipif(__import__("torch").cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "no GPU" in failed(capsys, "train", "Pendulum-v1", "--device", "cuda")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_gives_the_pip_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "mujoco" or "envs.mujoco" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mujoco", None)  # what `import mujoco` meets where it is not installed
    assert "pip install 't3d[mujoco]'" in failed(capsys, "train", "HalfCheetah-v5")
    assert list(tmp_path.iterdir()) == []


def test_used_folders_are_refused(run, tmp_path, capsys):
    before = sorted(path.name for path in run.iterdir())
    assert "already holds a run" in failed(capsys, "train", "Pendulum-v1", *QUICK, "--out", run)
    assert sorted(path.name for path in run.iterdir()) == before
    (tmp_path / "file").write_text("mine")
    assert "already holds files" in failed(capsys, "train", "Pendulum-v1", *QUICK, "--out", tmp_path)
    assert "is a file" in failed(capsys, "train", "Pendulum-v1", *QUICK, "--out", tmp_path / "file")


def test_an_unwritable_folder(tmp_path, capsys):
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    root = os.geteuid() == 0  # root may write anywhere, so be somebody else for a moment
    try:
        if root:
            os.seteuid(65534)
        text = failed(capsys, "train", "Pendulum-v1", *QUICK, "--out", locked / "run")
        inside = failed(capsys, "train", "Pendulum-v1", *QUICK, "--out", locked)
    finally:
        if root:
            os.seteuid(0)
    assert "Permission denied" in text and "Permission denied" in inside
    assert list(locked.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("{", "not valid JSON"),
        ({"gamma": "high"}, "gamma cannot be 'high'"),
        ({"gamma": 7}, "--gamma must be between 0 and 1"),
        ({"seeds": []}, "seeds cannot be []"),
        ({"env": None}, "env cannot be None"),
        ({"preset": "best"}, "preset cannot be 'best'"),
        ({"preset": []}, "preset cannot be []"),
        (100_000 * "[", "not valid JSON"),
        ({"callable": True}, "made by a function in Python"),
        ({"gama": 1}, "no option 'gama'. Did you mean gamma?"),
        ({"hidden": "256"}, "hidden cannot be '256'"),
        ({"steps": 1.5}, "steps cannot be 1.5"),
        ({"format": 99}, "format 99"),
        ({"threads": 0}, "--threads must be between 1"),
    ],
)
def test_a_corrupt_config_is_a_sentence(run, change, sentence, tmp_path, capsys):
    config = json.loads((run / "config.json").read_text())
    text = change if isinstance(change, str) else json.dumps({**config, **change})
    (tmp_path / "config.json").write_text(text)
    out = failed(capsys, "train", "--config", tmp_path / "config.json", "--out", tmp_path / "new")
    assert sentence in out
    assert not (tmp_path / "new").exists()


def test_python_has_the_same_sentences(tmp_path):
    for settings, sentence in (
        ({"gama": 0.9}, "no option 'gama'. Did you mean gamma?"),
        ({"preset": "papr"}, "Did you mean paper?"),
        ({"steps": 2.5}, "steps cannot be 2.5"),
        ({"seeds": 0}, "between 1 and"),
        ({"seeds": "12"}, "seeds cannot be '12'"),
        ({"seeds": 2.5}, "seeds cannot be 2.5"),
        ({"seeds": [1.7]}, r"seeds cannot be \[1.7\]"),
    ):
        with pytest.raises(t3d.T3DError, match=sentence.replace("?", r"\?")):
            t3d.train("Pendulum-v1", out=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_an_edited_config_does_not_break_evaluate(run, tmp_path, capsys):
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", run, copy], check=True)
    config = json.loads((copy / "config.json").read_text())
    for change, sentence in (({"threads": 0}, "--threads"), ({"eval_episodes": 0}, "--eval-episodes")):
        (copy / "config.json").write_text(json.dumps({**config, **change}))
        assert "does not match its own checksum" in failed(capsys, "evaluate", copy, "--episodes", "3")
        Run(copy).write_config({**without_sum(config), **change})
        assert f"{sentence} must be between 1" in failed(capsys, "evaluate", copy, "--episodes", "3")


def test_a_terminal_without_unicode(run):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "t3d", "evaluate", str(run)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    result = subprocess.run([*command[:-1], "r\u00e9"], env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and "there is no run r?" in result.stderr


def test_no_update_is_said(tmp_path, capsys):
    main(["train", "Pendulum-v1", "--preset", "paper", "--steps", "190", "--hidden", "8", "--eval-episodes", "1",
          "--device", "cpu", "--out", str(tmp_path / "run")])  # fmt: skip
    assert "No update was run: no episode ended" in capsys.readouterr().out


def test_a_reader_that_leaves_does_not_stop_the_run(tmp_path):
    command = [sys.executable, "-m", "t3d", "train", "Pendulum-v1", *QUICK, "--out", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.wait() == 0 and process.stderr.read() == b""
    assert t3d.Run(tmp_path / "run").evaluations[-1]["step"] == 300


def test_ctrl_c_keeps_what_was_learned(tmp_path):
    command = [sys.executable, "-m", "t3d", "train", "Pendulum-v1", *QUICK, "--steps", "1e6", "--out", tmp_path / "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while "step       300" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130 and "Stopped and saved at step" in out and "Traceback" not in err
    assert t3d.load(tmp_path / "run").card.env == "Pendulum-v1"


def test_a_file_does_not_decide_what_is_imported(run, tmp_path, capsys):
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", run, copy], check=True)
    config = json.loads((copy / "config.json").read_text())
    Run(copy).write_config({**without_sum(config), "env": "antigravity:Pendulum-v1"})
    assert "--allow-module antigravity" in failed(capsys, "evaluate", copy)
    text = failed(capsys, "train", "--config", copy / "config.json", "--out", tmp_path / "new")
    assert "type it: " in text and "train antigravity:Pendulum-v1 --config" in text
    assert "antigravity" not in sys.modules and not (tmp_path / "new").exists()


def test_a_full_standard_output_does_not_stop_the_run(tmp_path):
    command = [sys.executable, "-m", "t3d", "train", "Pendulum-v1", *QUICK, "--out", str(tmp_path / "run")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and done.stderr.count("cannot write to standard output") == 1
    assert Run.open(tmp_path / "run").evaluations
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*command[:-1], str(tmp_path / "second")], stdout=full, stderr=full)
    assert done.returncode == 0 and Run.open(tmp_path / "second").evaluations


def test_the_command_to_go_on_can_be_typed(run, tmp_path):
    assert Run.open(run).command("resume", steps=500).endswith(f" resume {run} --steps 500")
    changes = ({"env": "bots.arm:Arm-v0"}, {"env_args": {"model": "arm.xml"}}, {"callable": True}, {"network": "mine"})
    said = []
    for number, change in enumerate(changes):
        copy = tmp_path / f"a {number}"
        shutil.copytree(run, copy)
        crafted.config(copy, **change)
        said.append(Run.open(copy).command("resume", on_env_error="cut"))
    assert said[0].endswith(f" resume '{tmp_path}/a 0' --on-env-error cut --allow-module bots.arm")
    assert said[1].endswith(f" resume '{tmp_path}/a 1' --on-env-error cut --allow-env-args")
    assert said[2] == f"t3d.resume('{tmp_path}/a 2', env=make_env, on_env_error='cut')"
    assert said[3] == f"t3d.resume('{tmp_path}/a 3', network=your_network, on_env_error='cut')"
