"""The command ``numpy-rmm``: what it says, and that programs under it notice
nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import numpy_rmm

Done = subprocess.CompletedProcess[str]


def execute(command: list[str], cwd: Path, **environ: str) -> Done:
    env = {**os.environ, **environ}
    if "PYTHONPATH" in env:  # a relative one would point elsewhere from `cwd`
        paths = env["PYTHONPATH"].split(os.pathsep)
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False
    )


def numpy_rmm_command(cwd: Path, *arguments: str, **environ: str) -> Done:
    return execute([sys.executable, "-m", "numpy_rmm", *arguments], cwd, **environ)


def write(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


# ---- run: as without -----------------------------------------------------------------

PROGRAMS = {
    "arguments": "import sys; print(sys.argv, sys.path[0])",
    "names of main": "print(sorted(globals()), __name__, __file__, __package__)",
    "main is imported": "import __main__; x = 3; print(__main__.x, __main__.__spec__)",
    "loader": "print(type(__loader__).__name__, __loader__.name, __loader__.path)",
    "result": "import numpy as np; print((np.arange(1e6) * 2).sum())",
    "exit status": "raise SystemExit(3)",
    "exit text": "import sys; sys.exit('no such thing')",
    "traceback": "def f():\n    return 1 / 0\n\n\nf()",
    "chained": (
        "try:\n    {}[0]\nexcept KeyError as e:\n    raise ValueError('x') from e"
    ),
    "syntax error": "print('never')\nif:\n",
    "own hook": (
        "import sys\n"
        "sys.excepthook = lambda *a: print(a[0], a[2].tb_lineno)\n"
        "raise OSError"
    ),
    "coding": "# coding: latin-1\nprint(ascii('é'))",
    "pickle": (
        "import pickle\nclass C: pass\n"
        "print(type(pickle.loads(pickle.dumps(C()))) is C, C.__module__)"
    ),
    "threads and exit handlers": (
        "import atexit, threading, time\n"
        "x = 1\n"
        "atexit.register(lambda: print('exit', x))\n"
        "def late():\n    time.sleep(0.2)\n    print('late', x)\n"
        "threading.Thread(target=late).start()\nx = 2\n"
    ),
    "spawn": (
        "import multiprocessing as m\n"
        "def f(n): return n + 1\n"
        "if __name__ == '__main__':\n"
        "    m.set_start_method('spawn')\n"
        "    with m.Pool(1) as pool: print(pool.map(f, [1, 2]))\n"
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_run_is_as_without(name: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_bytes(PROGRAMS[name].encode("latin-1"))
    arguments = ["program.py", "--stats", "-m", "x y"]
    plain = execute([sys.executable, *arguments], tmp_path)
    ours = numpy_rmm_command(tmp_path, "run", "--handler", "host", *arguments)
    assert ours.stdout == plain.stdout
    assert ours.stderr == plain.stderr
    assert ours.returncode == plain.returncode


def test_run_takes_a_module(tmp_path: Path) -> None:
    write(
        tmp_path / "module.py",
        """\
        import sys
        print(sys.argv, sys.path[0], __spec__.name, sorted(globals()))
        raise RuntimeError("as without")
        """,
    )
    plain = execute([sys.executable, "-m", "module", "-m", "1"], tmp_path)
    ours = numpy_rmm_command(tmp_path, "run", "-m", "module", "-m", "1")
    assert (ours.stdout, ours.stderr) == (plain.stdout, plain.stderr)
    assert ours.returncode == plain.returncode == 1


@pytest.mark.parametrize("kind", ["directory", "zip"])
def test_run_takes_what_python_takes(kind: str, tmp_path: Path) -> None:
    code = "import sys, helper; print(sys.argv[1:], helper.x, __name__)"
    app = tmp_path / "app"
    if kind == "directory":
        app.mkdir()
        (app / "__main__.py").write_text(code)
        (app / "helper.py").write_text("x = 7")
    else:
        with zipfile.ZipFile(app, "w") as file:
            file.writestr("__main__.py", code)
            file.writestr("helper.py", "x = 7")
    plain = execute([sys.executable, "app", "a"], tmp_path)
    ours = numpy_rmm_command(tmp_path, "run", "app", "a")
    assert (ours.stdout, ours.returncode) == (plain.stdout, 0)


def test_run_takes_compiled_files(tmp_path: Path) -> None:
    import py_compile

    source = write(tmp_path / "program.py", "print(__file__, __name__)")
    py_compile.compile(str(source), cfile=str(tmp_path / "program.pyc"))
    plain = execute([sys.executable, "program.pyc"], tmp_path)
    ours = numpy_rmm_command(tmp_path, "run", "program.pyc")
    assert (ours.stdout, ours.returncode) == (plain.stdout, 0)


def test_run_dies_of_an_interrupt_as_without(tmp_path: Path) -> None:
    write(tmp_path / "program.py", "raise KeyboardInterrupt")
    plain = execute([sys.executable, "program.py"], tmp_path)
    ours = numpy_rmm_command(tmp_path, "run", "program.py")
    assert ours.returncode == plain.returncode == -signal.SIGINT
    assert ours.stderr == plain.stderr


# ---- run: with -----------------------------------------------------------------------

NAMES = """\
import threading
import numpy as np
try:
    from numpy._core.multiarray import get_handler_name
except ImportError:
    from numpy.core.multiarray import get_handler_name
def show():
    print(get_handler_name(np.empty(1 << 20)))
show()
thread = threading.Thread(target=show)
thread.start()
thread.join()
"""


def test_run_puts_the_arrays_of_every_thread_under_the_handler(tmp_path: Path) -> None:
    write(tmp_path / "program.py", NAMES)
    done = numpy_rmm_command(tmp_path, "run", "--handler=host", "program.py")
    assert re.fullmatch(r"(numpy_rmm:host#\d+)\n\1\n", done.stdout), done.stderr


def test_run_prints_the_peak_and_the_counts(tmp_path: Path) -> None:
    write(
        tmp_path / "program.py",
        """\
        import atexit
        import numpy as np
        for _ in range(3):
            np.ones(1 << 20)
        atexit.register(lambda: np.ones(1 << 21))
        """,
    )
    arguments = ("run", "--handler", "host", "--stats", "program.py")
    done = numpy_rmm_command(tmp_path, *arguments)
    assert done.stdout == ""
    assert done.returncode == 0
    assert re.match(r"numpy-rmm: numpy_rmm:host#\d+: peak 16\.\d MiB", done.stderr)
    assert "0 errors" in done.stderr


def test_run_prints_the_counts_of_a_program_that_fails(tmp_path: Path) -> None:
    write(tmp_path / "program.py", "raise SystemExit(5)")
    done = numpy_rmm_command(tmp_path, "run", "--stats", "program.py")
    assert done.returncode == 5
    assert "peak" in done.stderr


def test_run_without_a_gpu_takes_host_memory(tmp_path: Path) -> None:
    write(tmp_path / "program.py", NAMES)
    done = numpy_rmm_command(tmp_path, "run", "program.py", CUDA_VISIBLE_DEVICES="")
    assert done.stdout.startswith("numpy_rmm:host#"), done.stderr


# ---- wrong input ---------------------------------------------------------------------

WRONG = {
    "no command": ([], "no command given"),
    "unknown command": (["demos"], "unknown command 'demos'"),
    "info with arguments": (["info", "all"], "no arguments"),
    "run without a program": (["run"], "needs a program"),
    "run without a module": (["run", "-m"], "needs a program"),
    "unknown option": (["run", "--handlers", "x"], "not --handlers"),
    "handler without a name": (["run", "--handler"], "needs a name"),
    "no such file": (["run", "no.py"], "'no.py': no such file"),
    "unknown handler": (["run", "--handler", "fast", "here.py"], "fast"),
    "no GPU": (["run", "--handler", "pinned", "here.py"], "CUDA"),
    "demo without its file": (["demo", "no.npy"], "no.npy: No such file"),
    "demo of two files": (["demo", "a", "b"], "one file"),
    "demo of a text": (["demo", "here.py"], "not a .npy file"),
    "demo of words": (["demo", "words.npy"], "<U1"),
    "demo of objects": (["demo", "objects.npy"], "not a .npy file of numbers"),
    "demo of a vector": (["demo", "vector.npy"], "shape (7,)"),
    "demo of five channels": (["demo", "five.npy"], "1, 3 or 4 channels"),
    "demo of nothing": (["demo", "nothing.npy"], "shape (0, 8, 8)"),
    "demo of infinities": (["demo", "infinite.npy"], "not finite"),
    "demo of an archive": (["demo", "several.npz"], "several arrays"),
}


@pytest.fixture(scope="module")
def wrong_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wrong")
    (path / "here.py").write_text("print('ran')")
    np.save(path / "words.npy", np.array(["a"]))
    np.save(path / "objects.npy", np.array([{}]), allow_pickle=True)
    np.save(path / "vector.npy", np.zeros(7))
    np.save(path / "five.npy", np.zeros((1, 8, 8, 5), np.uint8))
    np.save(path / "nothing.npy", np.zeros((0, 8, 8)))
    np.save(path / "infinite.npy", np.full((8, 8), np.inf))
    np.savez(path / "several.npz", a=np.zeros(3))
    return path


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named(name: str, wrong_files: Path) -> None:
    arguments, said = WRONG[name]
    done = numpy_rmm_command(wrong_files, *arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("numpy-rmm: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# ---- info and demo -------------------------------------------------------------------


def test_help_names_every_command(tmp_path: Path) -> None:
    done = numpy_rmm_command(tmp_path, "--help")
    assert done.returncode == 0
    for command in ("info", "demo", "run"):
        assert re.search(rf"^  {command}\b", done.stdout, re.MULTILINE)


def test_version(tmp_path: Path) -> None:
    done = numpy_rmm_command(tmp_path, "--version")
    assert done.stdout == f"numpy-rmm {numpy_rmm.__version__}\n"


def test_info_prints_the_report(tmp_path: Path) -> None:
    done = numpy_rmm_command(tmp_path, "info", NUMPY_RMM_PINNED_THRESHOLD="128 KiB")
    assert done.returncode == 0, done.stderr
    assert np.__version__ in done.stdout
    assert re.search(r"pinned_threshold\b.*128 KiB", done.stdout)


@pytest.mark.parametrize("arguments", [["info"], ["--help"], ["demo"]])
def test_a_reader_that_has_enough_is_no_error(
    arguments: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "numpy_rmm", *arguments]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_info_lists_the_devices_and_their_attributes(tmp_path: Path) -> None:
    done = numpy_rmm_command(
        tmp_path,
        "info",
        NUMPY_RMM_CUDA_LIBRARY="simulator",
        NUMPY_RMM_SIMULATED_DEVICES="2",
    )
    assert done.returncode == 0, done.stderr
    assert "device 1:" in done.stdout
    assert "concurrent_managed_access 1" in done.stdout


VERDICT = re.compile(
    r"(array arithmetic \d+\.\d+ × .*; 0 lines changed|no gain here, because .+)"
)


def test_demo_ends_in_a_verdict(tmp_path: Path) -> None:
    done = numpy_rmm_command(tmp_path, "demo")
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert re.search(r"^default +default_allocator +host ", done.stdout, re.MULTILINE)
    assert re.search(r"^numpy_rmm +numpy_rmm:\w+#\d+ +\w+ ", done.stdout, re.MULTILINE)
    assert VERDICT.fullmatch(done.stdout.splitlines()[-1])


def test_demo_on_photographs(tmp_path: Path) -> None:
    if not (find_spec("sklearn") and find_spec("PIL")):
        pytest.skip("needs scikit-learn and pillow")
    # in a process of its own: the library would slow down every test after this one
    code = (
        "import numpy as np, sklearn.datasets as d; "
        "np.save('photographs', np.stack(d.load_sample_images().images))"
    )
    made = execute([sys.executable, "-c", code], tmp_path)
    assert made.returncode == 0, made.stderr
    done = numpy_rmm_command(tmp_path, "demo", "photographs.npy")
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert done.stdout.startswith("2 × 427 × 640 × 3 uint8 images")
    assert VERDICT.fullmatch(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ((16, 16), "1 × 16 × 16 × 1"),
        ((16, 16, 4), "1 × 16 × 16 × 4"),
        ((5, 16, 16), "5 × 16 × 16 × 1"),
    ],
)
def test_demo_takes_images_of_each_shape(
    shape: tuple[int, ...], shown: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "images.npy", np.ones(shape, ">u2"))
    done = numpy_rmm_command(tmp_path, "demo", "images.npy")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{shown} >u2 images")


def test_the_pipeline_normalises() -> None:
    from numpy_rmm._demo import normalise, own_frames

    frames = own_frames()
    result = normalise(frames)
    assert frames.dtype == np.uint8
    assert frames.std() > 20
    assert result.dtype == np.float32
    assert result.shape == (12, 3, 480, 640)
    assert abs(result.mean()) < 1
    assert np.abs(result).max() <= 3
    assert 0.5 < result.std() < 2
