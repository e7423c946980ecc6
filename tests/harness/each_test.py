"""Runs each test of a program in a process of its own, some at a time: for tests that mostly wait."""
import concurrent.futures, os, subprocess, sys, unittest


def names():
    def all_of(suite):
        return [name for part in suite for name in (all_of(part) if isinstance(part, unittest.TestSuite) else [".".join(part.id().split(".")[1:])])]

    return all_of(unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"]))


def run_each(arguments, jobs, skipped=77):
    """Calls this program with `arguments` and the name of a test, for each test. Returns the exit code: 1 if one fails, `skipped` if all are skipped."""
    def run(name):
        done = subprocess.run([sys.executable, sys.argv[0], *arguments, name], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
        return name, done.returncode, done.stdout

    codes = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for name, code, text in pool.map(run, names()):
            codes.append(code)
            print(f"{name}: exit code {code}" + ("" if code == 0 else f"\n{text}"), flush=True)
    if not codes:
        raise AssertionError("no tests")
    return skipped if set(codes) == {skipped} else int(any(codes))
