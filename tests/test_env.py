"""The environments: made whole or made anew, by one maker at a time, and refused with a reason."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import env, env_facts, env_make
from pipeline.env_facts import ABSENT, HALF_MADE, READY, STALE, STALE_PLUGIN, Spec
from pipeline.errors import Refused

# Stands in for venv and pip: notes each call, obeys the files of its folder (FAKE): `sleep-STEP` (seconds), `fail-STEP`
# (text printed before exit 1; the file goes away, so the next call succeeds).  It installs metadata for every pin.
FAKE_TOOL = r"""
import json, os, pathlib, re, sys, time
tool, folder, *arguments = sys.argv[1:]
folder, control = pathlib.Path(folder), pathlib.Path(os.environ["FAKE"])
pip_step = "packages" if "-r" in arguments else "plugin" if "--no-index" in arguments else "torch"
step = "venv" if tool == "venv" else pip_step

def note(what):
    with open(control / "trace", "a") as trace:
        trace.write(json.dumps([what, step, arguments]) + "\n")

note("begin")
site = folder / "lib" / ("python%d.%d" % sys.version_info[:2]) / "site-packages"
if tool == "venv":
    (folder / "bin").mkdir(parents=True)
    site.mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("home = /nowhere\n")
    (folder / "bin" / "python").symlink_to(sys.executable)
if (control / ("sleep-" + step)).exists():
    time.sleep(float((control / ("sleep-" + step)).read_text()))
if (control / ("fail-" + step)).exists():
    print((control / ("fail-" + step)).read_text())
    (control / ("fail-" + step)).unlink()
    sys.exit(1)
if step == "packages":
    pins = re.findall(r"^(\S+)==(\S+)", pathlib.Path(arguments[-1]).read_text(), re.M)
elif step == "torch":
    pins = re.findall(r"(torch)==(\S+)", " ".join(arguments))
else:
    pins = []
    if step == "plugin":
        note(sorted(str(p.relative_to(arguments[-1])) for p in pathlib.Path(arguments[-1]).rglob("*") if p.is_file()))
for name, version in pins:
    info = site / ("%s-%s.dist-info" % (name, version))
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: %s\nVersion: %s\n" % (name, version))
note("end")
"""
LOCK = "alpha==1.0 \\\n    --hash=sha256:00\n"


class Workshop:
    """A small repository with the environments `plain` and `full` (torch and a plugin), and the stand-in tool."""

    def __init__(self, root: Path) -> None:
        self.repo, self.envs, self.control = root / "repo", root / "envs", root / "fake"
        (self.repo / "requirements").mkdir(parents=True)
        self.control.mkdir()
        self.tool = self.control / "tool.py"
        self.tool.write_text(FAKE_TOOL)
        for name in ("plain", "full"):
            self.lock(name).write_text(LOCK)
        self.plugin = self.repo / "plugin"
        (self.plugin / "package").mkdir(parents=True)
        (self.plugin / "tests").mkdir()
        (self.plugin / "pyproject.toml").write_text("[project]\nname = 'plugin'\n")
        (self.plugin / "package" / "__init__.py").write_text("")
        (self.plugin / "tests" / "test_it.py").write_text("")

    def lock(self, name: str) -> Path:
        return self.repo / "requirements" / f"{name}.txt"

    def trace(self) -> list:
        path = self.control / "trace"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self, what: str = "begin") -> list[str]:
        return [step for event, step, _ in self.trace() if event == what]

    def forget(self) -> None:
        (self.control / "trace").unlink()

    def wait_for(self, step: str) -> None:
        limit = time.monotonic() + 10
        while step not in self.steps():
            assert time.monotonic() < limit, f"{step} never began: {self.trace()}"
            time.sleep(0.02)


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    shop = Workshop(tmp_path)
    specs = {"plain": Spec("a plain one", 1), "full": Spec("a full one", 1, cpu_torch=True, plugin="plugin")}
    monkeypatch.setattr(env_facts, "REPO", shop.repo)
    monkeypatch.setattr(env_facts, "SPECS", specs)
    monkeypatch.setattr(env, "SPECS", specs)
    monkeypatch.setattr(env, "DEFAULT", ("plain", "full"))
    monkeypatch.setenv("K3Q_ENVS", str(shop.envs))
    monkeypatch.setenv("FAKE", str(shop.control))
    for variable in ("K3Q_TORCH", "K3Q_TORCH_INDEX", "K3Q_LAUNCH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(env_make, "venv_command", lambda folder: [sys.executable, str(shop.tool), "venv", str(folder)])
    monkeypatch.setattr(
        env_make, "pip_install", lambda name: [sys.executable, str(shop.tool), "pip", str(shop.envs / name)]
    )
    return shop


def in_child(function, *arguments) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


# --- made once, made whole --------------------------------------------------------------------------------------------


def test_made_once_then_found(workshop):
    assert env_facts.state("full") == ABSENT
    assert env.ensure("full") == workshop.envs / "full" / "bin" / "python"
    assert workshop.steps() == ["venv", "torch", "packages", "plugin"]
    assert env_facts.state("full") == READY
    env.ensure("full")
    assert len(workshop.steps()) == 4


@pytest.mark.parametrize("step", ["venv", "torch", "packages"])
def test_half_made_is_made_anew(workshop, step):
    (workshop.control / f"fail-{step}").write_text("something broke")
    with pytest.raises(env_make.NotMade, match=rf"environment full .*{'interpreter' if step == 'venv' else step}"):
        env.ensure("full")
    assert env_facts.state("full") == HALF_MADE
    (workshop.envs / "full" / "remains").write_text("of the first attempt")
    env.ensure("full")
    assert env_facts.state("full") == READY
    assert not (workshop.envs / "full" / "remains").exists()


def test_vanished_interpreter_is_half_made(workshop):
    env.ensure("plain")
    (workshop.envs / "plain" / "bin" / "python").unlink()
    (workshop.envs / "plain" / "bin" / "python").symlink_to("/nowhere/python3.11")
    assert env_facts.state("plain") == HALF_MADE


def test_changed_lock_is_stale_and_made_anew(workshop):
    env.ensure("plain")
    workshop.lock("plain").write_text("alpha==2.0 \\\n    --hash=sha256:00\n")
    assert env_facts.state("plain") == STALE
    env.ensure("plain")
    assert env_facts.installed_versions("plain") == {"alpha": "2.0"}


def test_lock_edited_while_it_is_installed_leaves_a_stale_environment(workshop):
    (workshop.control / "sleep-packages").write_text("0.6")
    maker = in_child(env.ensure, "plain")
    workshop.wait_for("packages")
    workshop.lock("plain").write_text(LOCK + "# another resolution, the same packages\n")
    maker.join()
    assert env_facts.state("plain") == STALE


def test_what_pip_left_out_is_not_called_ready(workshop):
    workshop.lock("plain").write_text(LOCK + "beta[extra]==3.0 \\\n    --hash=sha256:00\n")  # the stand-in skips extras
    with pytest.raises(env_make.NotMade, match="beta absent instead of 3.0"):
        env.ensure("plain")
    assert env_facts.state("plain") == HALF_MADE


def test_another_torch_is_not_called_ready(workshop, monkeypatch):
    monkeypatch.setenv("K3Q_TORCH", "torch==1.0")
    with pytest.raises(env_make.NotMade, match=r"torch 1\.0 instead of 2\.13\.0"):
        env.ensure("full")


def test_libraries_that_do_not_load_are_not_called_ready(workshop, monkeypatch):
    monkeypatch.setitem(env_facts.SPECS, "plain", Spec("", 1, imports=("no_such_native_library",)))
    with pytest.raises(env_make.NotMade, match="No module named 'no_such_native_library'"):
        env.ensure("plain")
    assert env_facts.state("plain") == HALF_MADE


# --- the plugin has a stamp of its own --------------------------------------------------------------------------------


def test_changed_plugin_reinstalls_only_the_plugin(workshop):
    env.ensure("full")
    workshop.forget()
    (workshop.plugin / "tests" / "test_it.py").write_text("# its tests are not installed")
    assert env_facts.state("full") == READY
    (workshop.plugin / "package" / "__init__.py").write_text("VERSION = 2")
    assert env_facts.state("full") == STALE_PLUGIN
    env.ensure("full")
    assert workshop.steps() == ["plugin"]
    assert env_facts.state("full") == READY


def test_plugin_that_fails_is_tried_again_alone(workshop):
    (workshop.control / "fail-plugin").write_text("does not build")
    with pytest.raises(env_make.NotMade, match="step `plugin`"):
        env.ensure("full")
    assert env_facts.state("full") == STALE_PLUGIN
    workshop.forget()
    env.ensure("full")
    assert workshop.steps() == ["plugin"]


def test_plugin_that_broke_off_is_not_trusted_when_its_source_goes_back(workshop):
    env.ensure("full")
    (workshop.plugin / "package" / "__init__.py").write_text("VERSION = 2")
    (workshop.control / "fail-plugin").write_text("killed half-way")
    with pytest.raises(env_make.NotMade):
        env.ensure("full")
    (workshop.plugin / "package" / "__init__.py").write_text("")
    assert env_facts.state("full") == STALE_PLUGIN


def test_plugin_is_built_from_a_copy_of_its_sources(workshop):
    (workshop.plugin / "package" / "__pycache__").mkdir()
    (workshop.plugin / "package" / "__pycache__" / "old.pyc").write_text("")
    env.ensure("full")
    (built_from,) = [
        arguments[-1] for event, step, arguments in workshop.trace() if (event, step) == ("begin", "plugin")
    ]
    assert not built_from.startswith(str(workshop.repo))
    (files,) = [event for event, *_ in workshop.trace() if isinstance(event, list)]
    assert files == ["package/__init__.py", "pyproject.toml"]


# --- several makers, killed makers, running users ---------------------------------------------------------------------


def test_makers_wait_for_each_other_and_say_so(workshop, capfd):
    (workshop.control / "sleep-packages").write_text("0.6")
    first = in_child(env.ensure, "plain")
    workshop.wait_for("packages")
    second = in_child(env.ensure, "plain")
    first.join(), second.join()
    assert (first.exitcode, second.exitcode) == (0, 0)
    assert workshop.steps() == ["venv", "packages"]
    assert f"plain: waiting for another maker (process {first.pid})" in capfd.readouterr().err


def test_pip_of_a_killed_maker_keeps_the_next_one_out(workshop):
    (workshop.control / "sleep-packages").write_text("0.8")
    maker = in_child(env.ensure, "plain")
    workshop.wait_for("packages")
    os.kill(maker.pid, signal.SIGKILL)
    maker.join()
    assert workshop.steps("end") == ["venv"]  # its pip is still at work
    env.ensure("plain")
    order = [(event, step) for event, step, _ in workshop.trace()]
    assert order.index(("end", "packages")) < order.index(("begin", "venv"), 1)
    assert env_facts.state("plain") == READY


def test_interrupted_maker_ends_its_pip(workshop):
    (workshop.control / "sleep-packages").write_text("20")
    maker = in_child(env.ensure, "plain")
    workshop.wait_for("packages")
    os.kill(maker.pid, signal.SIGINT)
    maker.join(5)
    assert maker.exitcode not in (None, 0)
    (workshop.control / "sleep-packages").unlink()
    begun = time.monotonic()
    env.ensure("plain")
    assert time.monotonic() - begun < 10, "the interrupted pip still held the lock"


@pytest.mark.parametrize("act", [env.ensure, env.remove])
def test_nothing_changes_under_a_running_process(workshop, act):
    python = env.ensure("plain")
    workshop.lock("plain").write_text("alpha==2.0 \\\n    --hash=sha256:00\n")
    with subprocess.Popen([python, "-S", "-c", "input()"], stdin=subprocess.PIPE) as user:
        with pytest.raises(Refused, match=f"process {user.pid} runs in it"):
            act("plain")
        assert env_facts.installed_versions("plain") == {"alpha": "1.0"}
        user.stdin.close()
    act("plain")
    assert env_facts.state("plain") in (READY, ABSENT)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_unknown_name_lists_the_known_ones(workshop):
    with pytest.raises(Refused, match="'serve': there are plain, full"):
        env.ensure("serve")


def test_another_python_is_refused_but_a_ready_environment_serves_it(workshop, monkeypatch):
    env.ensure("plain")
    monkeypatch.setattr(env_make.sys, "version_info", (3, 13, 1))
    assert env.ensure("plain")
    with pytest.raises(Refused, match=r"environment full needs Python 3\.11"):
        env.ensure("full")
    assert env_facts.state("full") == ABSENT


def test_another_platform_is_refused(workshop, monkeypatch):
    monkeypatch.setattr(env_make.platform, "machine", lambda: "aarch64")
    with pytest.raises(Refused, match="aarch64"):
        env.ensure("plain")


def test_full_disk_is_refused_before_anything_is_lost(workshop, monkeypatch):
    env.ensure("plain")
    workshop.lock("plain").write_text("alpha==2.0 \\\n    --hash=sha256:00\n")
    monkeypatch.setitem(env_facts.SPECS, "plain", Spec("", 10**18))
    with pytest.raises(Refused, match=r"takes up to 1000000000 GB .* GB free"):
        env.ensure("plain")
    assert env_facts.installed_versions("plain") == {"alpha": "1.0"}


def test_a_strangers_folder_is_left_alone(workshop):
    (workshop.envs / "plain").mkdir(parents=True)
    (workshop.envs / "plain" / "thesis.txt").write_text("years of work")
    for act in (env.ensure, env.remove):
        with pytest.raises(Refused, match="not a Python environment"):
            act("plain")
    assert (workshop.envs / "plain" / "thesis.txt").exists()


def test_unwritable_home_is_refused(workshop, monkeypatch):
    (workshop.repo / "file").write_text("")
    monkeypatch.setenv("K3Q_ENVS", str(workshop.repo / "file"))
    with pytest.raises(Refused, match="cannot write to"):
        env.ensure("plain")


# --- where ------------------------------------------------------------------------------------------------------------


def test_relative_home_is_refused(monkeypatch):
    monkeypatch.setenv("K3Q_ENVS", "envs")
    with pytest.raises(Refused, match="absolute"):
        env.home()


def test_home_is_the_running_environments_else_the_outer_tree(workshop, monkeypatch, tmp_path):
    python = env.ensure("plain")
    monkeypatch.delenv("K3Q_ENVS")
    monkeypatch.setattr(env_facts.sys, "prefix", str(tmp_path / "elsewhere"))
    assert env.home() == workshop.repo / ".venvs"
    monkeypatch.setattr(env_facts, "REPO", workshop.repo / ".dvc" / "tmp" / "exps" / "standalone" / "tmp1234")
    assert env.home() == workshop.repo / ".venvs"
    monkeypatch.setattr(env_facts.sys, "prefix", str(python.parents[1]))
    assert env.home() == workshop.envs


# --- torch ------------------------------------------------------------------------------------------------------------


def torch_calls(workshop) -> list[str]:
    return [" ".join(arguments) for event, step, arguments in workshop.trace() if (event, step) == ("begin", "torch")]


def test_torch_is_asked_for_as_cpu_build_with_one_short_try_at_the_extra_index(workshop):
    env.ensure("full")
    (call,) = torch_calls(workshop)
    assert "torch==2.13.0+cpu" in call and "--no-deps" in call
    assert f"--extra-index-url {env_facts.TORCH_CPU_INDEX}" in call and "--retries 0 --timeout 5" in call


@pytest.mark.parametrize("index, expected", [("", False), ("https://mirror.example/cpu", True)])
def test_torch_index_can_be_switched_off_and_replaced(workshop, monkeypatch, index, expected):
    monkeypatch.setenv("K3Q_TORCH_INDEX", index)
    env.ensure("full")
    (call,) = torch_calls(workshop)
    assert (f"--extra-index-url {index}" in call) is expected
    assert env_facts.TORCH_CPU_INDEX not in call and "--retries" not in call


def test_torch_download_that_breaks_off_is_repeated_patiently(workshop):
    (workshop.control / "fail-torch").write_text("Downloading torch-2.13.0+cpu.whl (192 MB)\nERROR: Read timed out")
    env.ensure("full")
    first, second = torch_calls(workshop)
    assert "--retries" in first and "--retries" not in second


# --- real pip, small wheels -------------------------------------------------------------------------------------------


@pytest.fixture
def real_pip(workshop, monkeypatch):
    """Real venv and pip (the running environment's, on the new interpreter), an index that refuses connections."""
    monkeypatch.setattr(
        env_make, "venv_command", lambda folder: [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    )
    monkeypatch.setattr(
        env_make,
        "pip_install",
        lambda name: [sys.executable, "-m", "pip", "--python", str(env.python_of(name)), "install", "--no-input"],
    )
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("K3Q_TORCH_INDEX", "")
    wheels = workshop.repo / "wheels"
    wheels.mkdir()
    workshop.hashes = {
        stem: write_wheel(wheels, *stem) for stem in [("alpha", "1.0"), ("torch", "2.13.0"), ("torch", "2.13.0+cpu")]
    }
    workshop.lock("full").write_text(f"alpha==1.0 --hash=sha256:{workshop.hashes['alpha', '1.0']}\n")
    monkeypatch.setitem(env_facts.SPECS, "full", Spec("", 1, cpu_torch=True))
    return workshop


def write_wheel(folder: Path, name: str, version: str) -> str:
    """A wheel without content; returns its hash."""
    import hashlib
    import zipfile

    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_offline_error_names_environment_pips_words_and_remedies(real_pip):
    with pytest.raises(env_make.NotMade) as failed:
        env.ensure("full")
    message = str(failed.value)
    assert "environment full could not be made: step `torch`" in message
    assert "No matching distribution found for torch==2.13.0+cpu" in message
    assert "K3Q_TORCH_INDEX" in message and "python3 -m pipeline env make full" in message


def test_error_keeps_the_last_retry_and_pips_verdict(tmp_path):
    output = "\n".join(
        [
            "WARNING: Location 'file:///index/alpha/' is ignored: it is neither a file nor a directory.",
            *(
                f"WARNING: Retrying (Retry(total={left}, connect=None)) after connection broken"
                for left in range(30, -1, -1)
            ),
            "",
            "ERROR: No matching distribution found for alpha==1.0",
        ]
    )
    message = env_make.failure("plain", "packages", 1, output, tmp_path / "log")
    assert [line for line in message.splitlines() if line.startswith("  | ")] == [
        "  | WARNING: Retrying (Retry(total=0, connect=None)) after connection broken",
        "  | ERROR: No matching distribution found for alpha==1.0",
    ]


def test_offline_packages_point_to_carried_wheels_which_then_work(real_pip, monkeypatch):
    with pytest.raises(env_make.NotMade) as failed:
        env.ensure("plain")
    assert "PIP_NO_INDEX=1 PIP_FIND_LINKS=WHEELS" in str(failed.value)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(real_pip.repo / "wheels"))
    env.ensure("full")
    assert env_facts.installed_versions("full") == {"alpha": "1.0", "torch": "2.13.0+cpu"}


def test_cuda_build_is_never_taken_instead(real_pip, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(real_pip.repo / "wheels"))
    (real_pip.repo / "wheels" / "torch-2.13.0+cpu-py3-none-any.whl").unlink()
    with pytest.raises(env_make.NotMade, match=r"take what your index has: K3Q_TORCH=torch==2\.13\.0"):
        env.ensure("full")
    monkeypatch.setenv("K3Q_TORCH", "torch==2.13.0")
    env.ensure("full")
    assert env_facts.installed_versions("full")["torch"] == "2.13.0"


def test_file_that_differs_from_the_lock_is_not_installed(real_pip, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(real_pip.repo / "wheels"))
    real_pip.lock("full").write_text(f"alpha==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(env_make.NotMade, match="another file than the one that was locked"):
        env.ensure("full")


def test_package_without_a_hash_is_not_installed(real_pip, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(real_pip.repo / "wheels"))
    real_pip.lock("full").write_text("alpha==1.0\n")
    with pytest.raises(env_make.NotMade, match="Hashes are required"):
        env.ensure("full")


# --- command line -----------------------------------------------------------------------------------------------------


def test_list_make_path_remove(workshop, capsys):
    assert env.main(["make", "plain"]) == 0
    capsys.readouterr()
    assert env.main([]) == 0
    header, plain, full = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "state", "size", "path", "purpose"]
    assert plain.split()[:2] == ["plain", "ready"] and str(workshop.envs / "plain") in plain and "GB" in plain
    assert full.split()[:3] == ["full", "absent", "-"]
    assert env.main(["path", "plain"]) == 0
    assert capsys.readouterr().out == f"{workshop.envs}/plain/bin/python\n"
    assert env.main(["remove", "plain"]) == 0
    assert env_facts.state("plain") == ABSENT


def test_make_all_is_the_default_set_and_a_misspelt_name_makes_nothing(workshop):
    with pytest.raises(Refused, match="'fulll'"):
        env.main(["make", "plain", "fulll"])
    assert workshop.trace() == []
    with pytest.raises(Refused, match="'fulll'"):
        env.main(["remove", "fulll"])
    env.main(["make", "all"])
    assert [env_facts.state(name) for name in ("plain", "full")] == [READY, READY]


def run(*arguments: str) -> int:
    process = in_child(env.main, ["run", *arguments])
    process.join()
    return process.exitcode


def test_run_passes_arguments_output_and_exit_code(workshop, capfd):
    code = "import sys; print(sys.argv[1:], sys.executable); sys.exit(5)"
    assert run("plain", "--", "-S", "-c", code, "--flag", "--", "a b") == 5
    assert capfd.readouterr().out == f"['--flag', '--', 'a b'] {workshop.envs}/plain/bin/python\n"


def test_run_goes_through_the_launcher(workshop, monkeypatch, capfd):
    monkeypatch.setenv("K3Q_LAUNCH", f"{sys.executable} -c 'import sys; print(sys.argv[1:]); sys.exit(4)' --nodes=2")
    assert run("plain", "--", "-m", "stages.bench") == 4
    assert capfd.readouterr().out == f"['--nodes=2', '{workshop.envs}/plain/bin/python', '-m', 'stages.bench']\n"


def test_run_refuses_a_launcher_that_is_not_there(workshop, monkeypatch):
    monkeypatch.setenv("K3Q_LAUNCH", "no-such-launcher --nodes=2")
    with pytest.raises(Refused, match="no-such-launcher"):
        env.run_in("plain", ["-V"])


def test_run_does_not_lend_the_callers_packages(workshop, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", "/somebody/elses")
    run("plain", "--", "-S", "-c", "import sys; print(sys.path)")
    assert "/somebody/elses" not in capfd.readouterr().out


def test_run_puts_the_environments_tools_first_as_activate_does(workshop, capfd):
    """dvc's queue starts `dvc` by its name; where that is not on the path its workers die without a word."""
    run("plain", "--", "-S", "-c", "import os; print(os.environ['PATH'])")
    assert capfd.readouterr().out.split(os.pathsep)[0] == f"{workshop.envs}/plain/bin"


@pytest.mark.parametrize("module", [env, env_facts, env_make])
def test_only_the_standard_library_and_syntax_that_older_pythons_can_refuse_in(module):
    tree = ast.parse(Path(module.__file__).read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names | {"pipeline"}, name
